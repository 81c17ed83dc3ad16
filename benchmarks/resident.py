"""Reference: the same step with all weights, masters and moments resident on one GPU. Of RoundPipe
only the loss.

Four systems: plain Hugging Face, without and with checkpointing, and compiled blocks with chunked
cross-entropy, with and without recompute. The last two are the ceilings that
benchmarks/throughput.py is compared with.
"""

import argparse
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import roofline
import torch
from compiled_loss import chunked_causal_loss
from torch import Tensor, nn
from workload import (
    LEARNING_RATE,
    MAX_NORM,
    Workload,
    add_workload_options,
    describe,
    make_model,
    make_tokens,
    workload_of,
)

SYSTEMS = {
    "plain": "resident: Hugging Face, no checkpointing",
    "hf": "resident: Hugging Face, checkpointing",
    "recompute": "resident: compiled, chunked CE, recompute",
    "ceiling": "resident: compiled, chunked CE, no recompute",
}
COLUMNS = [
    "method", "system", "tokens_per_s", "step_s", "gpu_peak_allocated_gb", "host_peak_rss_gb",
    "loss_first", "loss_last",
]  # fmt: skip

LossOf = Callable[[Tensor], Tensor]


class MasterOptimizer:
    """AdamW over fp32 masters of bf16 weights, everything on the device, gradients clipped by their
    global norm."""

    def __init__(self, model: nn.Module, learning_rate: float = LEARNING_RATE) -> None:
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p.detach().float().requires_grad_() for p in self._weights]
        self._adamw = torch.optim.AdamW(self._masters, lr=learning_rate, fused=True)

    def take_gradients(self) -> None:
        """Adds the weights' gradients to the masters', in fp32."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            gradient, weight.grad = weight.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def step(self) -> None:
        """On the gradients taken."""
        torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        self._adamw.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)
            master.grad = None


def hugging_face_loss(model: nn.Module, predictions: int) -> LossOf:
    """The model's own forward and loss, full logits."""
    return lambda tokens: (
        model(input_ids=tokens, labels=tokens, num_items_in_batch=predictions, use_cache=False).loss
    )


def compiled_loss(model: nn.Module, predictions: int) -> LossOf:
    """Blocks compiled, logits only in chunks."""
    causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    blocks = causal_lm.model.layers
    compiled = torch.compile(type(blocks[0]).forward, dynamic=False)
    for block in blocks:
        block.forward = types.MethodType(compiled, block)

    def loss_of(tokens: Tensor) -> Tensor:
        hidden = causal_lm.model(input_ids=tokens, use_cache=False).last_hidden_state
        return chunked_causal_loss(hidden, causal_lm.lm_head.weight, tokens) / predictions

    return loss_of


def run(system: str, workload: Workload, options: argparse.Namespace) -> measure.Record:
    measure.cap_gpu_memory(options.cap_gb)
    device = measure.compute_device()
    model = make_model(workload, device)
    recomputes = system in ("hf", "recompute")
    if recomputes:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    make_loss = hugging_face_loss if system in ("plain", "hf") else compiled_loss
    loss_of = make_loss(model, workload.predictions_per_step)
    optimizer = MasterOptimizer(model)
    microbatches = make_tokens(workload).to(device).chunk(workload.num_microbatch)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for tokens in microbatches:
            loss = loss_of(tokens)
            loss.backward()
            total += loss.detach()
        # Once a step: the ceiling sums microbatches in bf16, which is faster.
        optimizer.take_gradients()
        optimizer.step()
        return total

    timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
    return {
        "bench": "resident",
        "system": SYSTEMS[system],
        "recompute": recomputes,
        "cap_gb": options.cap_gb,
        "tokens_per_s": workload.tokens_per_step / timed["step_s"],
        **describe(workload, model),
        **timed,
        **measure.peaks(),
        **measure.environment(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    options = parser.parse_args()
    comment = partial(roofline.line, rates=roofline.rates_of(options.ceilings))
    rows = [(method, system) for method in options.methods for system in options.systems]
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--methods", a, "--systems", b] for a, b in rows], COLUMNS, comment
        )
    ((_, system),) = rows
    return measure.run_row(run(system, workload_of(options), options), COLUMNS, comment)


if __name__ == "__main__":
    sys.exit(main())
