"""Fixtures and marks for the whole suite. `devices` runs a test on virtual devices and on every GPU
there is."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.device_sets import ACCELERATORS, ONE, THREE, TWO, DeviceSet

if TYPE_CHECKING:
    from tests.support.engines import Engines

WATCHED_FOLDERS = ("transparency", "failures", "stories", "gpu")
LONGEST_S, LONGEST_SLOW_S = 60, 300
GRID = 4
# Their tests take milliseconds.
WHOLE_FOLDERS = ("architecture", "autoplan", "microbatch", "plan", "quantized", "trace")
# Cases that stay at least where one takes a good part of a second: most of these tests have one
# device or three, with asynchronous steps or without, and each draws two of the four by its name.
# Cases of Trainers are two trainings each.
COSTLY = {
    **dict.fromkeys(("benchmarks", "engine", "failures", "forecast", "hf", "optim"), 2),
    **dict.fromkeys(("presets", "stories", "test_reached_peak.py", "transparency"), 2),
    **dict.fromkeys(("trainer", "trl"), 1),
}
FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an accelerator")
    config.addinivalue_line("markers", "slow: a long grid; left out with -m 'not slow'")
    # One: on shared cores two wait for each other at every small product, ten times the time for
    # the same bits. RoundPipe carries the number into its workers; processes that tests start
    # inherit it.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell has what it runs in the background ignore interrupts, which tests send.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Recurrent layers would compute in TF32 by default, far from what fp32 promises.
    torch.backends.cudnn.allow_tf32 = False


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A hang must end as a failure of its own test, also where a wait in the engine has no
    limit. Most of a large grid's cases are slow."""
    _mark_grids(items)
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            is_slow = item.get_closest_marker("slow") is not None
            is_watched = is_slow or item.path.parent.name in WATCHED_FOLDERS
            if is_watched and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LONGEST_SLOW_S if is_slow else LONGEST_S))


def _mark_grids(items: list[pytest.Item]) -> None:
    """Of a test with more than `GRID` cases a sixth stays, at least `GRID`. Where a case takes long
    at least as many stay as `COSTLY` says, and no more than show every value of every argument. The
    others are slow."""
    grids = defaultdict(list)
    for item in items:
        is_left = not any(map(item.get_closest_marker, ("slow", "gpu", "bitsandbytes")))
        is_whole = item.path.parent.name in WHOLE_FOLDERS and _least_of(item) is None
        if is_left and "[" in item.name and not is_whole:
            grids[item.nodeid.partition("[")[0]].append(item)
    for name, cases in grids.items():
        covering, others = _covering(name, cases)
        least, sixth = _least_of(cases[0]), len(cases) // 6
        staying = max(GRID, sixth) if least is None else min(max(least, sixth), len(covering))
        for item in [*covering, *others][staying:]:
            item.add_marker(pytest.mark.slow)


def _least_of(item: pytest.Item) -> int | None:
    """Cases that stay at least; None where they do not take long."""
    parts = item.path.relative_to(FOLDER).parts
    return min((COSTLY[part] for part in parts if part in COSTLY), default=None)


def _covering(name: str, cases: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Cases in which every argument has each of its values, and the others.

    They are drawn, by the test's name, because every fourth would be those of one device count.
    """
    others = random.Random(name).sample(cases, len(cases))
    # A value is the same object in each of its cases.
    values = {
        item: {(argument, id(value)) for argument, value in item.callspec.params.items()}  # type: ignore[attr-defined]
        for item in cases
    }
    missing, covering = set[tuple[str, int]]().union(*values.values()), []
    while missing:
        covering.append(max(others, key=lambda item: len(values[item] & missing)))
        others.remove(covering[-1])
        missing -= values[covering[-1]]
    return covering, others


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What is alive before a module's tests is frozen, so that collections look only at what its
    tests make.

    There are half a million objects of torch, transformers and pytest besides, and leak tests and
    the Trainers collect a thousand times: a third of the suite's time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(
    params=[
        ONE,
        pytest.param(
            TWO, marks=pytest.mark.slow
        ),  # between the others; many tests ask for two by name
        THREE,
        *(pytest.param(devices, marks=pytest.mark.gpu) for devices in ACCELERATORS),
    ],
    ids=str,
)
def devices(request: pytest.FixtureRequest) -> DeviceSet:
    return request.param


@pytest.fixture
def engines() -> Iterator[Engines]:
    # Imported here, so that tests of single parts run while the engine as a whole does not import.
    from tests.support.engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each replay of a captured layer."""
    from roundpipe.runtime.capture.layer import CapturedLayer

    seen: list[int] = []
    run = CapturedLayer.run

    def counted(self: CapturedLayer, *args: Any) -> Any:
        seen.append(1)
        return run(self, *args)

    monkeypatch.setattr(CapturedLayer, "run", counted)
    return seen
