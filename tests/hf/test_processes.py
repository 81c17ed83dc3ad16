"""Processes, started as torchrun starts them, train as those of the plain Trainer do.

Each process runs both trainers and compares; the plain one is wrapped by `DistributedDataParallel`.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, Trainer

from roundpipe import GradScaler, RoundPipe
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments
from roundpipe_hf.arguments import engine_devices, own_share
from tests.hf.trl import test_sft
from tests.support.example_data import save_tokenizer
from tests.support.processes import check_in_processes
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    assert_same_weights,
    differ,
    logged,
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "count"),
    [
        ("trains_as_plain", 2),
        ("trains_as_plain", 4),
        ("resumes", 2),
        ("sft_trains_as_plain", 2),
        ("sft_trains_as_plain", 4),
        ("steps_in_fp16", 2),
    ],
)
def test_processes(check: str, count: int, tmp_path: Path) -> None:
    check_in_processes(globals()[check], tmp_path, count)


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
        assert pair.ours.args.world_size == int(os.environ["WORLD_SIZE"])
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


def sft_trains_as_plain() -> None:
    """Metrics, too, which TRL gathers at every microbatch: here those of a batch are summed after
    it. The processes have as many batches, but not as many tokens."""
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(Path(f"of-{os.environ['RANK']}")))
    batches_of_two: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2}
    for settings in (
        {"gradient_accumulation_steps": 2, "devices": 3, "eval_dataset": test_sft.HELD_OUT},
        {"packing": True, "per_device_train_batch_size": 1},
    ):
        pair = test_sft.train_both(tokenizer, **batches_of_two | settings)
        assert pair.ours.args.world_size == int(os.environ["WORLD_SIZE"])
        assert {"entropy", "num_tokens"} <= logged(pair.ours)[0].keys()
        assert_same(pair)
        assert_equal_in_all_processes(weights(pair.ours))


def steps_in_fp16() -> None:
    """Both skip the first steps, in which the scale is too large, and then go on together."""
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, fp16=True, num_train_epochs=4)
    trainer.scaler = GradScaler(init_scale=2.0**24)
    first = weights(trainer)
    run(trainer)
    assert trainer.scaler.get_scale() < 2.0**24
    assert differ(weights(trainer), first)
    scale = torch.tensor(trainer.scaler.get_scale())
    assert_equal_in_all_processes(weights(trainer) | {"scale": scale})


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process(tmp_path: Path) -> None:
    """Two processes write the optimizer's state as two of the plain Trainer's do, who each have
    it whole, and one process goes on from it."""
    check_in_processes(saves_as_plain, tmp_path)
    ours, plain = (
        torch.load(tmp_path / f"out-{which}/checkpoint-2/optimizer.pt")
        for which in ("ours", "plain")
    )
    assert list(ours["state"]) == list(plain["state"])
    for index, state in plain["state"].items():
        torch.testing.assert_close(ours["state"][index], state, atol=1e-5, rtol=0)
    alone = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, **SAVING)
    run(alone, resume_from_checkpoint=str(tmp_path / "out-ours/checkpoint-2"))
    assert alone.state.global_step == SAVING["max_steps"]


SAVING: dict[str, Any] = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
}


def saves_as_plain() -> None:
    for cls in (RoundPipeTrainer, Trainer):
        trained(cls, MODELS["full"](), ROWS, **SAVING)


def test_an_engine_of_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients would be this process's alone."""
    engine = RoundPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), devices=1)
    monkeypatch.setattr(RoundPipeTrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="engine of 1 processes.*process_group="):
        make_trainer(RoundPipeTrainer, engine, ROWS)
    engine.close()


def test_saving_on_each_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first process has the optimizer's state as a whole."""
    monkeypatch.setattr(RoundPipeTrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="save_on_each_node"):
        make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, save_on_each_node=True)
