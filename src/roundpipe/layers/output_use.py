"""What becomes of the last layer's output, for a layer that can spare itself a part of it.

A language model's head asks: where only the loss is wanted it never makes the logits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    only_loss = False


_here = _Here()


@contextmanager
def wanting(*, only_loss: bool) -> Iterator[None]:
    """The calling thread runs a layer of a call whose outputs nobody but the default loss reads, or
    else all may."""
    before, _here.only_loss = _here.only_loss, only_loss
    try:
        yield
    finally:
        _here.only_loss = before


def only_loss_is_wanted() -> bool:
    """Whether of this call's outputs only ``.loss`` is read. False outside an engine."""
    return _here.only_loss
