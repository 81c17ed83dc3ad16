"""Estimates as people and programs read them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ..trace.table import as_html, show
from .estimate import Estimate
from .machine import CONTEXT_BYTES, PROCESS_BYTES

COLUMNS = ("way", "ms", "tok/s", "bound", "VRAM", "RAM", "disk", "up", "down")


def as_json(estimates: Sequence[Estimate]) -> str:
    """Returns a list, best first, of everything that is known of each: bytes and milliseconds."""
    return json.dumps([_whole(each) for each in estimates], indent=2)


def _whole(each: Estimate) -> dict[str, Any]:
    return {
        **asdict(each),
        "choice": each.choice._asdict(),
        "device_bytes": each.device_bytes,
        "host_bytes": each.host_bytes,
        "process_bytes": PROCESS_BYTES,
        "context_bytes": CONTEXT_BYTES,
        "tokens_per_second": each.tokens_per_second,
    }


def _cells(each: Estimate) -> tuple[str, ...]:
    in_gb = (
        each.device_bytes + CONTEXT_BYTES,
        each.host_bytes + PROCESS_BYTES,
        each.disk_bytes,
        each.up_bytes,
        each.down_bytes,
    )
    return (
        str(each.choice),
        f"{each.step_ms:.0f}",
        f"{each.tokens_per_second:.0f}",
        each.bound,
        *(f"{num_bytes / 1e9:.1f}" for num_bytes in in_gb),
    )


def as_table(estimates: Sequence[Estimate]) -> str:
    return as_html("Ways to train, best first", COLUMNS, [_cells(each) for each in estimates])


def show_estimates(title: str, estimates: Sequence[Estimate]) -> None:
    """Prints a table, and how to train the best way."""
    show(title, COLUMNS, [_cells(each) for each in estimates])
    best = estimates[0]
    print("Best: " + ", ".join(f"{name}={_said(value)}" for name, value in best.arguments.items()))
    print(
        f"  of a step alone: compute {best.compute_ms:.0f} ms, link {best.link_ms:.0f} ms, "
        f"update {best.update_ms:.0f} ms; stages forward {_joined(best.stages[0])}, "
        f"backward {_joined(best.stages[1])} layers"
    )
    if best.tokens_at_once:
        print(f"  MLPs and norms run for {best.tokens_at_once:,} tokens at a time, to fit")
    for what, parts in (("device", best.device), ("host", best.host)):
        said = ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in parts.items() if value)
        print(f"  {what}: {said}")


def _said(value: Any) -> str:
    return value if isinstance(value, str) and "." in value else repr(value)


def _joined(counts: Sequence[int]) -> str:
    """Stages of as many layers in a row once: ``2 + 79 x 1``."""
    runs = [(count, len([*same])) for count, same in groupby(counts)]
    return " + ".join(f"{many} x {n}" if many > 1 else f"{n}" for n, many in runs) or "none"
