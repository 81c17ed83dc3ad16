"""A model with several adapters; after switching, the wrong one was trained, or none.

The story: which parameters train was read once, when the engine was made. Here adapters are
switched between runs, and one trainer is used for both, or one for each.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer

from roundpipe_hf import RoundPipeTrainer
from tests.support.models import make_llama
from tests.support.trainers import (
    assert_same_weights,
    close_all,
    differ,
    make_trainer,
    run,
    token_rows,
    trained,
    weights,
)

ROWS = token_rows(9)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    close_all()


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)


def two_adapters() -> Any:
    torch.manual_seed(0)
    model = get_peft_model(make_llama(tied=False), lora(), adapter_name="a")
    model.add_adapter("b", lora())
    return model


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """Which adapters' tensors are not bitwise what they were; "base" for any other."""
    now = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = differ(now, before)
    return {
        next((adapter for adapter in ("a", "b") if f".{adapter}." in name), "base")
        for name in names
    }


@pytest.mark.parametrize("is_same_trainer", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_adapter_that_is_set_is_the_one_that_trains(is_same_trainer: bool) -> None:
    """First a, then b; each time nothing else changes, and the weights are those of the plain
    Trainer."""
    models = [two_adapters(), two_adapters()]
    for cls, model in zip((RoundPipeTrainer, Trainer), models, strict=True):
        trainer = make_trainer(cls, model, ROWS)
        for adapter in ("a", "b"):
            model.set_adapter(adapter)
            before = {
                name: parameter.detach().clone() for name, parameter in model.named_parameters()
            }
            trainer = trainer if is_same_trainer else make_trainer(cls, model, ROWS)
            if is_same_trainer and cls is Trainer:
                trainer.optimizer = None  # the plain one goes on with the first adapter's
            run(trainer)
            assert changed(model, before) == {adapter}
    ours, plain = ({name: p.detach() for name, p in model.named_parameters()} for model in models)
    assert_same_weights(ours, plain)


def test_saved_adapters_hold_what_was_trained() -> None:
    """Each adapter in a folder of its own, never empty, with the updates of its own run."""
    model = two_adapters()
    for adapter in ("a", "b"):
        model.set_adapter(adapter)
        trained(RoundPipeTrainer, model, ROWS).save_model("saved")
    for adapter in ("a", "b"):
        saved = load_file(f"saved/{adapter}/adapter_model.safetensors")
        live = {
            name.replace(f".{adapter}.", "."): p
            for name, p in model.named_parameters()
            if f".{adapter}." in name
        }
        assert len(saved) == len(live) == 16
        assert differ(saved, live) == []


@pytest.mark.slow
def test_two_adapters_resume() -> None:
    """Both are in the checkpoint; the run that resumes is bitwise the uninterrupted one, on other
    devices too."""
    settings: dict[str, Any] = {"num_microbatch": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trained(RoundPipeTrainer, two_adapters(), ROWS, devices=1, **settings)
    resumed = make_trainer(
        RoundPipeTrainer, two_adapters(), ROWS, devices=2, output_dir="resumed", **settings
    )
    run(resumed, resume_from_checkpoint="out-ours/checkpoint-1")
    assert differ(weights(resumed), weights(whole)) == []


@pytest.mark.slow
def test_a_frozen_adapter_loaded_first() -> None:
    """PEFT marks only the second one trainable; the first serves, and stays."""
    two_adapters().save_pretrained("first", selected_adapters=["a"])

    def make() -> Any:
        model = PeftModel.from_pretrained(
            make_llama(tied=False), "first/a", adapter_name="a", is_trainable=False
        )
        torch.manual_seed(1)
        model.add_adapter("b", lora())
        model.base_model.set_adapter(["a", "b"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".b." in name)
        return model

    ours, plain = (trained(cls, make(), ROWS) for cls in (RoundPipeTrainer, Trainer))
    assert changed(ours.model, {name: p.detach() for name, p in make().named_parameters()}) == {"b"}
    assert_same_weights(weights(ours), weights(plain))


@pytest.mark.slow
def test_a_dora_adapter() -> None:
    """Its magnitudes are parameters too."""

    def make() -> Any:
        torch.manual_seed(0)
        return get_peft_model(make_llama(tied=False), lora(use_dora=True), adapter_name="a")

    ours, plain = (trained(cls, make(), ROWS) for cls in (RoundPipeTrainer, Trainer))
    moved = differ(weights(ours), {name: p.detach() for name, p in make().named_parameters()})
    assert any("magnitude" in name for name in moved)
    assert_same_weights(weights(ours), weights(plain))
