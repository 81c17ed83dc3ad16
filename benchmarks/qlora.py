"""Adapters of SmolLM2-135M in four bits: plain Trainer over bitsandbytes' model, RoundPipeTrainer
over the same, and RoundPipeTrainer over a checkpoint that `load_pretrained` has quantized.

    python benchmarks/qlora.py                                                # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/qlora.py --steps 3 --rows 1 --length 8  # without one

The same weights, data, seeds and settings. Needs bitsandbytes, whose CPU code takes seconds for a
step of any size. What counts is how far the losses of the steps are apart, as each run says when it
is over.
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
RUNS = ("bitsandbytes", "roundpipe over bitsandbytes", "roundpipe")


def load(run: str, folder: Path) -> Any:
    if run == "roundpipe":
        return load_pretrained(folder, quantization="nf4", quantized_dir=folder.parent / "nf4")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    # An engine wants weights on the host; the plain Trainer computes where they are.
    where = 0 if run == RUNS[0] and torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map={"": where}, dtype=torch.bfloat16
    )


def losses(run: str, folder: Path, options: argparse.Namespace) -> list[float]:
    set_seed(0)  # which the adapters are drawn from
    model = get_peft_model(
        load(run, folder),
        LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    texts = [one.extract for one in wiki_summaries()]
    ids = [tokenizer(text)["input_ids"][: options.length] for text in texts]
    rows = [{"input_ids": row, "labels": row} for row in ids if len(row) == options.length]
    trainer_of, config_of, more = (
        (Trainer, TrainingArguments, {})
        if run == "bitsandbytes"
        else (RoundPipeTrainer, RoundPipeTrainingArguments, {"devices": options.devices})
    )
    trainer = trainer_of(
        model,
        config_of(
            output_dir="outputs/qlora",
            max_steps=options.steps,
            learning_rate=2e-4,
            per_device_train_batch_size=options.rows,
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
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "bf16"
        AutoModelForCausalLM.from_pretrained(
            smollm2_folder(), dtype=torch.bfloat16
        ).save_pretrained(folder)
        found: dict[str, list[float]] = {}
        records = []
        for run in RUNS:
            own = found[run] = losses(run, folder, options)
            pairs = zip(own, found[RUNS[0]], strict=True)
            apart = max(abs(a - b) / b for a, b in pairs)
            records.append(
                {
                    "bench": "qlora", "what": f"largest relative difference of a loss: {run}",
                    "value": apart, "unit": "", "setting": f"loss {own[0]:.4f} -> {own[-1]:.4f}",
                    "losses": own, **measure.environment(),
                }
            )  # fmt: skip
            measure.emit(records[-1])
    print(f"\n{measure.table(records, COLUMNS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
