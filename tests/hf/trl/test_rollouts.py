"""GRPO and RLOO do what TRL's trainers do, rollouts included: the same losses, weights, metrics and
logged keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from roundpipe.engine import generation
from roundpipe_hf.compat import use_one_gpu
from roundpipe_hf.trl import (
    RoundPipeGRPOConfig,
    RoundPipeGRPOTrainer,
    RoundPipeRLOOConfig,
    RoundPipeRLOOTrainer,
)
from tests.hf.trl.test_preferences import grid, make_model
from tests.support.example_data import save_tokenizer, sentences
from tests.support.trainers import QUIET_SGD, Pair, assert_same, logged, run

PROMPTS = Dataset.from_dict({"prompt": sentences(8)})
KINDS: dict[str, tuple[tuple[type, type], tuple[type, type]]] = {
    "grpo": ((RoundPipeGRPOTrainer, GRPOTrainer), (RoundPipeGRPOConfig, GRPOConfig)),
    "rloo": ((RoundPipeRLOOTrainer, RLOOTrainer), (RoundPipeRLOOConfig, RLOOConfig)),
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
both = pytest.mark.parametrize("kind", KINDS)
one = pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its tokenizer, because TRL loads reference models by name."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    make_model().save_pretrained(folder)
    return folder


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


def make_one(kind: str, is_ours: bool, folder: Path, model: Any = None, **settings: Any) -> Any:
    trainers, configs = KINDS[kind]
    of_trainer = ("peft_config", "eval_dataset", "reward_funcs")
    more = {"reward_funcs": length} | {
        name: settings.pop(name) for name in of_trainer if name in settings
    }
    given = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        **QUIET_SGD,
        "bf16": False,
        "max_steps": 3,
        "devices": 2,
    } | settings
    if not is_ours:
        given.pop("devices")
        if not given["use_cpu"]:  # because TRL would spread the reference alone over all GPUs
            given["model_init_kwargs"] = {"device_map": {"": 0}}
    args = configs[0 if is_ours else 1](**given)
    use_one_gpu(args)  # plain TRL refuses several in one process
    model = make_model() if model is None else model
    model.name_or_path = model.config._name_or_path = str(folder)  # where TRL finds the reference
    torch.manual_seed(1)  # which adapters are drawn from
    return trainers[0 if is_ours else 1](
        model,
        args=args,
        train_dataset=PROMPTS,
        processing_class=AutoTokenizer.from_pretrained(folder),
        **more,
    )


def adapters(adapts: bool) -> dict[str, Any]:
    return {"peft_config": LORA} if adapts else {}


def length_and_place(completions: list[str], **_: Any) -> list[float]:
    """Tells equal completions apart, as those of greedy decoding are."""
    return [float(len(completion) % 7 + place % 3) for place, completion in enumerate(completions)]


def fixed_rollouts(prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
    """Of unlike lengths, the same ones at every step."""
    rows = range(len(prompt_ids))
    return [[3 + (7 * row + at) % 29 for at in range(1 + row % 5)] for row in rows]


def fixed_rollouts_of_grpo(*args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
    """Without log-probabilities, for which GRPO has a place."""
    return fixed_rollouts(*args, **kwargs), None


def trained(kind: str, folder: Path, **settings: Any) -> Pair:
    return Pair(*(run(make_one(kind, is_ours, folder, **settings)) for is_ours in (True, False)))


@both
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_all_weights(kind: str, devices: int, folder: Path) -> None:
    assert_same(trained(kind, folder, devices=devices))


@both
def test_adapters_a_reference_and_accumulation(kind: str, folder: Path) -> None:
    assert_same(
        trained(
            kind,
            folder,
            peft_config=LORA,
            beta=0.1,
            gradient_accumulation_steps=2,
            temperature=0.8,
        )
    )


@one
def test_evaluation(kind: str, folder: Path) -> None:
    """Its batches are lists of prompts, of which the Trainer's evaluation asked for columns."""
    pair = trained(
        kind, folder, eval_dataset=PROMPTS, eval_strategy="steps", eval_steps=1, max_steps=1
    )
    assert "eval_reward" in logged(pair.ours)[1]
    assert_same(pair)


