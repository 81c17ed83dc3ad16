"""Updates count on the cores of their process, not on those of the machine that its container is
on."""

import os
from pathlib import Path

import pytest

from roundpipe.system import cgroups
from roundpipe.system.cores import usable_cores

V2, V1 = "0::{}\n", "4:memory:/elsewhere\n3:cpu,cpuacct:{}\n"


def usable(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    own_groups: str,
    files: dict[str, str],
    bound: int = 128,
) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setattr(cgroups, "_ALL", root / "groups")
    monkeypatch.setattr(cgroups, "_OWN", root / "own")
    (root / "own").write_text(own_groups)
    for name, text in files.items():
        file = root / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return usable_cores()


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        (V2.format("/"), {}, 128),
        (V2.format("/"), {"cpu.max": "max 100000\n"}, 128),
        (V2.format("/"), {"cpu.max": "800000 100000\n"}, 8),
        (V2.format("/"), {"cpu.max": "25000 50000\n"}, 1),
        (V2.format("/"), {"cpu.max": "250000 100000\n"}, 3),
        (
            V2.format("/pod/box"),
            {"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "600000 100000\n"},
            6,
        ),
        (
            V2.format("/pod/box"),
            {"pod/box/cpu.max": "400000 100000\n", "pod/cpu.max": "600000 100000\n"},
            4,
        ),
        (V2.format("/docker/of-the-host"), {"cpu.max": "400000 100000\n"}, 4),
        (V2.format("/../elsewhere"), {}, 128),
        (
            V1.format("/"),
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            128,
        ),
        (
            V1.format("/docker/x"),
            {"cpu/cpu.cfs_quota_us": "1600000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            16,
        ),
    ],
)
def test_a_containers_quota_counts(
    own_groups: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert usable(monkeypatch, tmp_path, own_groups, files) == expected


def test_a_quota_of_more_than_the_process_is_bound_to_gives_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        usable(monkeypatch, tmp_path, V2.format("/"), {"cpu.max": "800000 100000\n"}, bound=4) == 4
    )


def test_a_system_without_control_groups_has_the_cores_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "none")
    assert usable_cores() == 3
