"""Sizes of memory as people write them."""

import re

from ..errors import ConfigError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def in_gb(size: str | float) -> str:
    """Writes ``size``, as `bytes_of` takes it, with a unit."""
    is_number = not isinstance(size, str) or size.replace(".", "", 1).strip().isdigit()
    return f"{size} GB" if is_number else str(size)


def bytes_of(size: str | float, name: str) -> int:
    """The bytes of ``size``: a string with a unit (``"24GB"``, ``"900MiB"``) or a number of GB.

    Units mean what they mean to `accelerate`: GB is 10**9 bytes, GiB is 2**30.

    Args:
        name: of the setting, for the error.

    Raises:
        ConfigError: not a positive number, or a unit that is none.
    """
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        unit = (found[2].lower() or "gb") if found else ""
        num_bytes = float(found[1]) * _BYTES[unit] if found and unit in _BYTES else 0.0
    else:
        is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
        num_bytes = size * 10**9 if is_number else 0.0
    if not 0 < num_bytes < 2**60:
        raise ConfigError(
            f"{name} is {size!r}; give a size with a unit, such as '24GB' or '900MiB', or a "
            "positive number of GB"
        )
    return max(int(num_bytes), 1)
