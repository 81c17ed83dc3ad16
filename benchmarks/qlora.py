"""Adapters of SmolLM2-135M in four bits: plain Trainer over bitsandbytes' model, RoundPipeTrainer
over the same, and RoundPipeTrainer over a checkpoint that `load_pretrained` has quantized.

    python benchmarks/qlora.py                                   # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/qlora.py --rows 2 --length 16 --dtype float32  # without one

The same weights, data, seeds and settings. Needs bitsandbytes. What counts is how far the losses of
the steps are apart, as each run says when it is over. A plain run in two halves of each batch says
how far rounding alone takes them: in bfloat16 that is far, as AdamW makes full steps of gradients
that are next to nothing.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from fetch_assets import smollm2_folder, wiki_summaries
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained

COLUMNS = ["what", "value", "unit", "setting"]
PLAIN = "bitsandbytes"
HALVES = "bitsandbytes, each batch in two halves"
RUNS = (PLAIN, HALVES, "roundpipe over bitsandbytes", "roundpipe")


def load(run: str, folder: Path, dtype: torch.dtype) -> Any:
    if run == "roundpipe":
        return load_pretrained(folder, quantization="nf4", quantized_dir=folder.parent / "nf4")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    # An engine wants weights on the host; the plain Trainer computes where they are.
    where = 0 if run in (PLAIN, HALVES) and torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map={"": where}, dtype=dtype
    )


def losses(run: str, folder: Path, options: argparse.Namespace) -> list[float]:
    set_seed(0)  # which the adapters are drawn from
    model = get_peft_model(
        load(run, folder, getattr(torch, options.dtype)),
        LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    texts = [one.extract for one in wiki_summaries()]
    ids = [tokenizer(text)["input_ids"][: options.length] for text in texts]
    rows = [{"input_ids": row, "labels": row} for row in ids if len(row) == options.length]
    trainer_of, config_of, more = (
        (Trainer, TrainingArguments, {})
        if run in (PLAIN, HALVES)
        else (RoundPipeTrainer, RoundPipeTrainingArguments, {"devices": options.devices})
    )
    parts = 2 if run == HALVES else 1
    trainer = trainer_of(
        model,
        config_of(
            output_dir="outputs/qlora",
            max_steps=options.steps,
            learning_rate=2e-4,
            per_device_train_batch_size=options.rows // parts,
            gradient_accumulation_steps=parts,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            **more,
        ),
        train_dataset=rows,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=4, help="of a step; an even number")
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    if options.rows < 2 or options.rows % 2:
        parser.error(f"--rows is {options.rows}; give an even number, for batches in two halves")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "plain"
        AutoModelForCausalLM.from_pretrained(
            smollm2_folder(), dtype=getattr(torch, options.dtype)
        ).save_pretrained(folder)
        found: dict[str, list[float]] = {}
        records = []
        for run in RUNS:
            own = found[run] = losses(run, folder, options)
            pairs = zip(own, found[PLAIN], strict=True)
            apart = max(abs(a - b) / b for a, b in pairs)
            losses_seen = f"loss {own[0]:.4f} -> {own[-1]:.4f}"
            records.append(
                {
                    "bench": "qlora", "what": f"largest relative difference of a loss: {run}",
                    "value": apart, "unit": "", "setting": f"{options.dtype}, {losses_seen}",
                    "losses": own, **measure.environment(),
                }
            )  # fmt: skip
            measure.emit(records[-1])
    print(f"\n{measure.table(records, COLUMNS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
