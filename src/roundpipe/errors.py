"""The whole error tree, by who is at fault. Errors raised by user code keep their own type and only gain a note."""


class RoundPipeError(Exception):
    """Base of everything RoundPipe raises on its own account."""


class ConfigError(RoundPipeError, ValueError):
    """A setting or an input of the caller's is wrong; nothing was changed."""


class PlanError(RoundPipeError, ValueError):
    """An execution plan does not cover the model; names the layer."""


class ClosedError(RoundPipeError):
    """The engine was closed by its owner and cannot be used again."""


class InternalError(RoundPipeError):
    """An invariant of RoundPipe itself broke. Please report it."""
