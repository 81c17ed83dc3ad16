"""Two processes, started as torchrun starts them, train as two of the plain Trainer's do: with
averaged gradients.

Each process runs both trainers and compares; the plain one is wrapped by `DistributedDataParallel`.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments
from roundpipe_hf.arguments import engine_devices, own_share
from tests.support import ROOT
from tests.support.example_data import save_tokenizer
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    assert_same_weights,
    differ,
    make_both,
    make_trainer,
    run,
    token_rows,
    trained,
    weights,
)

# Batches of 3 in two processes: 4 steps, in the last of which one process has 1 row and the other
# none of its own.
ROWS = token_rows(19)


def in_two_processes(check: str, folder: Path) -> None:
    """Runs the function of that name in this file in both."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch; torch.set_num_threads(1)\n"
        f"from {__name__} import {check}; {check}()"
    )
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["trains_as_plain", "resumes"])
def test_two_processes(check: str, tmp_path: Path) -> None:
    in_two_processes(check, tmp_path)


def trains_as_plain() -> None:
    """Losses averaged over processes or over all tokens, clipping, accumulation, evaluation,
    metrics; LoRA."""
    shared: dict[str, Any] = {
        "eval_dataset": ROWS[:5],
        "eval_strategy": "epoch",
        "max_grad_norm": 0.5,
    }
    for kind, settings in (
        ("full", {"gradient_accumulation_steps": 2}),
        ("tied", {"average_tokens_across_devices": False}),
        ("lora", {"label_smoothing_factor": 0.1}),
    ):
        pair = make_both(MODELS[kind], ROWS, devices=2, **shared, **settings)  # type: ignore[arg-type]
        first = {
            name: parameter.detach().clone()
            for name, parameter in pair.ours.model.named_parameters()
        }
        assert pair.ours.args.world_size == 2
        if (
            pair.ours.args.process_index == 1
        ):  # whoever is second begins with the first one's weights
            with torch.no_grad():
                for trainer in pair:
                    for parameter in trainer.model.parameters():
                        parameter.mul_(1.5 if parameter.requires_grad else 1.0)
        assert_same(Pair(*map(run, pair)))
        assert differ(weights(pair.ours), first)
        predicted = [trainer.predict(ROWS[:5]).predictions for trainer in pair]
        torch.testing.assert_close(*map(torch.from_numpy, predicted), atol=1e-5, rtol=0)
    for settings in ({"async_optimizer": True}, {"optim": "adamw_torch"}):
        trainer = trained(RoundPipeTrainer, MODELS["full"](), ROWS, **settings)  # type: ignore[arg-type]
        assert_equal_in_all_processes(weights(trainer))


def resumes() -> None:
    """The first process writes the checkpoint, each its generators; bf16 weights with masters,
    dropout in each."""

    def dropping() -> nn.Module:
        model: Any = MODELS["full"]().bfloat16()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model

    settings: dict[str, Any] = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
    }
    settings |= {"optim": "adamw_torch", "learning_rate": 1e-3}
    whole = trained(RoundPipeTrainer, dropping(), ROWS, **settings)
    assert sorted(os.listdir("out-ours")) == ["checkpoint-2", "checkpoint-3"]
    assert {"rng_state_0.pth", "rng_state_1.pth", "roundpipe_masters.pt"} <= set(
        os.listdir("out-ours/checkpoint-2")
    )
    resumed = make_trainer(RoundPipeTrainer, dropping(), ROWS, output_dir="resumed", **settings)
    run(resumed, resume_from_checkpoint="out-ours/checkpoint-2")
    assert differ(weights(resumed), weights(whole)) == []
    assert_equal_in_all_processes(weights(resumed))


def assert_equal_in_all_processes(mine: dict[str, torch.Tensor]) -> None:
    for name, weight in mine.items():
        first = weight.clone()
        torch.distributed.broadcast(first, 0)
        assert_same_weights({name: weight}, {name: first}, atol=0.0)


def test_every_process_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those named, neighbours together."""
    args = RoundPipeTrainingArguments("out", devices="cuda:0,cuda:1,cuda:2,cuda:3", use_cpu=True)
    monkeypatch.setattr(RoundPipeTrainingArguments, "world_size", 2)
    monkeypatch.setattr(RoundPipeTrainingArguments, "local_process_index", 1)
    assert engine_devices(args) == [torch.device("cuda", 2), torch.device("cuda", 3)]
    assert own_share(engine_devices(args), 0, 1) == engine_devices(args)  # type: ignore[arg-type]
    args.devices = ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match="3 devices .* for 2 processes"):
        engine_devices(args)


def test_fp16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would skip steps by itself."""
    monkeypatch.setattr(RoundPipeTrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="fp16 in 2 processes.*bf16"):
        make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, fp16=True)


def test_sft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's loss gathers from all processes at every microbatch, which are computed on several
    threads."""
    from roundpipe_hf.trl.sft import RoundPipeSFTTrainer
    from tests.hf.trl.test_sft import make_trainer as make_sft_trainer

    monkeypatch.setattr(RoundPipeSFTTrainer, "processes", object())
    with pytest.raises(ConfigError, match="RoundPipeSFTTrainer does not support several processes"):
        make_sft_trainer(
            RoundPipeSFTTrainer, AutoTokenizer.from_pretrained(save_tokenizer(Path("tokenizer")))
        )
