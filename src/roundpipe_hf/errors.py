"""Errors of the Trainer's own."""

from roundpipe.errors import ConfigError


class UnknownModelCall(ConfigError):
    """`compute_loss` does not call the model in the one way the pipeline can answer."""
