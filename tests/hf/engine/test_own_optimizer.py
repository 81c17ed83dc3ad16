"""An optimizer of the user's own over ``model.parameters()``, which is what a plain Trainer takes.

It was refused, though nothing is lost while it has not been stepped: its groups are moved to the
pipeline's copies of the weights, and it stays the object that a scheduler holds.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.optimizers import create_lorafa_optimizer
from transformers import Trainer

from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import MODELS, Pair, assert_same, make_trainer, run, token_rows, trained

ROWS = token_rows(12)
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.9),
    # Its state is there before the first step.
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-3),
}


def in_two_groups(model: Any) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": rest}, {"params": [first], "lr": 0.02}]


@pytest.mark.parametrize("in_engine", [False, True], ids=["model", "engine"])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_it_is_moved_to_the_copies(kind: str, name: str, in_engine: bool) -> None:
    trainers = []
    for cls in (RoundPipeTrainer, Trainer):
        model = MODELS[kind]()
        optimizer = MAKE[name](in_two_groups(model))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        given = model
        if in_engine and cls is RoundPipeTrainer:
            given = wrap_model_to_roundpipe(model, optim_dtype=torch.float32, devices=3)
        trainers.append(trained(cls, given, ROWS, optimizers=(optimizer, scheduler)))
        assert scheduler.optimizer is optimizer
        assert [group["initial_lr"] for group in optimizer.param_groups][1] == 0.02
    assert_same(Pair(*trainers))


class OwnOptimizer(RoundPipeTrainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = MAKE["sgd"](in_two_groups(self.model))
        return self.optimizer


class PlainOptimizer(Trainer):
    create_optimizer = OwnOptimizer.create_optimizer


def test_one_that_an_overridden_method_makes_is_moved_too() -> None:
    assert_same(
        Pair(
            *(trained(cls, MODELS["full"](), ROWS) for cls in (OwnOptimizer, PlainOptimizer)),
        )
    )


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_group_of_a_parameter_is_that_of_its_copy(kind: str) -> None:
    """Asked for the model's own parameter, it failed inside of torch: "Boolean value of Tensor with
    more than one value is ambiguous"."""
    trainer = make_trainer(RoundPipeTrainer, MODELS[kind](), ROWS)
    trainer.create_optimizer()
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            group = trainer.get_optimizer_group(parameter)
            assert group is trainer.get_optimizer_group(name)
            assert group is trainer.optimizer.param_groups[0 if name in decayed else 1]
    every = trainer.get_optimizer_group()
    assert [len(group) for group in every] == [
        len(group["params"]) for group in trainer.optimizer.param_groups
    ]
    run(trainer)


@pytest.mark.parametrize("is_made_late", [False, True], ids=["given", "made in an override"])
def test_lora_fa_reads_frozen_weights_by_their_place(is_made_late: bool) -> None:
    """Its group lists a name and a scale for each parameter, and each step reads the frozen half of
    an adapter: they went out of step with what was moved, and matrices did not fit. Compared from a
    checkpoint on, too."""

    def make(model: Any) -> torch.optim.Optimizer:
        return create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2, weight_decay=0.1)

    class Late:
        model: Any

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = make(self.model)
            return self.optimizer

    def one(cls: type[Trainer], **settings: Any) -> Any:
        model = MODELS["lora"]()
        if not is_made_late:
            settings["optimizers"] = (make(model), None)
        made = type("Made", (Late, cls), {}) if is_made_late else cls
        return make_trainer(made, model, ROWS, devices=3, **settings)

    trainers = []
    for cls in (RoundPipeTrainer, Trainer):
        first = run(one(cls, save_strategy="steps", save_steps=2))
        folder = f"{first.args.output_dir}/checkpoint-2"
        trainers.append((first, run(one(cls), resume_from_checkpoint=folder)))
    for ours, plain in zip(*trainers, strict=True):
        assert_same(Pair(ours, plain), atol=1e-4)
