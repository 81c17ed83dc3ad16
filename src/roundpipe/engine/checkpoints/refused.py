"""Refusals of several processes: what one of them cannot do, none of them does."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ...errors import ConfigError, RankError
from ...params.rank_messages import TEXT_BYTES, coded, decoded
from ...params.ranks import Ranks


@contextmanager
def refused_alike(ranks: Ranks, what: str, subject: str = "") -> Iterator[None]:
    """An error that one rank raises inside, where nothing is changed and nothing is said to others,
    keeps all from going on: the others raise a ConfigError that names it. ``what`` is the same on
    all ranks: one that does something else ends the group. ``subject`` is this rank's own.

    Unlike what is raised in `Ranks.agreeing` it ends nothing: all ranks are where they were, and
    may try another file. With no job under way, because jobs talk, too: an `OptimizerCtx` waits
    for them.
    """
    if ranks.count == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        with suppress(RankError):  # because what this rank has to say is its own error
            _first_said(ranks, what, f"rank {ranks.rank} raised {type(error).__name__}: {error}")
        raise
    said = _first_said(ranks, what, "")
    if said:
        raise ConfigError(f"{what}{subject}: {said}; nothing was changed on any rank")


def _first_said(ranks: Ranks, what: str, own: str) -> str:
    """By the first rank that says something; the same on all."""
    found = ranks.gathered({}, own, what)
    first = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    if found is not None:
        first = coded(next(filter(None, found[1]), ""))
    ranks.share([first])
    return decoded(first)
