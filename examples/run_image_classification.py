r"""Train an image classifier, from pretrained weights or from scratch.

    python examples/run_image_classification.py --model_name_or_path path/or/name \
        --train_dir images/train --validation_dir images/test --do_train --do_eval \
        --output_dir outputs/images

    python examples/run_image_classification.py --mnist --model_type vit --config_overrides \
        hidden_size=64,intermediate_size=96,num_hidden_layers=4,num_attention_heads=4,patch_size=7 \
        --image_size 28 --learning_rate 2e-3 --per_device_train_batch_size 32 \
        --num_train_epochs 8 --do_train --do_eval --output_dir outputs/images   # 9 of 10 right

In the manner of the example of the same name in transformers, with all flags of `TrainingArguments`
and those that `--help` lists under RoundPipe. A folder of images has one folder per class. What
RoundPipe changed are the names of two classes, marked below.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    set_seed,
)

from fetch_assets import mnist_5k
from needed import needed, told_in_a_line
from roundpipe_hf import (
    RoundPipeTrainer,
    RoundPipeTrainingArguments,
)  # was: Trainer, TrainingArguments

with needed("hf"):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Pretrained weights: a folder or a name on the Hub. Unset: train from scratch."
        },
    )
    model_type: str | None = field(
        default=None, metadata={"help": "From scratch: the architecture, such as vit."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "From scratch: settings unlike the defaults, as name=value,name=value."},
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "Dtype of the weights; auto: that of the files, or float32."},
    )


@dataclass
class DataArguments:
    """Which images, and what is done to them."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "A data set of the datasets library."}
    )
    train_dir: str | None = field(
        default=None, metadata={"help": "A folder with a folder of images for each class."}
    )
    validation_dir: str | None = field(default=None)
    mnist: bool = field(
        default=False, metadata={"help": "5,000 handwritten digits, where you name no images."}
    )
    image_column: str = field(default="image")
    label_column: str = field(default="label")
    train_val_split: float = field(
        default=0.1, metadata={"help": "Held out, if there is no validation split."}
    )
    image_size: int | None = field(
        default=None, metadata={"help": "Side in pixels; default: the model's."}
    )
    max_train_samples: int | None = field(default=None)
    max_eval_samples: int | None = field(default=None)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, RoundPipeTrainingArguments)
    )  # was: TrainingArguments
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(args=argv)
    if not (training_args.do_train or training_args.do_eval):
        sys.exit("error: nothing to do; give --do_train, --do_eval or both")
    set_seed(training_args.seed)

    images = load_images(data_args, training_args.seed)
    names = images["train"].features["label"].names
    model = make_model(model_args, names, data_args.image_size)
    collator = Collator(data_args.image_size or model.config.image_size, model.config)
    training_args.remove_unused_columns = (
        False  # because the collator makes the model's inputs out of images
    )

    trainer = RoundPipeTrainer(  # was: Trainer
        model=model,
        args=training_args,
        train_dataset=first(images["train"], data_args.max_train_samples)
        if training_args.do_train
        else None,
        eval_dataset=first(images["validation"], data_args.max_eval_samples)
        if training_args.do_eval
        else None,
        data_collator=collator,
        compute_metrics=accuracy,
    )
    metrics: dict[str, float] = {}
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics |= result.metrics
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        found = trainer.evaluate()
        trainer.log_metrics("eval", found)
        trainer.save_metrics("eval", found)
        metrics |= found
    return metrics


def make_model(args: ModelArguments, names: list[str], image_size: int | None) -> PreTrainedModel:
    classes = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
    if args.model_name_or_path is not None:
        config = AutoConfig.from_pretrained(args.model_name_or_path, **classes)
        return AutoModelForImageClassification.from_pretrained(
            args.model_name_or_path, config=config, dtype=args.dtype, ignore_mismatched_sizes=True
        )
    if args.model_type not in CONFIG_MAPPING:
        sys.exit(f"error: give --model_name_or_path or a --model_type; {args.model_type!r} is none")
    config = CONFIG_MAPPING[args.model_type](
        **classes, **({} if image_size is None else {"image_size": image_size})
    )
    if args.config_overrides:
        config.update_from_string(args.config_overrides)
    return AutoModelForImageClassification.from_config(
        config, dtype="float32" if args.dtype == "auto" else args.dtype
    )


def load_images(args: DataArguments, seed: int) -> DatasetDict:
    """A data set with the splits train and validation, and the columns ``image`` and ``label``."""
    if args.dataset_name is not None:
        loaded = load_dataset(args.dataset_name)
    elif args.train_dir is not None:
        given = {"train": args.train_dir, "validation": args.validation_dir}
        folders = {name: folder for name, folder in given.items() if folder is not None}
        for folder in folders.values():
            if not any(Path(folder).glob("*/*")):
                sys.exit(f"error: {folder} has no folders with images, one for each class")
        loaded = load_dataset(
            "imagefolder",
            data_files={name: f"{folder}/**" for name, folder in folders.items()},
        )
    elif args.mnist:
        loaded = DatasetDict(train=digits())
    else:
        sys.exit("error: give --dataset_name, --train_dir or --mnist")
    renamed = {args.image_column: "image", args.label_column: "label"}
    loaded = loaded.rename_columns({old: new for old, new in renamed.items() if old != new})
    if "validation" not in loaded:
        parts = loaded["train"].train_test_split(
            args.train_val_split, seed=seed, stratify_by_column="label"
        )
        loaded = DatasetDict(train=parts["train"], validation=parts["test"])
    return loaded


def digits() -> Dataset:
    images, labels = mnist_5k()
    features = Features(
        {"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])}
    )
    return Dataset.from_dict({"image": list(images), "label": labels.tolist()}, features=features)


class Collator:
    """Makes a batch of pixels out of images of any size: resized to a square, then normalised."""

    def __init__(self, size: int, config: Any) -> None:
        self.size = size
        self.num_channels = getattr(config, "num_channels", 3)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.stack([self.pixels(row["image"]) for row in rows]),
            "labels": torch.tensor([row["label"] for row in rows]),
        }

    def pixels(self, image: Any) -> Tensor:
        """(channels, size, size), between -1 and 1."""
        array = np.array(image.convert("RGB" if self.num_channels == 3 else "L"), dtype=np.float32)
        pixels = torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1)
        resized = F.interpolate(
            pixels[None], (self.size, self.size), mode="bilinear", antialias=True
        )[0]
        return resized / 127.5 - 1


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {
        "accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())
    }


def first(rows: Dataset, count: int | None) -> Dataset:
    return rows if count is None else rows.select(range(min(count, len(rows))))


if __name__ == "__main__":
    with told_in_a_line():
        main()
