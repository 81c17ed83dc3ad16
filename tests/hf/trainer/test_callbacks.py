"""Callbacks that look at weights or gradients, or change weights, do what they do with the plain
Trainer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import MODELS, Pair, assert_same, make_trainer, run, token_rows, trained

ROWS = token_rows(12)


def both(make_callback: Callable[[], TrainerCallback], kind: str = "full", **settings: Any) -> Pair:
    classes = (RoundPipeTrainer, Trainer)
    return Pair(
        *(
            trained(cls, MODELS[kind](), ROWS, callbacks=[make_callback()], **settings)
            for cls in classes
        )
    )


class Prunes(TrainerCallback):
    """Halves one weight after the second step, and puts the average of all steps in place of the
    model at the end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step == 2:
            model.get_parameter("lm_head.weight").mul_(0.5)
        self.seen.append({name: parameter.clone() for name, parameter in model.named_parameters()})

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(sum(seen[name] for seen in self.seen) / len(self.seen))


def test_weights_that_a_callback_writes_are_those_that_train() -> None:
    """In place between steps, and also through ``.data`` between two runs."""
    pair = both(Prunes)
    assert_same(pair)
    for trainer in pair:
        run(trainer)
    assert_same(pair)


class Writes(TrainerCallback):
    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        model.get_parameter("lm_head.weight").zero_()


def test_only_what_was_written_is_taken_over() -> None:
    """The fp32 copies of other bf16 weights keep what bf16 cannot hold."""
    trainer = trained(
        RoundPipeTrainer, MODELS["full"]().bfloat16(), ROWS, learning_rate=1e-4, optim="adamw_torch"
    )
    before = {name: master.clone() for name, master in trainer.optim_named_parameters()}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in before.values()), (
        "nothing to lose"
    )
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    trainer.model_wrapped.reload_parameters()
    after = dict(trainer.optim_named_parameters())
    assert not after["lm_head.weight"].any()
    assert all(
        torch.equal(after[name], master)
        for name, master in before.items()
        if name != "lm_head.weight"
    )


def test_writing_behind_a_late_update_is_refused() -> None:
    """With an asynchronous optimizer the next update would silently take its place."""
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, callbacks=[Writes()], async_optimizer=True
    )
    with pytest.raises(ConfigError, match="call synchronize\\(\\) before changing them"):
        run(trainer)


class Norms(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any
    ) -> None:
        self.seen += [float(p.grad.norm()) for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("kind", ["tied", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_grad_norm", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_gradients_before_the_step_are_there_and_clipped(kind: str, max_grad_norm: float) -> None:
    norms: list[Norms] = []

    def make() -> Norms:
        norms.append(Norms())
        return norms[-1]

    assert_same(both(make, kind, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2))
    ours, plain = (made.seen for made in norms)
    assert ours
    assert ours == pytest.approx(plain, abs=1e-5)


class Changes(TrainerCallback):
    def __init__(self, how: Callable[[Any], object]) -> None:
        self.how = how

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any
    ) -> None:
        for parameter in model.parameters():
            self.how(parameter)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.grad.mul_(2),
    "through data": lambda weight: weight.grad.data.mul_(2),
    "numpy": lambda weight: weight.grad.numpy().__imul__(2),
    "another": lambda weight: setattr(weight, "grad", weight.grad * 2),
    "none": lambda weight: setattr(weight, "grad", None),
}


@pytest.mark.parametrize("how", CHANGES)
def test_gradients_that_a_callback_changes_are_refused(how: str) -> None:
    """They are copies, so nothing would come of it."""
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, callbacks=[Changes(CHANGES[how])]
    )
    with pytest.raises(
        ConfigError, match="changed gradients in on_pre_optimizer_step.*optimizer_cls_and_kwargs"
    ):
        run(trainer)


class EvaluatesTheBase(TrainerCallback):
    """What the model would say without what it has learnt. Meanwhile its adapters require no
    gradient."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        with model.disable_adapter():
            self.losses.append(self.trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_evaluating_while_adapters_are_disabled(accumulation: int) -> None:
    """The run went on with an engine made for a model in which nothing trains, and was refused."""
    callbacks, trainers = [], []
    for cls in (RoundPipeTrainer, Trainer):
        callback = EvaluatesTheBase()
        settings: dict[str, Any] = {
            "callbacks": [callback],
            "gradient_accumulation_steps": accumulation,
        }
        trainer = make_trainer(cls, MODELS["lora"](), ROWS, eval_dataset=ROWS[:4], **settings)
        callback.trainer = trainer
        callbacks.append(callback)
        trainers.append(run(trainer))
    assert_same(Pair(*trainers))
    assert callbacks[0].losses == pytest.approx(callbacks[1].losses, abs=1e-6)
