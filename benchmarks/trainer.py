"""`RoundPipeTrainer` on the shared workload, as examples/run_clm.py trains: to be held against
throughput.py's rows.

    python benchmarks/trainer.py --compile
    python benchmarks/trainer.py --compile --model llama-3-8b --methods lora --pin-model off

With ``--as-written`` the settings are those of people's scripts, ``bf16=True,
gradient_checkpointing=True`` and four batches accumulated, everything else by default; with
``--system plain`` the same script trains by Trainer, the model on the GPU.

With ``--pin-model off`` the weights stay in the safetensors files of a checkpoint that is written
first, and host memory is watched: pages that are no file's, before the model is loaded and at most
from then on. A tiny model trains before that, so that what libraries allocate once is there. The
folder of the files must not be in memory itself.
"""

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure
import torch
from engine import plan_of
from host_memory import Peak, resident_bytes
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from workload import (
    LEARNING_RATE,
    MAX_NORM,
    Workload,
    add_workload_options,
    describe,
    make_model,
    make_tokens,
    with_lora,
    workload_of,
)

from roundpipe.system.cores import usable_cores
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained_mmap

COLUMNS = [
    "method", "mode", "loss", "compile", "pin_model", "tokens_per_s", "step_s",
    "gpu_peak_allocated_gb", "host_peak_rss_gb", "base_gb", "growth_gb", "growth_of_base",
    "loss_first", "loss_last",
]  # fmt: skip
PART_BYTES = 2**30
# Working copy, master, two moments and a offloaded gradient that its sum outlives: what training
# itself needs.
BYTES_PER_TRAINABLE = 2 + 4 + 8 + 2


