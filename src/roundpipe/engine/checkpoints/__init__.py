"""Checkpoints are made of these: one file or shards, the state of generators, and refusals that
all processes share.

Imports what `engine` may import.
"""

from .one_file import REST, open_checkpoint, packed, replace, unpacked, writable
from .random_numbers import random_state, set_random_state
from .refused import refused_alike

__all__ = [
    "REST",
    "open_checkpoint",
    "packed",
    "random_state",
    "refused_alike",
    "replace",
    "set_random_state",
    "unpacked",
    "writable",
]
