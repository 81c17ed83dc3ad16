"""A model that sees, Qwen3-VL-8B's shapes with adapters: fused steps through its preset, steps of
the model run in parts, and transformers' own with all of it on the GPU.

    python benchmarks/vision.py --ways preset parts resident

Each row is one image of 1,024 tokens and as many tokens of text. The tower is frozen, the language
model has adapters on all linear layers. Weights, pixels and tokens are random.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import measure
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import AdamW

COLUMNS = [
    "system", "tokens", "tokens_per_s", "step_s", "gpu_peak_reserved_gb", "host_peak_rss_gb",
    "loss_first", "loss_last",
]  # fmt: skip
WAYS = ("preset", "parts", "resident")
SIDE = 64  # patches of an image's side; two by two become one token
IMAGE, VIDEO, START = 151655, 151656, 151652
_ADAPTED = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def config_of(*, is_tiny: bool) -> Qwen3VLConfig:
    text = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    seen = {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    if is_tiny:
        text |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        seen |= {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        seen |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]}
    return Qwen3VLConfig(
        text_config=text,
        vision_config=seen,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
    )


def model_of(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with measure.compute_device():
            model = Qwen3VLForConditionalGeneration(config_of(is_tiny=options.tiny))
            adapters = LoraConfig(r=32, lora_alpha=64, target_modules=_ADAPTED)
            return get_peft_model(model, adapters, autocast_adapter_dtype=False).train()
    finally:
        torch.set_default_dtype(torch.float32)


def batch_of(options: argparse.Namespace) -> dict[str, Tensor]:
    side = 8 if options.tiny else SIDE
    seen = side * side // 4
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 150_000, (options.rows, 2 * seen), generator=generator)
    ids[:, 0] = START
    ids[:, 1 : 1 + seen] = IMAGE
    pixels = torch.randn(options.rows * side * side, 3 * 2 * 16 * 16, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "pixel_values": pixels.bfloat16(),
        "image_grid_thw": torch.tensor([[1, side, side]] * options.rows),
    }


def engine_step(way: str, options: argparse.Namespace) -> Callable[[], Tensor]:
    """Takes a step, by the fused call if there is a preset, else by autograd."""
    model = model_of(options).cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    measure.cap_gpu_memory(options.cap_gb)
    engine: Any = wrap_model_to_roundpipe(
        model,
        use_sequential_preset=way == "preset",
        model_run_config=RoundPipeRunConfig(num_microbatch=options.num_microbatch),
        optim_dtype=torch.float32,
        compile=options.compile,
        devices=None if torch.cuda.is_available() else 1,
    )
    optimizer = AdamW(engine.optim_parameters(), lr=1e-4)
    batch = batch_of(options)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> Tensor:
        if way == "preset":
            loss = engine.forward_backward(input_kwargs=batch)
        else:
            loss = engine(**batch).loss
            loss.backward()
        engine.step(update, is_async=options.is_async)
        return loss.detach()

    return step


def resident_step(options: argparse.Namespace) -> Callable[[], Tensor]:
    """Transformers' forward with gradient checkpointing; microbatches of whole rows."""
    device = measure.compute_device()
    model = model_of(options)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    batch = {name: value.to(device) for name, value in batch_of(options).items()}
    count = options.num_microbatch
    parts = {name: value.chunk(count) for name, value in batch.items()}

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for index in range(count):
            loss = model(**{name: chunks[index] for name, chunks in parts.items()}).loss / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def run(way: str, options: argparse.Namespace) -> measure.Record:
    if way == "resident":
        step = resident_step(options)
    else:
        step = engine_step(way, options)
    timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
    tokens = batch_of(options)["input_ids"].numel()
    names = {
        "preset": "RoundPipe, preset",
        "parts": "RoundPipe, in parts",
        "resident": "transformers, resident, checkpointing",
    }
    return {
        "bench": "vision",
        "system": names[way] + (", compiled" if options.compile and way != "resident" else ""),
        "tokens": f"{options.rows} x {tokens // options.rows}",
        "tokens_per_s": tokens / timed["step_s"],
        "cap_gb": options.cap_gb,
        "is_async": options.is_async,
        **timed,
        **measure.peaks(),
        **measure.environment(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--num-microbatch", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--async", dest="is_async", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    options = parser.parse_args()
    if len(options.ways) > 1:
        # argparse lets the last one win.
        rows = [[*sys.argv[1:], "--ways", way] for way in options.ways]
        return measure.run_rows(rows, COLUMNS)
    return measure.run_row(run(options.ways[0], options), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
