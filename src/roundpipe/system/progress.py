"""Bars for what takes long."""

import sys
from collections.abc import Iterable
from typing import Any

# What takes less has none.
_WORTH_A_BAR_S = 2


def progress(of: Iterable[Any] | None = None, **about: Any) -> Any:
    """A bar of tqdm's, where somebody sees it: in a terminal or a notebook.

    Args:
        of: what to go through, or None where ``update`` is called.
        about: as tqdm's: desc, total, unit.
    """
    from tqdm.auto import tqdm  # here, because few processes show one

    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(of, disable=not is_seen, delay=_WORTH_A_BAR_S, **about)
