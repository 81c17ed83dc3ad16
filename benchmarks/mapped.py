"""Adapters over a base that stays in mapped files, also one larger than the machine's memory.

    python benchmarks/mapped.py --gb 2 --room-gb 1          # the engine believes in 1 GB of memory
    python benchmarks/mapped.py --gb 30 --hidden 5120       # a machine with less

Makes a checkpoint of random weights, a shard for each layer (kept with --keep), and trains LoRA on
it. For each step: seconds, bytes read from the disk, beside the least that a base of B bytes takes
with C of it in memory (two sweeps of B - C), and anonymous memory. --without lets the system alone
decide what is read and kept. --shards 1 writes the same weights into one file; equal --seed means
equal losses, whatever the rest.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from host_memory import Peak, resident_bytes
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, PrinterCallback, TrainerCallback, set_seed

from roundpipe.engine import state
from roundpipe.memory.page_cache import PageCache
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained

VOCABULARY = 1024
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def config_of(options: argparse.Namespace) -> LlamaConfig:
    hidden = options.hidden
    per_layer = DTYPES[options.dtype].itemsize * (4 * hidden**2 + 3 * hidden * (hidden * 11 // 4))
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=max(1, round(options.gb * 1e9 / per_layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        dtype=options.dtype,
        architectures=["LlamaForCausalLM"],
    )


def shapes(config: LlamaConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """One layer after the other."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield {
            **{f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    yield {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


class Noise:
    """Draws weights from one pool, because drawing each takes longer than writing it."""

    def __init__(self, config: LlamaConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(config.hidden_size * config.intermediate_size, generator=generator)
        self._pool = noise.mul_(0.02).to(config.dtype)

    def draw(self, number: int, shape: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """The tensors of the layer of that number."""
        return {
            name: self._pool.roll(7919 * (20 * number + place))[: math.prod(size)]
            .view(size)
            .clone()
            if len(size) > 1
            else torch.ones(size, dtype=self._pool.dtype)
            for place, (name, size) in enumerate(shape.items())
        }


def write_checkpoint(config: LlamaConfig, folder: Path, *, is_one_file: bool) -> None:
    """Goes on where an earlier run has stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = Noise(config)
    if is_one_file:
        everything: dict[str, torch.Tensor] = {}
        for number, shape in enumerate(shapes(config)):
            everything |= noise.draw(number, shape)
        save_file(everything, folder / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {}
        for number, shape in enumerate(shapes(config)):
            name = f"model-{number:05}.safetensors"
            weight_map |= dict.fromkeys(shape, name)
            if not (folder / name).exists():
                save_file(noise.draw(number, shape), folder / "unfinished", {"format": "pt"})
                (folder / "unfinished").rename(folder / name)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


class Watch(TrainerCallback):
    """Prints each step as it ends."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at, self._read = time.perf_counter(), bytes_read()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            row = {
                "step": state.global_step,
                "loss": logs["loss"],
                "grad_norm": logs["grad_norm"],
                "seconds": round(time.perf_counter() - self._at, 2),
                "read_gb": round((bytes_read() - self._read) / 1e9, 3),
                "anonymous_gb": round(resident_bytes() / 1e9, 3),
            }
            print(json.dumps(row), flush=True)


def train(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Prints what each step took; returns the rest."""
    if options.room_gb is not None:
        PageCache.room = lambda _: int(options.room_gb * 1e9)
    if options.without:
        state.make_read_ahead = lambda *_: None
    peak = Peak()
    peak.start()
    before = resident_bytes()
    set_seed(options.seed)
    began = time.perf_counter()
    model = get_peft_model(
        load_pretrained(folder),
        LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]),
    )
    loaded = time.perf_counter() - began
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    generator = torch.Generator().manual_seed(options.seed)
    drawn = torch.randint(VOCABULARY, (8, options.tokens), generator=generator).tolist()
    trainer = RoundPipeTrainer(
        model,
        RoundPipeTrainingArguments(
            output_dir="outputs/mapped",
            max_steps=options.steps,
            per_device_train_batch_size=options.rows,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=options.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            devices=options.devices,
            max_gpu_memory=options.device_gb,
            pin_model="off",
            seed=options.seed,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in drawn],
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    read_ahead = options.made[0] if options.made else None
    kept = sum(stretch.num_bytes for stretch in read_ahead._kept) if read_ahead else 0
    room = min(base, read_ahead._room) if read_ahead else base
    return {
        "base_gb": base / 1e9,
        "kept_gb": kept / 1e9,
        "loading_s": loaded,
        "anonymous_peak_gb": (peak.stop() - before) / 1e9,
        "room_gb": room / 1e9,
        "least_read_gb": 2 * (base - room) / 1e9,
    }


def noting_read_aheads() -> list[Any]:
    """Those that engines make from here on."""
    made: list[Any] = []
    make = state.make_read_ahead

    def noted(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    state.make_read_ahead = noted
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="of the base")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the base; many CPUs multiply bfloat16 a hundred times slower",
    )
    parser.add_argument("--room-gb", type=float, help="what the engine takes for free memory")
    parser.add_argument("--device-gb", type=float, help="of each device: max_gpu_memory")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", choices=["1", "layer"], default="layer")
    parser.add_argument("--folder", type=Path, default=Path("outputs/mapped-checkpoint"))
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--without", action="store_true", help="neither read ahead nor let go")
    options = parser.parse_args()
    options.made = noting_read_aheads()
    config = config_of(options)
    try:
        write_checkpoint(config, options.folder, is_one_file=options.shards == "1")
        found = train(options.folder, options)
    finally:
        if not options.keep:
            shutil.rmtree(options.folder)
    setting = f"{config.num_hidden_layers} x {options.hidden}, {options.rows} x {options.tokens}"
    for what, value in found.items():
        record = {"what": what, "value": round(value, 3), "setting": setting}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
