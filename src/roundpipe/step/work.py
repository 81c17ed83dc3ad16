"""The optimizer thread's work: takes the gradients of finished calls, runs ``step_fn`` on masters,
has the new weights written back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ..params.gradients import Backward
from ..params.masters import Masters
from ..params.placement.newest import PendingUpdates
from ..params.rank_sums import Arriving, RankSums
from ..params.window import GradientWindow
from ..params.working import ParameterStore
from ..trace import spans
from . import context
from .handle import StepHandle
from .hyperparameters import StepOptimizers
from .user_writes import UserWrites
from .write_back import WriteBack


@contextmanager
def _noted(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"RoundPipe: {what}, on the optimizer thread")
        raise


class StepWork:
    """Does what the jobs of one engine are about, on the optimizer thread only."""

    def __init__(
        self,
        store: ParameterStore,
        masters: Masters,
        sums: RankSums,
        write_back: WriteBack,
        user_writes: UserWrites,
    ) -> None:
        self._store = store
        self._masters = masters
        self._sums = sums
        self._write_back = write_back
        self._user_writes = user_writes
        # Told that a step begins, when the calls before it are over.
        self.step_listeners: list[Callable[[], None]] = []
        # Told what a step took, in milliseconds.
        self.update_listeners: list[Callable[[float], None]] = []

    def commit(
        self, call: Backward, window: GradientWindow, step: int, early: Arriving | None
    ) -> None:
        """Waits for the call's late backward stage runs. What fails makes the ``window`` fail, with
        which its step would begin. ``early``: see `StepThread.commit`."""
        try:
            is_sent = early is not None and self._sums.send_early(step, window, early)
            window.commit(call)
            if is_sent:
                self._sums.confirm(window)
        except BaseException as error:
            window.error = error
            self._write_back.note_failure(error)

    def step(
        self,
        handle: StepHandle,
        number: int,
        is_async: bool,
        windows: tuple[GradientWindow, GradientWindow],
        optimizers: StepOptimizers,
        step_fn: "partial[Any]",
    ) -> None:
        """``windows``: this step's, and the next one's, to which what ``step_fn`` leaves goes."""
        began, result, error = time.perf_counter(), None, None
        window, _ = windows
        for begins in self.step_listeners:
            begins()
        updates = optimizers.updates = PendingUpdates()
        try:
            result = self._decide(number, windows, optimizers, step_fn)
            with self._masters.ranks.exchanging():
                self._masters.mark_ahead()
                if is_async:
                    with _noted(f"the update of step {number}"):
                        self._write_back.update_aside(number, updates, window)
        except BaseException as raised:
            error = raised
            if error is not self._write_back.error:
                self._write_back.advance(number - 1 if is_async else number)
            if error is not window.error:
                self._write_back.note_failure(error)
        finally:
            try:
                self._masters.take_gradients()
            finally:
                # Whatever happens, because somebody may be waiting for it.
                handle._finish(result, error)
        self._end_updates(number, updates, window, writes_back=error is None and not is_async)
        if error is None:
            for listener in self.update_listeners:
                listener(1e3 * (time.perf_counter() - began))

    def _decide(
        self,
        number: int,
        windows: tuple[GradientWindow, GradientWindow],
        optimizers: StepOptimizers,
        step_fn: "partial[Any]",
    ) -> Any:
        """Runs ``step_fn`` on masters that show the window's gradients, and returns its result."""
        window, following = windows
        ranks = self._masters.ranks
        self._sums.send(number, window)
        with ranks.agreeing(f"before step {number}"):
            self._write_back.write_back_behind(number - 1)
            if window.error is not None:
                raise window.error
        # Because weights are sent of what has a master.
        with ranks.agreeing(f"in step {number}", self._masters.outline):
            window.show(self._masters, self._sums.take(number, window))
            try:
                with (
                    _noted(f"step_fn of step {number}"),
                    spans.span("step_fn", step=number),
                    context.running_step(optimizers),
                ):
                    result = step_fn()
                    optimizers.end(step_fn.func)
            finally:
                # Before an update gives the window's memory back.
                following.begin_with_left(self._masters)
        return result

    def _end_updates(
        self, number: int, updates: PendingUpdates, window: GradientWindow, *, writes_back: bool
    ) -> None:
        """Computes what was decided, behind the caller's back: the next call's uploads wait layer
        by layer, and reads of weights flush."""
        try:
            if writes_back:
                with self._masters.ranks.exchanging():
                    self._write_back.write_back(number, self._store.layers, updates, window)
                self._user_writes.refuse_overwritten(
                    lambda: self._write_back.write_back(number, self._store.layers)
                )
        except BaseException:
            # What fails now is no second error: a caller who waited was told of the first already.
            with suppress(Exception):
                updates.compute_all()
            raise
        else:
            # After a failure: masters are to be as the optimizers' steps left them.
            updates.compute_all()
        finally:
            window.release()
