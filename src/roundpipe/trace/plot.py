"""The drawing of a profile by matplotlib: a row for each lane of each device and each thread."""

import os
import re
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .summary import COMPUTE, LANES, WAITING, Block, gaps, lane_of, merged, rows_of, summarize

_STAGE = re.compile(r"[UGL]?(([FXB])(\d+))")
_UPDATES = {"step_fn": "0.25", "update": "0.45", "write_back": "0.65", "commit": "0.85"}
_BUBBLE: Any = {
    "facecolor": "mistyrose",
    "edgecolor": "lightcoral",
    "hatch": "////",
    "linewidth": 0,
}
_WIDE = 0.02  # of the whole time: what is shorter has no room for its name


def figure_of(blocks: Sequence[Block]) -> Any:
    """A matplotlib figure. Stages have a colour each, the same on their way up and down; a device's
    compute is hatched where it had nothing to do. ``X1`` is a pass (forward, fused, backward) and
    the number of its stage.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(
            "profiles are drawn by matplotlib, which is not installed: pip install "
            "'roundpipe-hf[plot]'; plot_timeline() draws in text"
        ) from error
    rows = sorted(rows_of(blocks), key=_place)
    figure, axes = pyplot.subplots(
        figsize=(12, 1.2 + 0.35 * max(len(rows), 2)), layout="constrained"
    )
    # The caller shows what is returned; pyplot would, too, at the end of a notebook's cell.
    pyplot.close(figure)
    first = min((block.start for block in blocks), default=0.0)
    last = max((block.end for block in blocks), default=0.0)
    named = dict[str, Any]()
    for height, row in enumerate(rows):
        mine = [block for block in blocks if block.row == row and block.label != WAITING]
        if lane_of(row) == COMPUTE:
            idle = gaps(merged((block.start, block.end) for block in mine), first, last)
            named["bubble"] = axes.broken_barh(
                [_bar(*gap, first) for gap in idle], (height - 0.4, 0.8), **_BUBBLE
            )
        named |= _draw_row(axes, height, mine, first)
        for name, *times in _runs(mine):
            if times[1] - times[0] > _WIDE * (last - first):
                middle = 1e3 * (sum(times) / 2 - first)
                axes.text(middle, height, name, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(summarize(blocks).title, loc="left")
    if named:
        figure.legend(list(named.values()), list(named), loc="outside right upper", fontsize=8)
    return figure


def _draw_row(axes: Any, height: int, blocks: Sequence[Block], first: float) -> dict[str, Any]:
    """Returns what was drawn of threads, by name."""
    drawn = {
        name: axes.broken_barh(
            [_bar(block.start, block.end, first) for block in blocks if _name(block) == name],
            (height - 0.4, 0.8),
            facecolor=_colour(name),
            edgecolor="white",
            linewidth=0.3,
        )
        for name in sorted({_name(block) for block in blocks})
    }
    return {name: bars for name, bars in drawn.items() if not _is_stage(name)}


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format that the file's name ends with.

    Raises:
        ConfigError: matplotlib writes no such format.
    """
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be drawn: {error}") from error


def _runs(blocks: Sequence[Block]) -> list[tuple[str, float, float]]:
    """Stage runs: blocks of a stage in a row."""
    found: list[tuple[str, float, float]] = []
    for block in sorted(blocks, key=lambda block: block.start):
        name = _name(block)
        if found and found[-1][0] == name:
            found[-1] = name, found[-1][1], max(block.end, found[-1][2])
        elif _is_stage(name):
            found.append((name, block.start, block.end))
    return found


def _bar(start: float, end: float, first: float) -> tuple[float, float]:
    return 1e3 * (start - first), 1e3 * (end - start)


def _place(row: str) -> tuple[bool, int, str, int]:
    """Devices before threads, the tenth after the ninth, and their lanes in order."""
    lane = lane_of(row)
    device = row.removesuffix(f" {lane}")
    return lane is None, len(device) if lane else 0, device, LANES.index(lane) if lane else 0


def _name(block: Block) -> str:
    """``X1`` of what belongs to that stage run, else what it is called."""
    found = _STAGE.match(block.label) if lane_of(block.row) else None
    return found[1] if found else block.label


def _is_stage(name: str) -> bool:
    return _STAGE.fullmatch(name) is not None


def _colour(name: str) -> Any:
    from matplotlib import colormaps

    if not _is_stage(name):
        return _UPDATES.get(name, "0.75")
    return colormaps["tab10"](int(name[1:]) % 10)
