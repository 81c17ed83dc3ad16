"""The optimizer thread, as the caller has it: queues commits and steps, waits, flushes, hears of
what failed. What its jobs do is in `work.py`.

[Note: versions] W_t are the weights after step t. A call made after t steps computes at version
``max(t - 1, s)``, s being the last step before a flush. Step t's job first writes back W_(t-1),
layer by layer, then runs ``step_fn``; it may write working copies because every call that read
older ones was committed by a job queued before it. Layers with an idle copy are written back by
their own step; see [Note: newest values].
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from ..params.gradients import Backward
from ..params.masters import Masters
from ..params.placement.device_states import DeviceStates
from ..params.rank_sums import Arriving, RankSums
from ..params.window import GradientWindow
from ..params.working import ParameterStore
from ..threads.interrupts import SteadyCondition, deferred
from ..threads.worker import Worker
from . import context
from .handle import StepHandle
from .hyperparameters import LearntOptimizers, StepOptimizers, hook_optimizers
from .jobs import Jobs, LateError
from .state_pages import StatePages
from .turns import Turns
from .user_writes import UserWrites
from .work import StepWork
from .write_back import WriteBack

_log = logging.getLogger("roundpipe")


class StepThread:
    """Owns masters and windows while jobs run. All public methods but ``is_written_back`` are for
    the caller's thread."""

    def __init__(
        self,
        worker: Worker,
        condition: SteadyCondition,
        store: ParameterStore,
        masters: Masters,
        device_states: DeviceStates,
        sums: RankSums,
        new_window: Callable[[], GradientWindow],
        pages: StatePages | None = None,
        max_host_bytes: float = inf,
    ) -> None:
        self._condition = condition
        self._store = store
        self._masters = masters
        self._new_window = new_window
        self._window = new_window()
        self._learnt = LearntOptimizers(pages)
        self._late = LateError(condition)
        self._write_back = WriteBack(
            condition, store, masters, device_states, self._late, pages, max_host_bytes
        )
        self.is_written_back = self._write_back.is_written_back
        self._jobs = Jobs(worker, condition, self._write_back.note_failure)
        self._flushed = self.num_steps = self.num_loads = 0
        self.load_listeners: list[Callable[[], None]] = []
        self.name = ""  # its engine's, for others that have to do with this
        self.is_closed = False
        # Because a forgotten engine writes back on its own thread, while the caller may have it
        # give way.
        self._bringing_home = threading.Lock()
        self.turns = Turns(self, store.uses.keys())
        self.user_writes = UserWrites(self, store, masters)
        self._work = StepWork(store, masters, sums, self._write_back, self.user_writes)
        self.step_listeners = self._work.step_listeners
        self.update_listeners = self._work.update_listeners
        hook_optimizers()
        context.register(self)

    def __repr__(self) -> str:
        return (
            f"<StepThread: {self.num_steps} steps, {self._jobs.num_left} jobs pending, "
            f"written back {self._write_back.version}>"
        )

    @property
    def version(self) -> int:
        """The version of the weights that a call made now computes with. See [Note: versions]."""
        return max(self.num_steps - 1, self._flushed)

    @property
    def weights(self) -> tuple[int, int, int]:
        """Tells whether two calls would compute with the same working weights: equal if so."""
        return self.num_steps, self.version, self.num_loads + self.user_writes.num_noticed

    def refuse_other_than(self, weights: tuple[int, int, int]) -> None:
        """Raises RuntimeError if a backward would no longer find the ``weights`` its forward was
        computed with."""
        if self.weights != weights:
            raise RuntimeError(
                "step(), a flush or a load ran between this forward and its backward, or weights "
                "were written, so they are no longer those of the forward; call backward() first"
            )

    @property
    def window(self) -> GradientWindow:
        """The gradients accumulated since the last step. Complete only after ``wait_idle``."""
        return self._window

    @property
    def is_idle(self) -> bool:
        """Whether all calls committed and all steps taken are over."""
        return self._jobs.num_left == 0

    def introduce(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
    ) -> None:
        """Learns an optimizer if there are masters of this engine among its ``parameters``."""
        if self._masters.has_any(parameters):
            self._learnt.learn(optimizer)

    def raise_late_error(self) -> None:
        """Raises, once, what failed behind the caller's back since the last engine call."""
        self.raise_kept()
        with self._condition:
            # After an interrupted flush too, when all layers hold ``version`` but not all the
            # newest one.
            is_behind = (
                self._write_back.error is not None or self._write_back.version < self.version
            )
            is_idle = self._jobs.num_left == 0
        if is_behind and is_idle:
            self._write_back_all()  # because writing back failed, which the caller was told

    def raise_kept(self) -> None:
        """The same without trying once more what has failed."""
        with self._condition:
            error = self._late.take()
            if error is not None:
                # The caller knows now that these gradients are gone: what it steps next is not to
                # be cancelled.
                self._window.error = None
        if error is not None:
            raise error

    def note_load(self) -> None:
        """The user's parameters are about to hold other weights, or do so already. With no job
        left."""
        self.send_again()
        self.turns.tell_others()

    def follow_others(self) -> None:
        """Goes on from what other engines have made of the weights."""
        self.send_again()
        self._masters.follow_others()

    def send_again(self) -> None:
        """Devices take no weight or buffer that they hold for the same from the next call on."""
        self.num_loads += 1
        for listener in self.load_listeners:
            listener()

    def bring_home(self) -> None:
        """Writes the newest weights to the user's parameters. With no job left, or in the last.
        What these have been written since the update stays, as it does if an engine loads it."""
        with self._bringing_home:
            if self._masters.are_ahead or self.version < self.num_steps:
                self._masters.leave_written()
                self._write_back_all()

    def has_failed_to_write_back(self, error: BaseException) -> bool:
        """Whether that is what keeps the user's parameters from being the newest."""
        return error is self._write_back.error

    def end_forgotten(self) -> None:
        """Queues the last job: nobody is there any more who could flush. Called by a finalizer, so
        it never waits."""
        self._jobs.submit_last(self._end_forgotten)

    def _end_forgotten(self) -> None:
        try:
            self.bring_home()
            self.raise_kept()
        except BaseException:
            _log.exception("an engine was forgotten before what had failed could be raised")

    def wait_written_back(self, layer: int) -> None:
        """Blocks the caller, who computes with the layer himself, until its working copies hold
        ``version``.

        They then stay as they are until the job of the next step.
        """
        version = self.version
        self._condition.wait_interruptibly(lambda: self.is_written_back(layer, version))

    def commit(self, call: Backward, early: Arriving | None = None) -> None:
        """Queues adding a call's gradients to the current window; that job waits for its late
        backward stage runs. ``early``: the call, if it is said to be the last before the step, so
        that ranks add up its gradients as they come."""
        window, step = self._window, self.num_steps + 1
        self._jobs.submit(lambda: self._work.commit(call, window, step, early))

    @deferred()  # because a step that is counted must be queued, or others would wait forever
    def step(
        self,
        step_fn: Callable[..., Any],
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepHandle:
        """Queues step t. Ownership of the accumulated gradients passes here; later calls add to
        what ``step_fn`` leaves."""
        handle = StepHandle(self._condition, self._late.forget)
        window, self._window = self._window, self._new_window()
        self.num_steps += 1
        number = self.num_steps
        self.turns.tell_others()
        is_first = self._learnt.forget_gone()
        optimizers = StepOptimizers(self._learnt, self._learnt.snapshot(), handle._enter)
        optimizers.ranks = self._masters.ranks
        context.tell_called(optimizers, handle, is_async)
        windows = window, self._window
        self._jobs.submit(
            lambda: self._work.step(
                handle, number, is_async, windows, optimizers, partial(step_fn, *args, **kwargs)
            )
        )
        if is_async and is_first:
            # An optimizer made inside step_fn is not known yet: its hyper-parameters are read when
            # it steps.
            handle.wait_entered()
        if not is_async:
            self._flushed = number
            handle.wait()
        return handle

    def add_gradients(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        window = self._window
        self._jobs.submit(lambda: window.add(gradients))

    def zero_grad(self) -> None:
        """Drops gradients not yet stepped, those still in flight included."""
        window, self._window = self._window, self._new_window()
        self._jobs.submit(window.release)

    def flush(self) -> None:
        """A synchronisation point: waits for all jobs and writes back the newest weights."""
        self.wait_idle()
        if self._write_back.error is None:
            # Also after another failure, because steps that succeeded before it must not be lost.
            self._write_back_all()
        self.raise_late_error()

    def _write_back_all(self) -> None:
        try:
            self._write_back.write_back(self.num_steps, self._store.layers)
        except BaseException as error:
            self._late.forget(error)
            raise
        self._flushed = self.num_steps

    def leave_devices(self) -> None:
        """See `WriteBack.leave_devices`. Calls go on to compute with the versions that they would
        have computed with."""
        self.wait_idle()
        self.raise_late_error()
        with deferred():  # because a layer that has left must be known to be behind
            self._write_back.leave_devices(self.version)

    def wait_idle(self) -> None:
        """Blocks until all jobs are done. Errors stay for ``raise_late_error``."""
        self._jobs.wait_idle()