class OwnLoss(RoundPipeTrainer):
    """A cross-entropy written by hand, on whole batches of logits unless declared otherwise."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class Clock:
    """The data collator. Trainer asks for a batch as each step begins, after one that it asks for
    ahead of all.

    A callback would be the simpler clock. But a callback may look at the weights, so that each
    synchronous step would wait for all of its update. Trainer asks for all batches of a step at
    once, after one that it asks for ahead of them.
    """

    def __init__(self, warmup: int, accumulated: int) -> None:
        self._begun: list[float] = []
        self._accumulated = accumulated
        self._first = warmup * accumulated + 1

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if len(self._begun) == self._first and torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        self._begun.append(time.perf_counter())
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def step_s(self, steps: int) -> float:
        """From the beginning of the first step after the warm-up to that of the one after ``steps``
        of them."""
        last = self._first + steps * self._accumulated
        return (self._begun[last] - self._begun[self._first]) / steps

    def first_steps_s(self) -> list[float]:
        """Times the first steps, each from where it begins to where the next one does."""
        begun = self._begun[1 : 5 * self._accumulated : self._accumulated]
        return [after - before for before, after in itertools.pairwise(begun)]


def make_trainer(
    options: argparse.Namespace, workload: Workload, model: nn.Module, output_dir: str
) -> Any:
    """Two steps come after the timed ones, for between them the losses of all before are logged."""
    steps = options.warmup + options.steps + 2
    accumulated = 4 if options.as_written else 1
    given: dict[str, Any] = {
        "output_dir": output_dir,
        "per_device_train_batch_size": workload.rows // accumulated,
        "gradient_accumulation_steps": accumulated,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_NORM,
        "train_sampling_strategy": "sequential",
        "logging_first_step": True,
        "logging_steps": steps - 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "torch_compile": options.compile,
        "use_cpu": not torch.cuda.is_available(),
    }
    if options.as_written:
        given |= {"bf16": True, "gradient_checkpointing": True}
    if options.system == "plain":
        args: Any = TrainingArguments(**given)
    else:
        args = RoundPipeTrainingArguments(
            **given,
            async_optimizer=options.modes == ["async"],
            devices=options.devices,
            num_microbatch=None if options.as_written else workload.num_microbatch,
            pin_model=options.pin_model,
            max_gpu_memory=options.max_gpu_memory,
        )
    rows = [{"input_ids": row, "labels": row} for row in make_tokens(workload)]
    if options.loss == "fused":
        args.loss_reduction = "tokens"
    kind: Any = RoundPipeTrainer if options.loss == "models" else OwnLoss
    if options.system == "plain":
        kind = Trainer
    collator = Clock(options.warmup, accumulated)
    trainer = kind(model, args, train_dataset=rows * steps, data_collator=collator)
    trainer.remove_callback(PrinterCallback)  # its lines look like records
    return trainer


def losses_of(trainer: Any) -> dict[str, float]:
    """Of the first and the last step. Trainer logs means: of the first step, of all between, of
    all."""
    first, between, overall = trainer.state.log_history
    steps = trainer.state.max_steps
    last = steps * overall["train_loss"] - first["loss"] - (steps - 2) * between["loss"]
    return {"loss_first": first["loss"], "loss_last": last}


def write_checkpoint(workload: Workload, folder: Path) -> None:
    """Random weights, of which one part at a time is in memory."""
    model: Any = make_model(replace(workload, method="full"), torch.device("meta"))
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    part: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}

    def save_part() -> None:
        file = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
        part.clear()

    for name, parameter in model.named_parameters():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=measure.compute_device())
        part[name] = (made.normal_(std=0.02) if made.ndim > 1 else made.fill_(1.0)).cpu()
        if sum(tensor.nbytes for tensor in part.values()) >= PART_BYTES:
            save_part()
    save_part()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def make_mapped_model(workload: Workload, folder: Path) -> nn.Module:
    model = load_pretrained_mmap(folder)
    return with_lora(model, workload.shapes.lora_rank) if workload.method == "lora" else model


def train(
    options: argparse.Namespace, workload: Workload, model: nn.Module, folder: Path
) -> measure.Record:
    trainer = make_trainer(options, workload, model, str(folder / "out"))
    trainer.train()
    measure.wait_device()
    step_s = trainer.data_collator.step_s(options.steps)
    is_plain = options.system == "plain"
    engine = trainer.model_wrapped
    record = {
        "bench": "trainer",
        "system": "Trainer" if is_plain else f"RoundPipeTrainer, {options.modes[0]}",
        "as_written": options.as_written,
        "first_steps_s": trainer.data_collator.first_steps_s(),
        "mode": options.modes[0],
        "tokens_per_s": workload.tokens_per_step / step_s,
        "step_s": step_s,
        "compile": options.compile,
        "plan": "-" if is_plain else plan_of(engine),
        "planned_by": "engine",
        "recompute_grain": "stage",
        "loss": options.loss,
        "pin_model": options.pin_model,
        "devices": 1 if is_plain else len(engine.devices),
        "max_gpu_memory_gb": options.max_gpu_memory,
        **describe(workload, model),
        "warmup": options.warmup,
        "steps": options.steps,
        **losses_of(trainer),
        **measure.peaks(),
        **measure.environment(),
    }
    if not is_plain:
        engine.close()
    return record


def train_mapped(options: argparse.Namespace, workload: Workload, folder: Path) -> measure.Record:
    """With what host memory grew by."""
    tiny = replace(workload, tiny=True, rows=min(workload.rows, 8), length=min(workload.length, 32))
    write_checkpoint(tiny, folder / "tiny")
    write_checkpoint(workload, folder / "weights")
    train(options, tiny, make_mapped_model(tiny, folder / "tiny"), folder)
    gc.collect()
    before = resident_bytes()
    peak = Peak()
    peak.start()
    model = make_mapped_model(workload, folder / "weights")
    loaded = resident_bytes()
    record = train(options, workload, model, folder)
    grown = peak.stop() - before
    base = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    return record | {
        "base_gb": base / 1e9,
        "before_gb": before / 1e9,
        "growth_of_loading_gb": (loaded - before) / 1e9,
        "growth_gb": grown / 1e9,
        "growth_of_base": grown / base,
        "state_of_trainable_gb": BYTES_PER_TRAINABLE * record["trainable"] / 1e9,
    }


def run(options: argparse.Namespace) -> measure.Record:
    torch.set_num_threads(options.threads)
    workload = workload_of(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.pin_model == "off":
            return train_mapped(options, workload, Path(folder))
        model = make_model(workload, measure.compute_device())
        if options.system == "roundpipe":
            model = model.cpu()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return train(options, workload, model, Path(folder))


def main() -> int:
    cores = usable_cores()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    add_workload_options(parser)
    parser.add_argument("--modes", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument(
        "--loss",
        choices=["models", "fused", "whole"],
        default="models",
        help="the model's own, or one written by hand, run with the model or on whole batches",
    )
    parser.add_argument("--system", choices=["roundpipe", "plain"], default="roundpipe")
    parser.add_argument("--as-written", action="store_true", help="flags as in people's scripts")
    parser.add_argument("--compile", action="store_true", help="torch_compile=True")
    parser.add_argument("--pin-model", choices=["alloc", "register", "off"], default="alloc")
    parser.add_argument(
        "--devices", type=int, help="the first so many GPUs; without a GPU: virtual devices"
    )
    parser.add_argument(
        "--max-gpu-memory", type=float, metavar="GB", help="stay under this much on each GPU"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the files go for a while (default: the system's)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, cores * 3 // 4),
        help="host threads (default 3/4 of cores)",
    )
    options = parser.parse_args()
    rows = [(method, mode) for method in options.methods for mode in options.modes]
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--methods", a, "--modes", b] for a, b in rows], COLUMNS
        )
    return measure.run_row(run(options), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
