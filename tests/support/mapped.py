"""Counts the bytes of a mapped file that a process has made its own, as the kernel does. Linux
only."""

from pathlib import Path


def private_bytes(folder: Path) -> int:
    """Bytes of this process's mappings of the folder's safetensors files that were written, so
    copied, since."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the first line of a mapping
            is_ours = str(folder) in line and ".safetensors" in line
        elif is_ours and name == "Anonymous:":
            total += int(values[0]) * 1024
    return total
