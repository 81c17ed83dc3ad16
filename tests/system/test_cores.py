"""Updates count on the cores of their process, not on those of the machine that its container is
on."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, virtual
from roundpipe.system import cgroups, cores
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


@pytest.mark.parametrize(("devices", "expected"), [(1, 4), (2, 2), (3, 1), (9, 1)])
def test_workers_of_virtual_devices_share_the_cores(
    devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computed with as many threads as its caller, which together were several times the
    cores, and waited for each other: 8 toy steps took ten times as long."""
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    seen: set[int] = set()

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        layers = nn.Sequential(*(Looks(3, 3) for _ in range(4)))
        with RoundPipe(layers, devices=virtual(devices)) as engine:
            engine(torch.ones(9, 3)).sum().backward()
    finally:
        torch.set_num_threads(before)
    assert seen == {expected}
