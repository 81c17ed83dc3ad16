"""Two processes train with TRL's other trainers as two of the plain ones do, wrapped by
`DistributedDataParallel`: the same losses, weights, metrics and logged keys."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import load_from_disk

from roundpipe.errors import ConfigError
from roundpipe_hf.trl import RoundPipeGRPOConfig
from tests.hf.trl import test_preferences, test_rollouts
from tests.support.example_data import save_tokenizer
from tests.support.processes import check_in_processes
from tests.support.trainers import Pair, assert_same, logged, run, weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward", "grpo", "rloo"])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    test_preferences.make_model().save_pretrained(tmp_path / "model")
    rows = test_preferences.KINDS.get(kind)
    if rows is not None:
        rows[2].save_to_disk(tmp_path / "rows")
    check_in_processes(partial(trains_as_plain, kind), tmp_path)


def trains_as_plain(kind: str) -> None:
    """All weights, and adapters with accumulation; references, evaluation and metrics."""
    folder = Path("model").resolve()
    {"reward": rewards, "grpo": rolls_out, "rloo": rolls_out}.get(kind, prefers)(kind, folder)


def prefers(kind: str, folder: Path) -> None:
    # In files that both see, where TRL has a process find what the first one has computed.
    rows = load_from_disk("rows")
    test_preferences.KINDS[kind] = (*test_preferences.KINDS[kind][:2], rows)
    shared: dict[str, Any] = {"devices": 2, "per_device_train_batch_size": 2, "max_steps": 2}
    for settings in (
        {"reference": True, "eval_dataset": rows, "eval_strategy": "epoch", "max_grad_norm": 0.5},
        {"peft_config": test_preferences.LORA, "gradient_accumulation_steps": 2},
        {"reference": True, "precompute_ref_log_probs": True},
    ):
        assert_same_in_all(test_preferences.trained(kind, folder, **shared | settings))
    both = test_preferences.make_both(
        kind, folder, reference=True, gradient_accumulation_steps=2, **shared
    )
    assert_asks_once(both)


def rewards(kind: str, folder: Path) -> None:
    def classifier() -> Any:
        return test_preferences.make_model(test_preferences.LlamaForSequenceClassification)

    assert_same_in_all(
        test_preferences.trained(
            kind, folder, classifier, devices=2, per_device_train_batch_size=2, max_steps=2
        )
    )


def rolls_out(kind: str, folder: Path) -> None:
    """Fixed completions, of unlike lengths in the two processes; and greedy ones, which depend on
    the weights alone."""
    generates = test_rollouts.fixed_rollouts_of_grpo
    if kind == "rloo":
        generates = test_rollouts.fixed_rollouts  # type: ignore[assignment]
    for settings in (
        {"beta": 0.1, "gradient_accumulation_steps": 2},
        {"peft_config": test_rollouts.LORA, "num_iterations": 2, "beta": 0.1},
    ):
        pair = Pair(
            *(
                test_rollouts.make_one(kind, is_ours, folder, **settings)
                for is_ours in (True, False)
            )
        )
        for trainer in pair:
            trainer._generate_single_turn = generates
            run(trainer)
        assert max(entry.get("grad_norm", 0) for entry in logged(pair.ours)) > 0
        assert_same_in_all(pair)
    assert_same_in_all(
        test_rollouts.trained(
            kind,
            folder,
            generation_kwargs={"do_sample": False},
            reward_funcs=test_rollouts.length_and_place,
            max_steps=2,
        )
    )
    if kind == "grpo":
        vllm = RoundPipeGRPOConfig("out", use_vllm=True, bf16=False, use_cpu=True)
        with pytest.raises(ConfigError, match="use_vllm in 2 processes"):
            test_rollouts.RoundPipeGRPOTrainer("model", args=vllm)


def assert_same_in_all(pair: Pair) -> None:
    assert pair.ours.args.world_size == 2
    assert_same(pair)
    for weight in weights(pair.ours).values():
        first = weight.clone()
        dist.broadcast(first, 0)
        torch.testing.assert_close(weight, first, atol=0, rtol=0)


def assert_asks_once(pair: Pair) -> None:
    """The second process alone runs a window again, whose losses ask the first one nothing twice:
    it would take the question for its own next one."""
    inner, calls = pair.ours.compute_loss, list[Any]()

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = inner(*args, **kwargs)
        calls.append(loss)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("as asked for")
        return loss

    pair.ours.compute_loss = compute_loss
    assert_same_in_all(Pair(*map(run, pair)))
    assert len(calls) == 2 * 2 + 2 * int(os.environ["RANK"])
