"""Makes an engine fail, or hang, at one chosen action: a model and devices with a hook at every
kind of action."""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.memory.pinning import HostArena
from roundpipe.testing.adversarial import AdversarialDevice
from roundpipe.testing.lanes import AdversarialLane
from tests.support.adversaries import FullDevice
from tests.support.engines import engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, Batch, mlp_batch
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import buffers_of

PLAN = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 7), range(2, 4), range(2)]
)
MICROBATCHES = 3
SPILLING_SITES = ["spill", "fetch"]
"""Reached on devices without room, whose kept inputs wait on the host."""
SITES = [
    *[
        "upload",
        "fetch",
        "forward",
        "fused",
        "loss",
        "fused backward",
        "recompute",
        "backward",
        "offloading",
    ],
    *(pytest.param(site, marks=pytest.mark.slow) for site in ("arrival", "spill")),
]
LATE_SITES = ["recompute", "backward", "offloading"]
"""What may still be to come when a call that draws nothing has returned."""


class Boom(Exception):
    """The injected error."""


class Injection:
    """Where something is to happen once, and what. Global to the tests, so that any copy of a layer
    finds it."""

    def __init__(self) -> None:
        self._site: str | None = None
        self._left = 0
        self._action: Callable[[], None] = lambda: None

    @property
    def is_armed(self) -> bool:
        return self._site is not None

    def arm(self, site: str, action: Callable[[], None], *, at: int = 2) -> None:
        """``action`` runs when ``site`` is reached for the ``at``-th time from now."""
        self._site, self._left, self._action = site, at, action

    def disarm(self) -> None:
        self._site = None

    def reach(self, site: str) -> None:
        if site != self._site:
            return
        self._left -= 1
        if self._left == 0:
            self.disarm()
            self._action()


INJECTION = Injection()


class HookedDevice(AdversarialDevice):
    """Reports every copy the engine queues by itself: weights and activations going up, gradients
    and activations going down."""

    def __init__(self, index: int, num_bytes: int | None = None) -> None:
        super().__init__(index, num_bytes=num_bytes)
        _report_copies(self.up, "upload", "fetch")
        _report_copies(self.down, "offloading", "spill")
        _report_arrivals(self.up)


class FullHookedDevice(HookedDevice, FullDevice):
    pass


def _report_copies(lane: AdversarialLane, site: str, site_of_kept_inputs: str) -> None:
    copy_ = lane.copy_

    def reported(target: Tensor, source: Tensor) -> None:
        is_kept_input = Path(sys._getframe(1).f_code.co_filename).stem == "spill"
        INJECTION.reach(site_of_kept_inputs if is_kept_input else site)
        copy_(target, source)

    lane.copy_ = reported  # type: ignore[method-assign]


def _report_arrivals(lane: AdversarialLane) -> None:
    """Of inputs, and of boundaries and gradients that come from another device."""
    intercept = lane.intercept

    def reported(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation._schema.name == "aten::_to_copy":
            INJECTION.reach("arrival")
        return intercept(operation, args, kwargs)

    lane.intercept = reported  # type: ignore[method-assign]


class HookedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, site: str) -> Tensor:
        ctx.site = site
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        INJECTION.reach(ctx.site)
        return gradient, None


def reach_in(model: Any) -> None:
    """A Hugging Face decoder reports what it does: its layer 1, its head, and its loss."""
    block, loss_function = model.model.layers[1], model.loss_function

    def report(_: nn.Module, args: Any) -> None:
        INJECTION.reach("recompute" if torch.is_grad_enabled() else "forward")

    def report_loss(*args: Any, **kwargs: Any) -> Tensor:
        INJECTION.reach("loss")
        loss: Tensor = loss_function(*args, **kwargs)
        return loss

    block.register_forward_pre_hook(report)
    block.register_forward_hook(lambda _, args, output: HookedBackward.apply(output, "backward"))
    model.lm_head.register_forward_pre_hook(lambda *_: INJECTION.reach("fused"))
    model.loss_function = report_loss


class Hooked(nn.Module):
    """A linear layer that reports what it does."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self._is_fused = is_fused

    def forward(self, hidden: Tensor) -> Tensor:
        # The engine has learnt the layer in an earlier call: in the forward pass it runs without
        # grad.
        again = "recompute" if torch.is_grad_enabled() else "forward"
        INJECTION.reach("fused" if self._is_fused else again)
        hooked: Tensor = HookedBackward.apply(
            self.linear(hidden), "fused backward" if self._is_fused else "backward"
        )
        return hooked


class Counting(nn.Module):
    """Counts its forwards in a buffer: a half-done call would show."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * 1.0


def make_hooked_model(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
        Counting(),
        Hooked(is_fused=False),
        nn.Dropout(dropout),
        nn.BatchNorm1d(MLP_WIDTH),
        Hooked(is_fused=True),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
    )


def hooked_batch() -> Batch:
    batch = mlp_batch(rows=6)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        INJECTION.reach("loss")
        loss: Tensor = batch.loss_fn(output, target)
        return loss

    return batch._replace(loss_fn=loss_fn)


