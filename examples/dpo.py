r"""Teach a language model a preference with TRL's DPO, all weights or LoRA adapters.

    python examples/dpo.py --model_name_or_path path/or/name --dataset_name a/data-set \
        --use_peft --output_dir outputs/dpo

    python examples/dpo.py --smollm2 --use_peft --lora_target_modules all-linear --max_steps 20 \
        --max_length 80 --learning_rate 1e-4 --output_dir outputs/dpo   # from the package index

In the manner of the example of the same name in TRL, with all its flags and those that `--help`
lists under RoundPipe. What RoundPipe changed are the names of two classes, marked below.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from fetch_assets import smollm2_folder, wiki_summaries
from needed import needed, told_in_a_line

with needed("trl"):
    from datasets import Dataset, DatasetDict, load_dataset
    from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

    from roundpipe_hf.trl import (
        RoundPipeDPOConfig,
        RoundPipeDPOTrainer,
    )  # was: DPOConfig, DPOTrainer


@dataclass
class Arguments(ScriptArguments):
    """TRL's, and where else pairs may come from."""

    smollm2: bool = field(
        default=False,
        metadata={"help": "SmolLM2-135M, which is to tell one article's summary from another's."},
    )
    held_out: int = field(
        default=24, metadata={"help": "Pairs to evaluate on, where there is no test split."}
    )


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = TrlParser((Arguments, RoundPipeDPOConfig, ModelConfig))  # was: DPOConfig
    script_args, training_args, model_args = parser.parse_args_and_config(args=argv)
    pairs = load_pairs(script_args)
    name = model_args.model_name_or_path
    if name is None and not script_args.smollm2:
        sys.exit("error: give --model_name_or_path or --smollm2")
    name = name or str(smollm2_folder())
    training_args.model_init_kwargs = {"dtype": model_args.dtype or "auto"}

    trainer = RoundPipeDPOTrainer(  # was: DPOTrainer
        model=name,
        args=training_args,
        train_dataset=pairs[script_args.dataset_train_split],
        eval_dataset=pairs[script_args.dataset_test_split],
        peft_config=get_peft_config(model_args),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    after = trainer.evaluate()
    trainer.log_metrics("eval", after)
    trainer.save_metrics("eval", after)
    print(f"Held-out pairs ranked right: {after['eval_rewards/accuracies']:.3f}")
    return result.metrics | after


def load_pairs(args: Arguments) -> DatasetDict:
    """A data set with the two splits that ``args`` names."""
    if args.dataset_name is not None:
        pairs = load_dataset(args.dataset_name, name=args.dataset_config)
    elif args.smollm2:
        pairs = DatasetDict(train=summaries())
    else:
        sys.exit("error: give --dataset_name or --smollm2")
    if args.dataset_train_split not in pairs:
        sys.exit(
            f"error: no split {args.dataset_train_split}, only {', '.join(pairs)}; name one by "
            "--dataset_train_split"
        )
    if args.dataset_test_split not in pairs:
        parts = pairs[args.dataset_train_split].train_test_split(args.held_out, seed=0)
        pairs = DatasetDict(
            {args.dataset_train_split: parts["train"], args.dataset_test_split: parts["test"]}
        )
    return pairs


def summaries() -> Dataset:
    """Questions, with the summary of the article that is asked for and with that of another."""
    short = [summary for summary in wiki_summaries() if len(summary.extract) < 200][:400]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"Tell me about {asked.title}."}],
                "chosen": [{"role": "assistant", "content": asked.extract}],
                "rejected": [{"role": "assistant", "content": other.extract}],
            }
            for asked, other in zip(short, short[1:] + short[:1], strict=True)
        ]
    )


if __name__ == "__main__":
    with told_in_a_line():
        main()
