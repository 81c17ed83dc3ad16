"""An update takes only so many threads that those which feed devices have cores too."""

import os
import threading

import pytest
import torch

from roundpipe.system.cores import leave_cores_for


@pytest.mark.parametrize(
    ("cores", "devices", "expected"),
    [(16, 1, 12), (16, 8, 7), (8, 1, 6), (4, 2, 1), (2, 1, 1), (1, 8, 1)],
)
def test_updates_leave_a_core_for_each_device_and_the_caller_and_a_quarter_of_all(
    cores: int, devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    before, seen = torch.get_num_threads(), []

    def optimizer_thread() -> None:
        leave_cores_for(devices)()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=optimizer_thread)
    thread.start()
    thread.join()
    assert seen == [expected]
    assert torch.get_num_threads() == before, "the caller's own threads"
