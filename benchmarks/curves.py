"""Draws `real_text.json`, held-out losses that `real_text.py` has measured.

python benchmarks/curves.py   # writes docs/images/real-text.svg
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs/images/real-text.svg"
COLOURS = {"sync": "#3f51b5", "async": "#e67e22", "fp8": "#2e7d32"}
LABELS = {"sync": "synchronous", "async": "asynchronous", "fp8": "synchronous, fp8"}
METHODS = {"full": "all weights", "lora": "adapters"}


def draw(runs: list[dict[str, Any]]) -> Any:
    """A figure with a panel for each method and learning rate; seeds share a colour."""
    rates = sorted({run["rate"] for run in runs})
    figure, axes = plt.subplots(
        len(METHODS), len(rates), figsize=(10, 6), sharex=True, layout="constrained"
    )
    for panels, (method, title) in zip(axes, METHODS.items(), strict=True):
        for axis, rate in zip(panels, rates, strict=True):
            for run in runs:
                if (run["method"], run["rate"]) != (method, rate):
                    continue
                steps = [int(step) for step in run["evaluated"]]
                # The first evaluation is of the model before any step and would flatten the rest.
                axis.plot(
                    steps[1:],
                    list(run["evaluated"].values())[1:],
                    color=COLOURS[run["mode"]],
                    label=LABELS[run["mode"]],
                    linewidth=1.2,
                    linestyle="-" if run["seed"] == 0 else "--",
                )
            axis.set_title(f"{title}, learning rate {rate:g}", fontsize=10)
            axis.grid(alpha=0.3)
        panels[0].set_ylabel("held-out loss")
    for axis in axes[-1]:
        axis.set_xlabel("steps")
    lines, labels = axes[0][0].get_legend_handles_labels()
    by_label = dict(zip(reversed(labels), reversed(lines), strict=True))  # of the first seed
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    # The same file each time, with text as text.
    plt.rcParams.update({"svg.hashsalt": "real text", "svg.fonttype": "none"})
    figure = draw(json.loads((HERE / "real_text.json").read_text()))
    figure.savefig(TARGET, metadata={"Date": None})
    print(TARGET)
