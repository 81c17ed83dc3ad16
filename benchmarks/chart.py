"""Draws the README's chart from `chart.json`, whose figures name where they were published.

python benchmarks/chart.py   # writes docs/images/tokens.svg
"""

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs/images/tokens.svg"
WIDTH, LEFT, RIGHT, ROW, BAR = 780, 285, 70, 24, 16
OURS, OTHERS, INK, PALE = "#3f51b5", "#9aa0a6", "#202124", "#5f6368"


def draw(chart: dict[str, Any]) -> str:
    """Returns an SVG with a bar for each figure; all groups share one scale."""
    most = max(value for group in chart["groups"] for _, value, _ in group["bars"])
    parts = [_text(16, 24, chart["title"], size=15, weight="bold")]
    y = 48
    for group in chart["groups"]:
        parts.append(_text(16, y + 6, group["title"], colour=PALE))
        y += ROW - 6
        for label, value, is_ours in group["bars"]:
            length = (WIDTH - LEFT - RIGHT) * value / most
            colour = OURS if is_ours else OTHERS
            middle = y + BAR - 4
            parts += [
                _text(LEFT - 8, middle, label, anchor="end"),
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
                _text(LEFT + length + 6, middle, f"{value:,}"),
            ]
            y += ROW
        y += ROW - 6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" font-family="sans-serif" role="img">'
    )
    background = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    title = f"<title>{escape(chart['title'])}</title>"
    return "\n".join([head, title, background, *parts, "</svg>", ""])


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )


def chart() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((HERE / "chart.json").read_text())
    return read


if __name__ == "__main__":
    TARGET.write_text(draw(chart()))
    print(TARGET)
