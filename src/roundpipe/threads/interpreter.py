"""The interpreter's own pauses. While it is busy elsewhere nobody queues work, so they are pauses
of every device.

[Note: pauses]
[1] A full garbage collection looks at every object there is and holds the interpreter meanwhile:
    over half a second once torch, transformers and compiled code are loaded. What is alive when
    training has settled is frozen, so that collections from then on look only at what came later.
    Nor would it ever be freed if it was dropped in a circle of references, as a Trainer is: so all
    is thawed when its run has ended, and when another engine is made, which may be to take its
    place.
[2] A thread that wants the interpreter leaves it to a busy one for a whole switch interval, 5 ms by
    default, and a worker wants it back after every operation, which lets go of it.
"""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

_SWITCH_INTERVAL_S = 1e-4
# Calls after which a freeze pays: compiled code and the like is there, then what the first steps
# have made, then all.
_SETTLED = frozenset({4, 16, 128})

_lock = threading.RLock()  # because a finalizer may come while its own thread is inside
# Thaws are counted, so that all who are open know that calls have to settle again. Only what was
# frozen here is thawed, because a program may have frozen what it had before.
_state = SimpleNamespace(thaws=0, is_frozen=False)
_before: list[float] = []  # the switch interval as each quiet interpreter alive has found it


class QuietInterpreter:
    """Keeps pauses short for as long as it is open. Used by an engine's caller; any number may be
    open at once."""

    def __init__(self) -> None:
        with _lock:
            is_frozen = bool(_before) and _state.is_frozen
            _before.append(sys.getswitchinterval())
        if is_frozen:
            _thaw()
            gc.collect()
        self._begin_counting()
        sys.setswitchinterval(min(_SWITCH_INTERVAL_S, sys.getswitchinterval()))
        self._finalizer = weakref.finalize(self, _restore)

    def begin_call(self) -> None:
        """An engine call begins."""
        if self._thaws_before != _state.thaws:
            self._begin_counting()
        self._num_calls += 1
        if self._num_calls in _SETTLED:
            gc.collect()  # because frozen garbage would stay
            with _lock:
                gc.freeze()
                _state.is_frozen = True

    def rest(self) -> None:
        """No call is likely for a while: what has been dropped can be collected, and calls have to
        settle again."""
        _thaw()

    def close(self) -> None:
        """Everything is as it was before the first of those open, once the last is closed."""
        self._finalizer()

    def _begin_counting(self) -> None:
        self._num_calls, self._thaws_before = 0, _state.thaws


def _thaw() -> None:
    with _lock:
        _state.thaws += 1
        if _state.is_frozen:
            gc.unfreeze()
            _state.is_frozen = False


def _restore() -> None:
    with _lock:
        first = _before[0]
        _before.pop()
        if not _before:
            sys.setswitchinterval(first)
            _thaw()
