"""The whole error tree, by who is at fault. Errors raised by user code keep their own type and only
gain a note."""

import traceback
from collections.abc import Callable, Iterable


class RoundPipeError(Exception):
    """The base of everything that RoundPipe raises on its own account. A note, which tracebacks
    show, says what prints the troubleshooting guide's section about it."""

    guide = "what-the-errors-mean"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"what to do: python -m roundpipe explain {self.guide}")


class ConfigError(RoundPipeError, ValueError):
    """A setting or an input of the caller's is wrong; nothing was changed."""

    guide = "ConfigError"


class PlanError(RoundPipeError, ValueError):
    """An execution plan does not cover the model; names the layer."""

    guide = "PlanError"


class ClosedError(RoundPipeError):
    """The engine was closed by its owner and cannot be used again."""

    guide = "ClosedError"


class RankError(RoundPipeError):
    """Another process of the engine's group has raised, or was lost; names its rank. The group
    cannot go on."""

    guide = "RankError"


class InternalError(RoundPipeError):
    """An invariant of RoundPipe itself broke. Please report it."""

    guide = "InternalError"


def clear_frames(error: BaseException) -> None:
    """Lets go of what the frames that an error, or one it came from, has left hold: on a device
    perhaps gigabytes, for as long as somebody keeps the error. Frames that still run keep
    theirs."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()  # because two may name each other
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def do_all(jobs: Iterable[Callable[[], None]]) -> None:
    """One that raises keeps none of the others from being done: the first error is raised when they
    are."""
    first_error: Exception | None = None
    for job in jobs:
        try:
            job()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        try:
            raise first_error
        finally:
            first_error = None  # because its traceback has this frame, which would keep it
