"""Example scripts end in one line that says what to give where they cannot use what they are given;
they never pass over what the user names for the built-in data."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import dpo
import grpo
import run_clm
import run_image_classification
import sft
from tests.support import ROOT
from tests.support.example_data import LLAMA, QUIET, save_images, save_tokenizer, sentences


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a text of 20 sentences, the same as JSON, and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    texts = sentences(20)
    Path("text.txt").write_text("\n".join(texts))
    Path("rows.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in texts))
    Path("text.pdf").write_text("\n".join(texts))
    save_tokenizer(tmp_path / "tokenizer")


def clm(flags: str) -> list[str]:
    base = "--tokenizer_name tokenizer --output_dir out --per_device_train_batch_size 4"
    return [*base.split(), *LLAMA, *QUIET, "--max_steps", "1", *flags.split()]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train_file text.txt", "nothing to do; give --do_train, --do_eval or both"),
        ("--do_train", "give --train_file, or"),
        ("--do_train --validation_file text.txt", "give --train_file, or"),
        ("--do_train --train_file text.pdf", "text.pdf ends with none of .txt, .json, .jsonl"),
        ("--do_train --train_file rows.jsonl", "no column text, only said; .* --text_column"),
        ("--do_train --train_file text.txt --block_size 0", "--block_size is 0; .* takes 1 to 64"),
        ("--do_train --train_file text.txt --block_size 99", "is 99; .* takes 1 to 64"),
        (
            "--do_train --do_eval --train_file text.txt --block_size 24",
            "the validation text has [0-9]+ tokens, too few for a row of 24; .* --block_size",
        ),
    ],
)
def test_run_clm_says_what_to_give(flags: str, said: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{said}"):
        run_clm.main(clm(flags))
    assert not Path("out").exists()


def test_run_clm_reads_each_file_by_the_end_of_its_name() -> None:
    """JSON beside a text is not read as lines of text: the same sentences have the same tokens. A
    file to evaluate on is enough where nothing is trained."""
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    Path("rows.jsonl").write_text("".join(json.dumps({"text": row["said"]}) + "\n" for row in rows))
    evaluate = "--do_eval --block_size 8 --seed 1 --validation_file"
    beside = run_clm.main(clm(f"{evaluate} rows.jsonl --train_file text.txt"))
    alone = run_clm.main(clm(f"{evaluate} text.txt"))
    assert beside["eval_samples"] == alone["eval_samples"]
    assert beside["eval_loss"] == alone["eval_loss"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train_dir images", "nothing to do; give --do_train, --do_eval or both"),
        ("--do_train --train_dir no/where", "no/where has no folders with images"),
        ("--do_train --train_dir images/above", "images/above has no folders with images"),
        ("--do_train --train_dir images --validation_dir no", "no has no folders with images"),
    ],
)
def test_run_image_classification_says_what_to_give(flags: str, said: str) -> None:
    save_images(Path("images"))
    with pytest.raises(SystemExit, match=f"^error: {said}"):
        run_image_classification.main([*flags.split(), "--output_dir", "out"])


OWN = {"text": ["the cat"] * 4, "prompt": ["the"] * 4, "answer": [1] * 4}


@pytest.mark.parametrize(
    ("load", "arguments"),
    [
        (sft.load_rows, sft.Arguments),
        (dpo.load_pairs, dpo.Arguments),
        (grpo.load_questions, grpo.Arguments),
    ],
    ids=["sft", "dpo", "grpo"],
)
def test_a_data_set_of_the_users_goes_before_the_built_in_one(load: Any, arguments: Any) -> None:
    """Also with --smollm2, which then names the weights alone. A missing split is named."""
    Dataset.from_dict(OWN).to_json("own/train.jsonl")
    found = load(arguments(dataset_name="own", smollm2=True, held_out=1))
    assert (len(found["train"]), len(found["test"])) == (3, 1)
    assert found["train"].column_names == list(OWN)
    with pytest.raises(SystemExit, match="no split best, only train; .* --dataset_train_split"):
        load(arguments(dataset_name="own", dataset_train_split="best"))


def test_images_of_the_users_go_before_the_digits() -> None:
    folder = save_images(Path("images"))
    arguments = run_image_classification.DataArguments(
        train_dir=str(folder), mnist=True, train_val_split=0.34
    )
    found = run_image_classification.load_images(arguments, seed=0)
    names = sorted(each.name for each in folder.iterdir())
    assert found["train"].features["label"].names == names


@pytest.mark.slow
@pytest.mark.parametrize("option", ["devices", "steps"])
def test_the_quickstart_names_a_number_that_is_too_small(option: str) -> None:
    """Before it loads anything."""
    command = [sys.executable, str(ROOT / "examples/quickstart.py"), f"--{option}", "0"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 2
    assert f"--{option} is 0; give at least 1" in finished.stderr
