r"""Train a causal language model on text, from pretrained weights or from scratch.

    python examples/run_clm.py --model_name_or_path path/or/name --train_file text.txt \
        --validation_file more.txt --do_train --do_eval --bf16 --per_device_train_batch_size 8 \
        --output_dir outputs/clm

    python examples/run_clm.py --model_type qwen3 \
        --config_overrides hidden_size=256,num_hidden_layers=4 \
        --tokenizer_name path/or/name --train_file text.txt --do_train --output_dir outputs/clm

In the manner of the example of the same name in transformers, with all flags of `TrainingArguments`
and those that `--help` lists under RoundPipe (`--devices 3`, `--pin_model off`, `--async_optimizer`
...). What RoundPipe changed are the names of two classes, marked below.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from needed import needed, told_in_a_line
from roundpipe_hf import (
    RoundPipeTrainer,
    RoundPipeTrainingArguments,
    load_pretrained_mmap,
)  # was: Trainer, ...

with needed("hf"):
    import datasets
    from datasets import DatasetDict, load_dataset


@dataclass
class ModelArguments:
    """Which model, and what of it trains."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Pretrained weights: a folder or a name on the Hub. Unset: train from scratch."
        },
    )
    model_type: str | None = field(
        default=None, metadata={"help": "From scratch: the architecture, such as qwen3."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "From scratch: a folder or name to take it from."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "From scratch: settings unlike the defaults, as name=value,name=value."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "If the model comes without a tokenizer."}
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "Dtype of the weights; auto: that of the files, or float32."},
    )
    lora_r: int | None = field(
        default=None, metadata={"help": "Train LoRA adapters of this rank, on all linear layers."}
    )


