"""Ends an example with one line instead of a traceback, where whoever started it has to do
something first."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fetch_assets import AssetError
from roundpipe import ConfigError


@contextmanager
def needed(extra: str) -> Iterator[None]:
    """Says what to install where an import inside finds a package missing.

    Args:
        extra: of roundpipe-hf, which brings those packages.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "roundpipe", "roundpipe_hf"):
            raise  # because no extra brings it
        sys.exit(f"error: {package} is not installed: pip install 'roundpipe-hf[{extra}]'")


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """Says which setting is wrong, or which weights or data are not to be had."""
    try:
        yield
    except (AssetError, ConfigError) as error:
        sys.exit("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
