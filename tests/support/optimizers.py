"""Torch optimizers that are slow on purpose: slowness is what the asynchronous tests are about."""

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 10.0
"""Anything waits so long for an event that must come; reached only when the thing under test is
broken."""


class PausingSGD(torch.optim.SGD):
    """SGD that calls `pause` before and after it writes, from inside `step`: where a half-done
    update would show."""

    def __init__(
        self, params: Iterable[Tensor], *, pause: Callable[[], None], **settings: Any
    ) -> None:
        super().__init__(params, **settings)
        self._pause = pause

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self._pause()
        result = super().step(closure)
        self._pause()
        return result


def random_delays(seed: int, longest_ms: float = 12.0) -> Callable[[], None]:
    """Sleep nothing half of the time, else up to `longest_ms`; the sequence is drawn from the
    seed."""
    draws = random.Random(seed)

    def pause() -> None:
        if draws.random() < 0.5:
            time.sleep(draws.random() * longest_ms / 1000)

    return pause


def every_third(delay_ms: float = 12.0) -> Callable[[], None]:
    """Sleep in every third step only (a step pauses twice)."""
    calls = 0

    def pause() -> None:
        nonlocal calls
        if (calls // 2) % 3 == 2:
            time.sleep(delay_ms / 1000)
        calls += 1

    return pause


class Gate:
    """A pause held shut by the test. Waiting past `PATIENCE_S` raises, so a deadlock becomes a
    failure with a name."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()

    def pause(self) -> None:
        self._reached.set()
        if not self._open.wait(PATIENCE_S):
            raise TimeoutError(
                "the test never got to open the gate: the engine waited for the update"
            )

    def open(self) -> None:
        self._open.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE_S), "nobody reached the gate"