@dataclass
class DataArguments:
    """Which text, and how it is cut."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "A data set of the datasets library."}
    )
    dataset_config_name: str | None = field(default=None)
    train_file: str | None = field(
        default=None, metadata={"help": "A .txt, .json, .jsonl or .csv file."}
    )
    validation_file: str | None = field(default=None)
    text_column: str = field(
        default="text", metadata={"help": "Where a data set or table has its text."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Of the training text, if that is all."}
    )
    block_size: int | None = field(
        default=None,
        metadata={"help": "Tokens per row; default: what the model takes, at most 1024."},
    )
    max_train_samples: int | None = field(default=None)
    max_eval_samples: int | None = field(default=None)
    preprocessing_num_workers: int | None = field(default=None)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, RoundPipeTrainingArguments)
    )  # was: TrainingArguments
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(args=argv)
    if not (training_args.do_train or training_args.do_eval):
        sys.exit("error: nothing to do; give --do_train, --do_eval or both")
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(
        first_given(model_args.tokenizer_name, model_args.model_name_or_path)
    )
    model = make_model(model_args, tokenizer, is_mapped=training_args.pin_model == "off")
    with training_args.main_process_first(desc="preparing the text"):
        rows = blocks_of_tokens(load_text(data_args, training_args), tokenizer, model, data_args)

    trainer = RoundPipeTrainer(  # was: Trainer
        model=model,
        args=training_args,
        train_dataset=first(rows["train"], data_args.max_train_samples)
        if training_args.do_train
        else None,
        eval_dataset=first(rows["validation"], data_args.max_eval_samples)
        if training_args.do_eval
        else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    metrics: dict[str, float] = {}
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics |= result.metrics | {"train_samples": len(trainer.train_dataset)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        found = trainer.evaluate()
        found |= {
            "eval_samples": len(trainer.eval_dataset),
            "perplexity": perplexity(found["eval_loss"]),
        }
        trainer.log_metrics("eval", found)
        trainer.save_metrics("eval", found)
        metrics |= found
    return metrics


def make_model(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, *, is_mapped: bool
) -> PreTrainedModel:
    if args.model_name_or_path is not None:
        load = load_pretrained_mmap if is_mapped else AutoModelForCausalLM.from_pretrained
        model = load(args.model_name_or_path, dtype=args.dtype)
    else:
        config = new_config(args)
        model = AutoModelForCausalLM.from_config(
            config, dtype="float32" if args.dtype == "auto" else args.dtype
        )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    if args.lora_r is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=args.lora_r, target_modules="all-linear")
        )
    return model


def new_config(args: ModelArguments) -> PreTrainedConfig:
    settings: dict[str, Any] = {}
    if args.config_name is not None:
        config = AutoConfig.from_pretrained(args.config_name)
        settings = PreTrainedConfig.get_config_dict(args.config_name)[0]
    elif args.model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[args.model_type]()
    else:
        sys.exit(
            "error: give --model_name_or_path, --config_name or a --model_type; "
            f"{args.model_type!r} is none"
        )
    if args.config_overrides is None:
        return config
    config.update_from_string(args.config_overrides)
    # Made anew, because the kinds of the blocks are derived from their number.
    settings.pop("layer_types", None)
    changed = [setting.split("=")[0] for setting in args.config_overrides.split(",")]
    return type(config)(**settings | {name: getattr(config, name) for name in changed})


BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load_text(args: DataArguments, training_args: RoundPipeTrainingArguments) -> DatasetDict:
    """The splits that are wanted of train and validation, with one column, ``text``."""
    if args.dataset_name is not None:
        loaded = load_dataset(args.dataset_name, args.dataset_config_name)
    else:
        files = {"train": args.train_file, "validation": args.validation_file}
        loaded = DatasetDict(
            {split: load_file(file) for split, file in files.items() if file is not None}
        )
    if "train" not in loaded and (training_args.do_train or "validation" not in loaded):
        sys.exit("error: give --train_file, or by --dataset_name a data set with a split train")
    if "validation" not in loaded:
        share = args.validation_split_percentage / 100
        parts = loaded["train"].train_test_split(share, seed=training_args.seed)
        loaded = DatasetDict(train=parts["train"], validation=parts["test"])
    wanted = {"train": training_args.do_train, "validation": training_args.do_eval}
    return DatasetDict(
        {split: only_text(loaded[split], args) for split, is_used in wanted.items() if is_used}
    )


def load_file(file: str) -> datasets.Dataset:
    """Each file by the end of its own name, because one builder would read JSON as text, too."""
    builder = BUILDERS.get(Path(file).suffix)
    if builder is None:
        sys.exit(f"error: {file} ends with none of {', '.join(BUILDERS)}")
    return load_dataset(builder, data_files=file, split="train")


def only_text(rows: datasets.Dataset, args: DataArguments) -> datasets.Dataset:
    if args.text_column not in rows.column_names:
        sys.exit(
            f"error: no column {args.text_column}, only {', '.join(rows.column_names)}; "
            "say by --text_column where the text is"
        )
    rows = rows.select_columns([args.text_column])
    return rows if args.text_column == "text" else rows.rename_column(args.text_column, "text")


def blocks_of_tokens(
    text: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    args: DataArguments,
) -> DatasetDict:
    """All the text in a row, cut into blocks of equal length; what is left over at the end of a
    part is dropped."""
    longest = getattr(model.config, "max_position_embeddings", None) or 1024
    if args.block_size is not None and not 1 <= args.block_size <= longest:
        sys.exit(f"error: --block_size is {args.block_size}; this model takes 1 to {longest}")
    size = min(args.block_size or 1024, longest)

    def tokenize(part: dict[str, list[str]]) -> dict[str, Any]:
        return tokenizer(part["text"])

    def cut(part: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain.from_iterable(column)) for name, column in part.items()}
        end = len(joined["input_ids"]) // size * size
        blocks = {
            name: [tokens[start : start + size] for start in range(0, end, size)]
            for name, tokens in joined.items()
        }
        return blocks | {"labels": [list(block) for block in blocks["input_ids"]]}

    how = {"batched": True, "num_proc": args.preprocessing_num_workers}
    tokens = text.map(tokenize, remove_columns=["text"], desc="Tokenizing", **how)
    blocks = tokens.map(cut, desc="Cutting blocks", **how)
    for split, rows in blocks.items():
        if len(rows) == 0:
            count = sum(map(len, tokens[split]["input_ids"]))
            sys.exit(
                f"error: the {split} text has {count} tokens, too few for a row of {size}; give "
                "more text, or a smaller --block_size"
            )
    return blocks


def first(rows: datasets.Dataset, count: int | None) -> datasets.Dataset:
    return rows if count is None else rows.select(range(min(count, len(rows))))


def first_given(*names: str | None) -> str:
    given = next((name for name in names if name is not None), None)
    return (
        given
        if given is not None
        else sys.exit("error: give --tokenizer_name or --model_name_or_path")
    )


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return float("inf")


if __name__ == "__main__":
    with told_in_a_line():
        main()