BATCH = hooked_batch()


class HookedDevices:
    """Stands where a `DeviceSet` gives the `devices` argument. ``for_site``: has what it takes to
    reach that one."""

    def __init__(self, count: int, for_site: str | None = None) -> None:
        kind = FullHookedDevice if for_site in SPILLING_SITES else HookedDevice
        self.argument = [kind(index) for index in range(count)]

    def check(self) -> None:
        """Nothing was done without a wait."""
        assert [fault for device in self.argument for fault in device.faults] == []


def call_only(engine: RoundPipe) -> None:
    """A call, which may return before its late part."""
    run_batch(engine, BATCH, MICROBATCHES, execute_plan=PLAN)


def call(engine: RoundPipe) -> None:
    """A call, its late part included."""
    call_only(engine)
    engine.synchronize()


def raise_boom() -> None:
    raise Boom("injected")


class Interruption:
    """Ctrl-C for the main thread while another one hangs in user code.

    The hang ends when the interrupt has reached the main thread. Whichever of them then goes on
    first: both are right.
    """

    def __init__(self, *, is_allowed: bool = True) -> None:
        self._hangs, self._allowed, self._arrived = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        if is_allowed:
            self._allowed.set()

    @property
    def has_arrived(self) -> bool:
        return self._arrived.is_set()

    def hang(self) -> None:
        self._hangs.set()
        if not self._arrived.wait(PATIENCE_S):
            raise TimeoutError("the interrupt never reached the main thread")

    def allow(self) -> None:
        """The interrupt may come from now on."""
        self._allowed.set()

    def __enter__(self) -> "Interruption":
        self._is_left = False
        self._handler = signal.signal(signal.SIGINT, self._interrupt)
        self._sender = threading.Thread(target=self._send)
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self._hangs.set()
        self._allowed.set()
        self._sender.join()
        signal.signal(signal.SIGINT, self._handler)

    def _send(self) -> None:
        self._hangs.wait()
        self._allowed.wait()
        if self._is_left:
            return
        main = threading.main_thread().ident
        assert main is not None
        # A signal that comes just before a thread begins to wait wakes nobody, so it is sent until
        # it has arrived.
        while True:
            signal.pthread_kill(main, signal.SIGINT)
            if self._arrived.wait(0.1) or self._is_left:
                return

    def _interrupt(self, *_: object) -> None:
        if not self._arrived.is_set():
            self._arrived.set()
            raise KeyboardInterrupt


class Places:
    """Counts where Python may raise KeyboardInterrupt in the calling thread: where a function of
    some files begins, or a built-in one that it has called returns. Ctrl-C comes at one, or at the
    first after it that is in no generator expression: Python drops what is raised while one is
    being closed.

    Args:
        files: how their paths begin.
        place: which one; default none.
    """

    def __init__(self, files: tuple[str, ...], place: int | None = None) -> None:
        self.count = 0
        self.has_sent = False
        self._files = files
        self._place = place

    @contextmanager
    def watched(self) -> Iterator[None]:
        sys.setprofile(self._come_to)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _come_to(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self._files):
            self.count += 1
            is_due = self._place is not None and self.count >= self._place and not self.has_sent
            if is_due and frame.f_code.co_name != "<genexpr>":
                self.has_sent = True
                signal.raise_signal(signal.SIGINT)


class State:
    """Everything that a failed call must leave alone, the memory it may have used included."""

    def __init__(self, engine: RoundPipe) -> None:
        engine.synchronize()
        self.weights = engine_weights(engine)
        self.gradients = engine_gradients(engine)
        self.buffers = buffers_of(engine.model)
        self.generator = torch.get_rng_state()
        self.threads = set(threading.enumerate())


Held = dict[str, int]
# Of all tensors of the process one more was left once in a hundred runs, before copies of buffers
# were let go of first. What a failed call could leave is a microbatch's graph or a layer's
# gradients, which are many.
STRAY_TENSORS = 1


def held(engine: RoundPipe, *others: RoundPipe) -> Held:
    """What an idle engine keeps: slots by device, and all tensors and gradient memory of the
    process.

    Free blocks, free gradient memory and devices' copies of buffers are let go of first, those of
    ``others`` in the process too: how many there ever were is a matter of timing, and which device
    has come by a layer with a buffer one of how many calls there were.
    """
    for one in (engine, *others):
        one._host.worker_pool.blocks.clear()
        one._host.buffers.clear()
        for executor in one._runner.executors:
            executor._replicas.buffers.clear()
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    return {
        **engine.statistics()["slot_bytes"],
        "arenas": sum(issubclass(kind, HostArena) for kind in kinds),
        "tensors": sum(issubclass(kind, Tensor) for kind in kinds),
    }


def check_held(engine: RoundPipe, before: Held, *others: RoundPipe) -> None:
    """The engine holds no more than before. Its threads may take a moment to let go of their last
    job."""
    for _ in range(50):
        now = held(engine, *others)
        if all(
            now[name] <= count + STRAY_TENSORS * (name == "tensors")
            for name, count in before.items()
        ):
            return
    assert now == before, f"holds {now}, before {before}"
