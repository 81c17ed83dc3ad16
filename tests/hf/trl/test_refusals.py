"""Bad data for TRL's trainers is refused by name before its step counts, and nothing that came
before is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from roundpipe.engine import generation
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainerMixin
from tests.hf.trl import test_preferences as preferences
from tests.hf.trl import test_rollouts as rollouts
from tests.hf.trl.test_rollouts import both
from tests.support.example_data import save_tokenizer
from tests.support.trainers import Pair, assert_same, assert_same_weights, run, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    preferences.make_model().save_pretrained(folder)
    return folder


def make_pair(kind: str, folder: Path, **settings: Any) -> Any:
    cls = preferences.LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM
    return preferences.make_both(kind, folder, lambda: preferences.make_model(cls), **settings)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_half_a_pair(kind: str, devices: int, folder: Path) -> None:
    """TRL would compare it with the rows of others. The step before it is in the model."""
    settings: dict[str, Any] = {"devices": devices, "lr_scheduler_type": "constant"}
    ours, plain = make_pair(kind, folder, reference=kind == "dpo", **settings)
    collate, count = ours.data_collator, 0

    def drops_a_row(rows: Any) -> Any:
        nonlocal count
        count += 1
        batch = collate(rows)
        if count == 1:
            return batch
        return {name: value[:-1] for name, value in batch.items()}

    ours.data_collator = drops_a_row
    with pytest.raises(ConfigError, match="batch of 7 rows, which are no pairs"):
        run(ours)
    plain.args.max_steps = 1
    run(plain)
    assert ours.state.global_step == plain.state.global_step == 1
    assert_same_weights(weights(ours), weights(plain))


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_with_another_vocabulary(kind: str, folder: Path) -> None:
    model = preferences.make_model()
    config = preferences.config()
    config.vocab_size = 40
    with pytest.raises(ConfigError, match="another vocabulary: 40 tokens, and the model has 32"):
        preferences.make_one(kind, True, folder, model, ref_model=LlamaForCausalLM(config))


def test_a_reference_of_rollouts_with_another_vocabulary(folder: Path) -> None:
    """TRL loads it by the name that the model had before tokens were added."""
    model = preferences.make_model()
    model.resize_token_embeddings(40)
    with pytest.raises(ConfigError, match="another vocabulary: 32 tokens, and the model has 40"):
        rollouts.make_one("grpo", True, folder, model, beta=0.1)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_trls_trainer_below_the_mixin_of_trainers(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss asks for what only the trainer made for it answers, which the message
    names."""
    (_, theirs), configs, rows = preferences.KINDS[kind]
    mixed = type("Mixed", (RoundPipeTrainerMixin, theirs), {})
    monkeypatch.setitem(preferences.KINDS, kind, ((mixed, theirs), configs, rows))
    trainer, _ = make_pair(kind, folder, reference=True)
    before = weights(trainer)
    with pytest.raises(ConfigError, match="fused_lm_head.*Put the trainer of roundpipe_hf.trl"):
        run(trainer)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weights(trainer)[name], value) for name, value in before.items())


class Reward:
    """A good one for the first batch, then ``bad``."""

    def __init__(self, bad: Callable[[list[str]], Any]) -> None:
        self._bad = bad
        self._has_begun = False

    def values(self, completions: list[str]) -> Any:
        if self._has_begun:
            return self._bad(completions)
        self._has_begun = True
        return rollouts.length(completions)

    def now(self) -> Any:
        def spoilt(completions: list[str], **_: Any) -> Any:
            return self.values(completions)

        return spoilt

    def later(self) -> Any:
        async def spoilt(completions: list[str], **_: Any) -> Any:
            return self.values(completions)

        return spoilt


BAD_REWARDS: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "a list for each": (lambda texts: [[1.0] for _ in texts], "a value that is a list for complet"),
    "two numbers for each": (
        lambda texts: [torch.ones(2) for _ in texts],
        r"a value of shape \(2,\) for completion 0",
    ),
    "words": (lambda texts: texts, "a value that is a str"),
    "one for all": (lambda texts: 1.0, "a float; it must return a list"),
}


@both
@pytest.mark.parametrize("case", BAD_REWARDS)
def test_rewards_of_the_wrong_shape(
    kind: str, case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before it is in the model. Every second case is a function that is awaited."""
    bad, message = BAD_REWARDS[case]
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "devices": 3}
    plain = run(rollouts.make_one(kind, False, folder, **settings, max_steps=1))
    reward = Reward(bad)
    is_awaited = list(BAD_REWARDS).index(case) % 2 == 1
    made = reward.later() if is_awaited else reward.now()
    length = rollouts.length
    monkeypatch.setattr(rollouts, "length", made)
    ours = rollouts.make_one(kind, True, folder, **settings)
    monkeypatch.setattr(rollouts, "length", length)
    with pytest.raises(ConfigError, match=f"reward function 'spoilt' returned {message}"):
        run(ours)
    assert ours.state.global_step == 1
    assert_same_weights(weights(ours), weights(plain))


@both
def test_too_few_rewards(kind: str, folder: Path) -> None:
    """TRL's own error, which names the function."""
    trainer = rollouts.make_one(kind, True, folder)
    trainer.reward_funcs = [lambda completions, **_: [1.0]]
    before = weights(trainer)
    with pytest.raises(ValueError, match="'length' returned 1 rewards"):
        run(trainer)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weights(trainer)[name], value) for name, value in before.items())


@both
def test_a_prompt_that_fills_the_context(kind: str, folder: Path) -> None:
    """The model's positions end there, and a GPU would stop with an assertion of its own."""
    trainer = rollouts.make_one(kind, True, folder)
    words = "the " * 80
    trainer.train_dataset = Dataset.from_dict({"prompt": [words] * 8})
    before = weights(trainer)
    with pytest.raises(ConfigError, match=r"a prompt of \d+ tokens.*context has 64"):
        run(trainer)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weights(trainer)[name], value) for name, value in before.items())


@both
@pytest.mark.parametrize("share", [0.85, 0.0], ids=["resident", "streamed"])
def test_rollouts_that_run_out_of_memory(
    kind: str, share: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows at a time, and the same training: greedy tokens are the same."""
    settings: dict[str, Any] = {"generation_kwargs": {"do_sample": False}, "devices": 3}
    plain = run(rollouts.make_one(kind, False, folder, **settings))
    inner, seen = LlamaForCausalLM.generate, []

    def generate(self: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > 2:
            raise torch.OutOfMemoryError("as asked for")
        return inner(self, **kwargs)

    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    monkeypatch.setattr(generation, "_OF_FREE", share)
    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    assert_same(Pair(run(rollouts.make_one(kind, True, folder, **settings)), plain))
    assert seen == 3 * [4, 2, 2]
