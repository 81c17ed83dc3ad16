"""The engine's settings are ordinary training arguments: command line, JSON, and early errors."""

import json
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainingArguments
from roundpipe_hf.trl import RoundPipeSFTConfig

SETTINGS: dict[str, Any] = {
    "async_optimizer": True,
    "devices": ["cuda:0", "cuda:1"],
    "num_microbatch": 4,
    "recompute_grain": "layer",
    "pin_model": "off",
    "optim_dtype": "bfloat16",
    "max_gpu_memory": 20.0,
    "optimizer_state_dir": "/scratch/state",
    "compute_dtype": "fp8",
}


def parsed(*line: str) -> RoundPipeTrainingArguments:
    (args,) = HfArgumentParser(RoundPipeTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", *line]
    )
    return args


def test_defaults() -> None:
    args = RoundPipeTrainingArguments("out")
    assert not args.async_optimizer
    assert args.pin_model == "alloc"
    assert args.master_dtype() is torch.float32
    assert (
        args.devices
        is args.num_microbatch
        is args.recompute_grain
        is args.max_gpu_memory
        is args.optimizer_state_dir
        is args.compute_dtype
        is args.trace_dir
        is None
    )
    assert vars(parsed()).keys() == vars(args).keys()


def test_json_round_trip() -> None:
    args = RoundPipeTrainingArguments("out", **SETTINGS)
    told = json.loads(args.to_json_string())
    assert {name: told[name] for name in SETTINGS} == SETTINGS
    assert (
        RoundPipeTrainingArguments("out", **{name: told[name] for name in SETTINGS}).to_dict()
        == args.to_dict()
    )


def test_command_line() -> None:
    line = (
        "--async_optimizer --devices cuda:0,cuda:1 --num_microbatch 4 --recompute_grain layer "
        "--pin_model off"
    )
    args = parsed(
        *line.split(),
        "--optim_dtype",
        "bfloat16",
        "--max_gpu_memory",
        "20",
        "--optimizer_state_dir",
        "/scratch/state",
        "--compute_dtype",
        "fp8",
    )
    assert {name: getattr(args, name) for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("3", 3),
        (3, 3),
        ("cuda:1", ["cuda:1"]),
        ([torch.device("cuda", 0), "cuda:1"], ["cuda:0", "cuda:1"]),
        (None, None),
    ],
)
def test_devices(given: Any, kept: Any) -> None:
    assert RoundPipeTrainingArguments("out", devices=given).devices == kept


def test_auto_keeps_the_weights_dtype() -> None:
    assert RoundPipeTrainingArguments("out", optim_dtype="auto").master_dtype() is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pin_model": "always"}, "pin_model is 'always'; use one of 'alloc', 'register', 'off'"),
        ({"optim_dtype": "int8"}, "optim_dtype is 'int8'"),
        ({"compute_dtype": "int8"}, "compute_dtype is 'int8'; use one of 'fp8'"),
        ({"num_microbatch": 0}, "num_microbatch is 0"),
        ({"recompute_grain": "block"}, "recompute_grain is 'block'"),
        ({"devices": "gpu7x"}, "devices names 'gpu7x'"),
        ({"devices": 0}, "devices is 0; give a number, at least 1"),
        ({"devices": -1}, "devices is -1; give a number, at least 1"),
    ],
)
def test_bad_values_are_told_at_once(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoundPipeTrainingArguments("out", **setting)


@pytest.mark.parametrize("there", [False, True])
def test_without_an_accelerator_bf16_is_of_the_cpu(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's arguments ask for it by default and were refused there: "Your setup doesn't support
    bf16/gpu". Now it is for those who say so, because most CPUs compute it slowly."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: there)
    for asked in (None, True, False):
        args = RoundPipeSFTConfig("out", bf16=asked)
        assert args.bf16 == (there if asked is None else asked)
        assert args.use_cpu == (not there)
