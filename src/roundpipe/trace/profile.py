"""What each device did and when: as a file for Chrome or Perfetto, and as a drawing in text."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import spans
from .plot import figure_of, save
from .summary import COLUMNS, COMPUTE, DOWN, UP, Block, rows_of, summarize
from .table import as_html, as_text

_LANES = {"upload": UP, "fetch": UP, "offload": DOWN, "compute": COMPUTE}
_LETTERS = {"step_fn": "S", "update": "S", "write_back": "P", "commit": "C"}


class Profile:
    """Everything that engines did inside a ``with profile(...)`` block.

    ``blocks`` may be read at any time; work that a device has not done yet is not among them.
    """

    def __init__(self) -> None:
        self._spans: list[spans.Span] = []

    def __repr__(self) -> str:
        return f"<Profile: {len(self._spans)} spans>"

    @property
    def blocks(self) -> list[Block]:
        """By time. A device's lanes show when work ran there, not when it was queued."""
        found = (_block(span) for span in list(self._spans))
        return sorted(
            (block for block in found if block is not None), key=lambda block: block.start
        )

    def _repr_html_(self) -> str:
        found = summarize(self.blocks)
        return as_html(found.title, COLUMNS, found.rows)

    def summary(self) -> str:
        """How busy each lane and thread was, how long at most it was not, and what bounds the
        steps: as `python -m roundpipe timeline` prints it of an exported trace."""
        found = summarize(self.blocks)
        return "\n".join([as_text(COLUMNS, found.rows), found.verdict()])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws a row for each lane of each device and each thread, over time: each stage in its
        colour, a device's compute hatched where it has nothing to do.

        Args:
            path: where to write the drawing, in the format its name ends with; None writes none.

        Returns:
            The ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
            ConfigError: matplotlib (extra ``plot``) is not installed, or has no such format.
        """
        drawn = figure_of(self.blocks)
        if path is not None:
            save(drawn, path)
        return drawn

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace to ``path`` that `python -m roundpipe timeline`, ``chrome://tracing`` and
        ui.perfetto.dev open, its times in microseconds."""
        blocks = self.blocks
        rows = {row: number for number, row in enumerate(rows_of(blocks))}
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": row}}
            for row, number in rows.items()
        ]
        events = [
            {
                "name": block.label,
                "ph": "X",
                "pid": 0,
                "tid": rows[block.row],
                "ts": 1e6 * block.start,
                "dur": 1e6 * (block.end - block.start),
                "args": {name: str(value) for name, value in block.fields.items()},
            }
            for block in blocks
        ]
        Path(path).write_text(
            json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})
        )

    def plot_timeline(self, width: int = 100) -> str:
        """One line per lane and thread, from the first block to the last: what ran most of each
        character's time.

        F forward, X fused, B backward, U weights up, L gradients down, S update, P write back,
        ``.`` nothing.
        """
        blocks = self.blocks
        if not blocks:
            return "nothing ran"
        first, last = blocks[0].start, max(block.end for block in blocks)
        scale = width / max(last - first, 1e-9)
        rows = rows_of(blocks)
        margin = max(map(len, rows))
        lines = [f"{'':{margin}} {1e3 * (last - first):.1f} ms"]
        for row in rows:
            busy = [
                ((b.start - first) * scale, (b.end - first) * scale, b)
                for b in blocks
                if b.row == row
            ]
            lines.append(
                f"{row:{margin}} {''.join(_letter_at(column, busy) for column in range(width))}"
            )
        return "\n".join(lines)


@contextmanager
def profile(path: str | os.PathLike[str] | None = None) -> Iterator[Profile]:
    """Records what all engines do inside the block.

    Args:
        path: where to write a Chrome/Perfetto trace at the end, its times in microseconds; call
            ``synchronize()`` before it to have all of it. None writes none.

    Yields:
        The `Profile`, with ``plot()``, ``summary()``, ``export(path)``, ``plot_timeline(width)``,
        which draws in text, and ``blocks``.

    Example:
        >>> with roundpipe.profile("step.json") as profiled:
        ...     loss = engine.forward_backward((x,), label=y, loss_fn=loss_fn)
        ...     handle = engine.step(optimizer.step)
        ...     engine.synchronize()
        >>> print(profiled.plot_timeline())
    """
    profiled = Profile()
    with spans.listen(profiled._spans.append):
        yield profiled
    if path is not None:
        profiled.export(path)


def _block(span: spans.Span) -> Block | None:
    if "device" not in span.fields:
        return Block(span.thread, span.name, span.start, span.end, span.fields)
    if span.name not in _LANES:
        return None  # giving a slot back takes no time
    times = (span.start, span.end) if span.on_lane is None else span.on_lane.seconds()
    if times is None:
        return None
    row = f"{span.fields['device']} {_LANES[span.name]}"
    return Block(row, repr(span.fields["action"]), *times, span.fields)


def _letter_at(column: int, busy: list[tuple[float, float, Block]]) -> str:
    """What takes most of [column, column + 1)."""
    shares = [
        (min(end, column + 1) - max(start, column), block.label) for start, end, block in busy
    ]
    share, label = max(shares)
    return _LETTERS.get(label, label[0].upper()) if share > 0 else "."
