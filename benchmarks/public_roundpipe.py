"""The public RoundPipe 0.1.1 on the shared workload, not clipped, by the interface that its
documentation has.

    pip install --target DIR roundpipe==0.1.1
    python benchmarks/public_roundpipe.py --folder DIR

Its package has our package's name, so it is taken from a folder of its own, and this process never
imports ours.
"""

import argparse
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.models.qwen3 import modeling_qwen3
from workload import (
    LEARNING_RATE,
    add_workload_options,
    describe,
    make_model,
    make_tokens,
    workload_of,
)

COLUMNS = ["system", "tokens_per_s", "step_s", "gpu_peak_allocated_gb", "host_peak_rss_gb"]


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    shifted = logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(shifted, labels[:, 1:].flatten())


def adapt_arguments() -> None:
    """transformers has renamed an argument and dropped others since that version."""
    made = masking_utils.create_causal_mask
    known = inspect.signature(made).parameters

    def create_causal_mask(*args: Any, input_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        if input_embeds is not None:
            kwargs["inputs_embeds"] = input_embeds
        kept = {name: value for name, value in kwargs.items() if name in known}
        return made(*args, **kept)

    masking_utils.create_causal_mask = create_causal_mask  # type: ignore[assignment]
    modeling_qwen3.create_causal_mask = create_causal_mask  # type: ignore[assignment]


def name_attention(model: Any) -> None:
    """Layers that say themselves which mask they take, as they did then."""
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        layer.attention_type = kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    parser.add_argument(
        "--folder",
        type=Path,
        default=os.environ.get("PUBLIC_ROUNDPIPE"),
        help="where pip has installed it (default: $PUBLIC_ROUNDPIPE)",
    )
    options = parser.parse_args()
    if options.folder is None or not (options.folder / "roundpipe").is_dir():
        print(f"no public RoundPipe in {options.folder}", file=sys.stderr)
        return 1
    workload = workload_of(options)
    measure.cap_gpu_memory(options.cap_gb)
    model = make_model(workload, measure.compute_device()).cpu()
    about = describe(workload, model)
    adapt_arguments()
    name_attention(model)
    sys.path.insert(0, str(options.folder.resolve()))
    public: Any = importlib.import_module("roundpipe")
    engine = public.wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        optim_dtype=torch.float32,
        model_run_config=public.RoundPipeRunConfig(num_microbatch=workload.num_microbatch),
    )
    optimizer = public.optim.Adam(
        engine.optim_parameters(), lr=LEARNING_RATE, weight_decay=0.01, decoupled_weight_decay=True
    )
    tokens = make_tokens(workload)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> Tensor:
        loss = engine.forward_backward(
            input_kwargs={"input_ids": tokens, "use_cache": False}, label=tokens, loss_fn=loss_of
        )
        engine.step(update, is_async=True)
        return loss / workload.num_microbatch

    timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
    record = {
        "bench": "rivals",
        "system": "public RoundPipe 0.1.1, asynchronous",
        "cap_gb": options.cap_gb,
        "tokens_per_s": workload.tokens_per_step / timed["step_s"],
        **about,
        **timed,
        **measure.peaks(),
        **measure.environment(),
    }
    return measure.run_row(record, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