@both
@pytest.mark.parametrize("devices", [1, 3])
def test_training_after_an_evaluation(kind: str, devices: int, folder: Path) -> None:
    """TRL asks the model's mode whose rollouts they are. The first ones after an evaluation were
    taken for another evaluation's: made anew for each batch of the window, and not counted."""
    pair = trained(
        kind,
        folder,
        devices=devices,
        eval_dataset=PROMPTS.select(range(4)),
        eval_strategy="steps",
        eval_steps=1,
        gradient_accumulation_steps=2,
    )
    steps = [entry for entry in logged(pair.ours) if "loss" in entry]
    assert len(steps) == 3
    assert all("reward" in entry for entry in steps)
    assert_same(pair)


@one
def test_rollouts_that_are_used_twice(kind: str, folder: Path) -> None:
    """Old log-probabilities come from the engine as well, and a reference of its own does."""
    assert_same(trained(kind, folder, num_iterations=2, beta=0.1, max_steps=4))


@grid
@both
def test_fixed_rollouts(kind: str, adapts: bool, devices: int, folder: Path) -> None:
    pair = Pair(
        *(
            make_one(kind, is_ours, folder, devices=devices, beta=0.1, **adapters(adapts))
            for is_ours in (True, False)
        )
    )
    for trainer in pair:
        trainer._generate_single_turn = fixed_rollouts_of_grpo if kind == "grpo" else fixed_rollouts
        run(trainer)
    assert logged(pair.ours)[-2]["grad_norm"] > 0
    assert_same(pair)


@grid
@both
def test_greedy_rollouts(kind: str, adapts: bool, devices: int, folder: Path) -> None:
    """End to end: tokens depend on the weights alone."""
    pair = trained(
        kind,
        folder,
        devices=devices,
        generation_kwargs={"do_sample": False},
        reward_funcs=length_and_place,
        **adapters(adapts),
    )
    assert logged(pair.ours)[0]["grad_norm"] > 0
    assert_same(pair)


@pytest.mark.parametrize(
    "loss_type",
    [
        "grpo",
        "bnpo",
        "dr_grpo",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("cispo", "luspo", "sapo", "vespo")
        ),
    ],
)
def test_losses_of_grpo(loss_type: str, folder: Path) -> None:
    level = "sequence" if loss_type == "luspo" else "token"
    settings = {"importance_sampling_level": level, "steps_per_generation": 2}
    assert_same(trained("grpo", folder, peft_config=LORA, loss_type=loss_type, **settings))


ADAPTS_ENTROPY = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.01,
    "entropy_coef_delta": 0.01,
    "entropy_target": 5.0,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_entropy_that_is_adapted_once_a_step(devices: int, folder: Path) -> None:
    """Losses of a window run when it closes, where each took its batch for the last one, and
    adapted."""
    assert_same(trained("grpo", folder, devices=devices, **ADAPTS_ENTROPY))


def test_an_entropy_that_is_adapted_by_a_loss_that_runs_again(folder: Path) -> None:
    """The second batch of a window runs out of memory when the coefficient has changed."""
    pair = Pair(*(make_one("grpo", is_ours, folder, **ADAPTS_ENTROPY) for is_ours in (True, False)))
    inner, calls = pair.ours.compute_loss, list[Any]()

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = inner(*args, **kwargs)
        calls.append(loss)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("as asked for")
        return loss

    pair.ours.compute_loss = compute_loss
    assert_same(Pair(*map(run, pair)))
    assert len(calls) == 3 * 2 + 2


@both
@pytest.mark.parametrize("share", [0.85, 0.0], ids=["resident", "streamed"])
def test_rollouts_by_a_copy(
    kind: str, share: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU makes them, drawn from the same random state."""
    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    monkeypatch.setattr(generation, "_OF_FREE", share)
    assert_same(trained(kind, folder, peft_config=LORA, temperature=0.8, devices=3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@both
def test_on_a_gpu(kind: str, folder: Path) -> None:
    """The same tokens are drawn there, from the same generator."""
    on_gpu = {"use_cpu": False, "devices": 1, "beta": 0.1}
    assert_same(trained(kind, folder, **on_gpu), atol=1e-3)


def test_nothing_is_said_of_patches_of_our_own(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls for a fused head reach an engine by a patched forward, which is no user's."""
    run(make_one("grpo", True, folder, max_steps=1))
    assert "will not run" not in caplog.text
