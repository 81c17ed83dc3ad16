"""Linear head + cross-entropy in chunks against the whole logits: time and peak of one forward and
backward.

Peaks are those of what the loss adds to hidden states and head.
"""

import argparse
import sys
from collections.abc import Callable

import measure
import torch
from torch import Tensor
from torch.nn import functional as F

from roundpipe.kernels.linear_cross_entropy import linear_cross_entropy

SYSTEMS = {
    "full": "whole logits, in fp32 for the loss",
    "chunked": "roundpipe.kernels.linear_cross_entropy",
}
COLUMNS = [
    "system",
    "head",
    "tokens",
    "vocabulary",
    "width",
    "step_s",
    "added_peak_gb",
    "loss_first",
]
IGNORED = -100


def chunked_causal_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of predicting ``tokens`` (rows, length) from ``hidden`` (rows, length, width),
    summed."""
    return linear_cross_entropy(hidden, weight, _targets(tokens), reduction="sum")


def full_causal_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(
        logits.flatten(0, 1), _targets(tokens).flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _targets(tokens: Tensor) -> Tensor:
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "full": full_causal_loss,
    "chunked": chunked_causal_loss,
}


def run(system: str, head: str, options: argparse.Namespace) -> measure.Record:
    device = measure.compute_device()
    torch.manual_seed(0)
    hidden = torch.randn(
        1, options.tokens, options.width, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    weight = torch.randn(
        options.vocabulary, options.width, device=device, dtype=torch.bfloat16
    ).mul_(0.02)
    weight.requires_grad_(head == "trained")
    tokens = torch.randint(options.vocabulary, (1, options.tokens), device=device)
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    def step() -> Tensor:
        loss = LOSSES[system](hidden, weight, tokens)
        loss.backward()
        hidden.grad = weight.grad = None
        return loss.detach()

    timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
    peak = (
        {"added_peak_gb": (torch.cuda.max_memory_allocated() - held) / 1e9}
        if torch.cuda.is_available()
        else {}
    )
    return {
        "bench": "chunked_loss",
        "system": SYSTEMS[system],
        "head": head,
        "dtype": "bf16",
        "tokens": options.tokens,
        "vocabulary": options.vocabulary,
        "width": options.width,
        **peak,
        **timed,
        **measure.environment(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument(
        "--heads", nargs="+", choices=["trained", "frozen"], default=["trained", "frozen"]
    )
    options = parser.parse_args()
    rows = [(system, head) for system in options.systems for head in options.heads]
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--systems", a, "--heads", b] for a, b in rows], COLUMNS
        )
    ((system, head),) = rows
    return measure.run_row(run(system, head, options), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
