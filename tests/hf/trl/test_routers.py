"""Mixtures of experts train as with TRL, which adds the routers' auxiliary loss unless told not to.

Its coefficient is raised to where leaving it out, or taking its mean over microbatches, would show.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import digits
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.olmoe import modeling_olmoe

from roundpipe.errors import ConfigError
from roundpipe.presets.experts.balance import Balance
from roundpipe_hf.trl import RoundPipeSFTTrainer
from tests.hf.trl import test_preferences as preferences
from tests.hf.trl import test_rollouts as rollouts
from tests.hf.trl import test_sft as sft
from tests.support import mixtures
from tests.support.example_data import save_tokenizer
from tests.support.preset_models import make_model
from tests.support.trainers import Pair, assert_same, logged, run

_SIZES: dict[str, Any] = {
    **mixtures.SIZES_OF_SFT,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
}
_QWEN = {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [1]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES, **_QWEN),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4),
    "olmoe": lambda: OlmoeConfig(**_SIZES, num_experts=4),
}
# Without an auxiliary loss: a bias that TRL leaves alone balances them.
_UNHEARD = {
    name: size
    for name, size in _SIZES.items()
    if name not in ("router_aux_loss_coef", "num_experts_per_tok")
}
CONFIGS |= {
    "deepseek": partial(mixtures.CONFIGS["deepseek-v3"], _UNHEARD),
    "glm4-moe": partial(mixtures.CONFIGS["glm4-moe"], _UNHEARD),
}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen3-moe", pytest.param("mixtral", marks=SLOW), "olmoe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its tokenizer, because TRL loads reference models by name."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tokenizer(folder)
    make(request.param).save_pretrained(folder)
    return folder


def make(name: str) -> Any:
    return make_model(config=CONFIGS[name]())


def trained(kind: str, folder: Path, **settings: Any) -> Pair:
    def one(is_ours: bool) -> Any:
        model = make(folder.name.rstrip(digits))
        if kind in rollouts.KINDS:
            return rollouts.make_one(kind, is_ours, folder, model=model, **settings)
        model.name_or_path = model.config._name_or_path = str(folder)
        if kind in preferences.KINDS:
            return preferences.make_one(kind, is_ours, folder, model, **settings)
        cls = RoundPipeSFTTrainer if is_ours else sft.SFTTrainer
        return sft.make_trainer(cls, AutoTokenizer.from_pretrained(folder), model=model, **settings)

    return Pair(*(run(one(is_ours)) for is_ours in (True, False)))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo", "rloo"])
def test_a_routers_loss_is_that_of_the_batch(
    kind: str, adapts: bool, devices: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, and evaluation where there is one. Batches are cut: they were not, and the
    model without a preset of its own was refused."""
    settings: dict[str, Any] = {
        "devices": devices,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
    }
    if kind not in rollouts.KINDS:
        settings["num_microbatch"] = 2
    if adapts:
        settings["peft_config"] = preferences.LORA
    if kind == "sft":
        settings["eval_dataset"] = sft.HELD_OUT
    elif kind in preferences.KINDS:
        settings["eval_dataset"] = preferences.KINDS[kind][2]
    if kind not in rollouts.KINDS:
        settings |= {"eval_strategy": "steps", "eval_steps": 1}
    counts: list[int] = []
    merge = Balance.merge

    def counting(self: Any, outputs: Any, rows: Any) -> Any:
        if torch.is_grad_enabled():  # not where it is tried out
            counts.append(len(outputs))
        return merge(self, outputs, rows)

    monkeypatch.setattr(Balance, "merge", counting)
    pair = trained(kind, folder, **settings)
    assert "aux_loss" in logged(pair.ours)[0]
    assert_same(pair)
    assert max(counts) > 1 or (kind in rollouts.KINDS and devices == 1)


@SLOW
@pytest.mark.parametrize("case", ["dft", "packing", "padding-free", "label smoothing"])
def test_every_form_of_sft(case: str, folder: Path) -> None:
    """Smoothing leaves the auxiliary loss out, as TRL does, and logs it all the same."""
    assert_same(trained("sft", folder, max_steps=2, **sft.CASES[case]))


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("name", ["deepseek", "glm4-moe"])
def test_mixtures_without_an_auxiliary_loss(name: str, adapts: bool, tmp_path: Path) -> None:
    """Latent attention and grouped experts, by the generic preset, in microbatches."""
    folder = tmp_path / name
    save_tokenizer(folder)
    settings = {"peft_config": preferences.LORA} if adapts else {}
    pair = trained("sft", folder, max_steps=2, devices=3, **settings)
    assert "aux_loss" not in logged(pair.ours)[0]
    assert_same(pair)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_none_where_its_coefficient_is_zero(kind: str, folder: Path) -> None:
    """Batches are cut then."""
    pair = trained(kind, folder, max_steps=1, router_aux_loss_coef=0.0)
    assert "aux_loss" not in logged(pair.ours)[0]
    assert_same(pair)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_models_whose_routers_nobody_listens_to(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that transformers records in a way of its own is refused before any work."""
    monkeypatch.setattr(modeling_olmoe.OlmoePreTrainedModel, "_can_record_outputs", {})
    maker = {
        "sft": lambda **more: sft.make_trainer(
            RoundPipeSFTTrainer,
            AutoTokenizer.from_pretrained(folder),
            model=make("olmoe"),
            **more,
        ),
        "dpo": lambda **more: preferences.make_one(
            "dpo", True, folder, make("olmoe"), peft_config=preferences.LORA, **more
        ),
    }[kind]
    with pytest.raises(ConfigError, match="OlmoeForCausalLM.*set router_aux_loss_coef=0.0"):
        maker()
    run(maker(router_aux_loss_coef=0.0, max_steps=1))


def test_a_reduction_cannot_be_declared(folder: Path) -> None:
    """Every microbatch would add an auxiliary loss of its own."""
    with pytest.raises(ConfigError, match="loss_reduction='tokens'.*router_aux_loss_coef=0.0"):
        trained("sft", folder, loss_reduction="tokens")
