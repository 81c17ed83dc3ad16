"""The user's exception arrives from the trainer with its own type, and the next `train()` works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer

from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    assert_same_logs,
    assert_same_weights,
    logged,
    make_trainer,
    run,
    token_rows,
    trained,
    weights,
)

ROWS = token_rows(9)


class Broken(Exception):
    pass


class Fuse:
    """Raises the first time it is reached after ``calls`` calls."""

    def __init__(self, calls: int = 0) -> None:
        self.left = calls

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == -1:
            raise Broken("blown")


def in_layer(fuse: Fuse) -> Any:
    model = MODELS["full"]()
    model.model.layers[1].register_forward_pre_hook(lambda *_: fuse())
    return make_trainer(RoundPipeTrainer, model, ROWS, devices=2)


def in_loss(fuse: Fuse) -> Any:
    class Lossy(RoundPipeTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = model(**inputs, num_items_in_batch=kwargs["num_items_in_batch"])
            fuse()
            return outputs.loss

    return make_trainer(Lossy, MODELS["full"](), ROWS, devices=2)


class FusedSGD(torch.optim.SGD):
    def __init__(self, *args: Any, fuse: Fuse, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fuse = fuse

    def step(self, closure: Any = None) -> Any:
        self.fuse()
        return super().step(closure)


def in_optimizer(fuse: Fuse) -> Any:
    cls_and_kwargs = (FusedSGD, {"lr": 0.1, "fuse": fuse})
    return make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, devices=2, optimizer_cls_and_kwargs=cls_and_kwargs
    )


def in_async_optimizer(fuse: Fuse) -> Any:
    trainer = in_optimizer(fuse)
    trainer.args.async_optimizer = True
    return trainer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [in_layer, in_loss, in_optimizer, in_async_optimizer])
def test_the_error_arrives_and_training_again_works(make: Callable[[Fuse], Any]) -> None:
    """Nothing was updated when it blows at the first step, so training again equals a run without
    the failure."""
    trainer = make(Fuse())
    with pytest.raises(Broken, match="blown"):
        run(trainer)
    trainer.args.async_optimizer = False
    trainer.optimizer = None if make is in_async_optimizer else trainer.optimizer
    run(trainer)
    plain = trained(Trainer, MODELS["full"](), ROWS)
    assert_same_logs(logged(trainer)[:-1], logged(plain)[:-1])
    assert_same_weights(weights(trainer), weights(plain))


def test_an_error_in_the_middle_of_a_run_leaves_whole_steps() -> None:
    """The second update fails: the weights are those after the first."""
    trainer = in_optimizer(Fuse(1))
    with pytest.raises(Broken):
        run(trainer)
    trainer.synchronize()
    plain = trained(Trainer, MODELS["full"](), ROWS, lr_scheduler_type="constant", max_steps=1)
    assert_same_weights(weights(trainer), weights(plain))


def test_weights_loaded_after_an_error_are_those_that_train() -> None:
    """No late update of the failed run takes their place; until then all its updates are in the
    model."""
    fuse = Fuse(16)
    trainer = in_layer(fuse)
    trainer.args.async_optimizer = True
    with pytest.raises(Broken):
        run(trainer)
    trainer.model.load_state_dict(MODELS["full"]().state_dict())
    trainer.args.async_optimizer, trainer.optimizer = False, None
    run(trainer)
    plain = trained(Trainer, MODELS["full"](), ROWS)
    assert_same_logs(logged(trainer)[:-1], logged(plain)[:-1])
    assert_same_weights(weights(trainer), weights(plain))


def test_an_error_in_the_dataset() -> None:
    fuse = Fuse(4)

    class Rows(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            fuse()
            return super().__getitem__(index)

    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), Rows(ROWS), gradient_accumulation_steps=2
    )
    with pytest.raises(Broken):
        run(trainer)
    run(trainer)
    assert trainer.state.global_step == 2
