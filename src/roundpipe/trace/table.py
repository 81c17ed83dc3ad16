"""Tables as people read them: in a terminal, in a file, in a notebook."""

import re
import sys
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from typing import Any

Row = Sequence[str]
_NUMBER = re.compile(r"[-\d.,]+( ?%)?|-|")


def as_text(columns: Row, rows: Sequence[Row]) -> str:
    """A line for each row under one of names; columns of numbers end at the same place."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    are_numbers = _are_numbers(columns, rows)
    lines = (
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, are_numbers, strict=True)
        ).rstrip()
        for row in (columns, *rows)
    )
    return "\n".join(lines)


def as_html(title: str, columns: Row, rows: Sequence[Row]) -> str:
    """The same for a notebook."""
    aligned = ["right" if one else "left" for one in _are_numbers(columns, rows)]
    head, *body = (
        "<tr>"
        + "".join(
            f'<{tag} style="text-align:{align}">{escape(cell)}</{tag}>'
            for cell, align in zip(row, aligned, strict=True)
        )
        + "</tr>"
        for tag, row in (("th", columns), *(("td", row) for row in rows))
    )
    caption = f'<caption style="text-align:left">{escape(title)}</caption>'
    return f"<table>{caption}<thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


class Statistics(dict[str, Any]):
    """Numbers by name: a dictionary, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = [(name, _said(value)) for name, value in self.items()]
        return as_html("statistics", ("what", "now"), rows)


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def show(title: str, columns: Row, rows: Sequence[Row]) -> None:
    """Prints a table; in a terminal with rich if that is installed. What is no terminal may have no
    width, so nothing is cut off there."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        print(title)
        print(as_text(columns, rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, is_number in zip(columns, _are_numbers(columns, rows), strict=True):
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


def _are_numbers(columns: Row, rows: Sequence[Row]) -> list[bool]:
    return [
        all(_NUMBER.fullmatch(cell) for cell in column)
        for _, *column in zip(columns, *rows, strict=True)
    ]
