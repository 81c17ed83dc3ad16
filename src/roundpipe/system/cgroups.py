"""The groups of processes that this one is in, which a container, or the system, gives less than
all there is."""

from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ALL = Path("/sys/fs/cgroup")


def own_groups(kind: str) -> list[Path]:
    """The folders of the group that limits ``kind`` (``"memory"``, ``"cpu"``) and of all it is part
    of, in each of the two versions of the interface. Those that this process may not see are
    missing there."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds and kind not in kinds.split(","):
            continue
        root = _ALL / kind if kinds else _ALL
        folder = root / path.lstrip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return folders
