"""A loss that cannot be trained with is refused by name before its step counts, and nothing that
came before is lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roundpipe.errors import ConfigError
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same_weights,
    make_both,
    run,
    token_rows,
    weights,
)

ROWS = token_rows(9)


def own(model: Any, inputs: Any) -> Any:
    return model(**inputs).loss


BAD: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "never calls the model": (
        lambda trainer, model, inputs: trainer.model(**inputs).loss,
        "never called the model it was given",
    ),
    "calls a module of the model": (
        lambda trainer, model, inputs: model.model(inputs["input_ids"])[0].mean(),
        "never called the model it was given.*nor a module of it",
    ),
    "puts a function of its own into the model's forward": (
        lambda trainer, model, inputs: model(trainer.model, inputs),
        r"hands the model a module \(LlamaForCausalLM\).*call `model\(\*\*inputs\)`",
    ),
    "no tensor": (
        lambda trainer, model, inputs: own(model, inputs).item(),
        "returned a float; it must be a tensor",
    ),
    "nothing": (
        lambda trainer, model, inputs: (own(model, inputs), None)[1],
        "returned a NoneType; it must be a tensor",
    ),
    "several values": (
        lambda trainer, model, inputs: model(**inputs).logits.mean(dim=(1, 2)),
        r"returned (\d) values of shape \(\1,\)",
    ),
    "several things": (
        lambda trainer, model, inputs: (own(model, inputs), {}),
        "returned a tuple; it must be a tensor",
    ),
    "without a gradient": (
        lambda trainer, model, inputs: own(model, inputs).detach(),
        "a loss without a gradient",
    ),
}


class GoesBad:
    """From its third step on, until somebody mends it."""

    bad: Callable[[Any, Any, Any], Any] | None = None
    good_steps = 2
    state: Any

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        if self.bad is not None and self.state.global_step >= self.good_steps:
            return self.bad(self, model, inputs)
        return own(model, inputs)


class GoesBadInAWindow(GoesBad):
    """From its third batch on."""

    count = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.good_steps = 1 if self.count < 2 else 0
        self.count += 1
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("reduction", [None, "tokens"], ids=["whole", "fused"])
@pytest.mark.parametrize(
    ("devices", "is_async"), [(1, False), (3, True)], ids=["1-sync", "3-async"]
)
@pytest.mark.parametrize("case", BAD)
def test_a_loss_that_goes_bad(
    case: str, devices: int, is_async: bool, reduction: str | None
) -> None:
    """The steps before it count and are in the model, as those of a plain Trainer that stops there;
    the trainer goes on once the loss is mended. Of a loss that was declared Python and torch said
    what they could not do with it, and one that never called the model trained nothing."""
    bad, message = BAD[case]
    settings: dict[str, Any] = {"devices": devices, "async_optimizer": is_async}
    settings["lr_scheduler_type"] = "constant"  # of runs of any length
    settings["loss_reduction"] = reduction
    ours = make_both(MODELS["full"], ROWS, GoesBad, **settings).ours
    other = make_both(MODELS["full"], ROWS, GoesBad, **settings, max_steps=2)
    stopped = run(other.ours if is_async else other.plain)  # an asynchronous step is one late
    ours.bad = bad
    with pytest.raises(ConfigError, match=message):
        run(ours)
    assert ours.state.global_step == stopped.state.global_step == 2
    assert_same_weights(weights(ours), weights(stopped), atol=1e-6)
    ours.bad = None
    ours.args.max_steps = 2
    assert_same_weights(weights(run(ours)), weights(run(stopped)), atol=1e-6)


@pytest.mark.parametrize("case", BAD)
def test_a_declared_loss_that_is_bad_from_the_first(case: str) -> None:
    """It is asked for two rows before it is trained with."""
    bad, message = BAD[case]
    settings: dict[str, Any] = {"devices": 3, "loss_reduction": "tokens"}
    trainer = make_both(MODELS["full"], ROWS, GoesBad, **settings).ours
    trainer.bad, trainer.good_steps = bad, 0
    with pytest.raises(ConfigError, match=message):
        run(trainer)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("reduction", [None, "tokens"], ids=["whole", "fused"])
@pytest.mark.parametrize("returned", [None, {}, "words", 1.5])
def test_a_loss_function_that_returns_no_tensor(returned: Any, reduction: str | None) -> None:
    """Trainer multiplies what it returns first, and stumbled over None and a dict in an error of
    its own. The one that is raised names the type, in evaluation too."""
    settings: dict[str, Any] = {"loss_reduction": reduction, "eval_dataset": ROWS[:2]}

    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return returned

    trainer = make_both(MODELS["full"], ROWS, compute_loss_func=func, **settings).ours
    before = weights(trainer)
    with pytest.raises(ConfigError, match=f"returned a {type(returned).__name__}; it must be a t"):
        run(trainer)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weights(trainer)[name], value) for name, value in before.items())
    if not isinstance(returned, str | float):
        with pytest.raises(ConfigError, match=f"returned a {type(returned).__name__}"):
            trainer.evaluate()


def test_an_error_inside_of_a_loss_function_stays_what_it_is() -> None:
    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return None * outputs.logits.mean()

    trainer = make_both(MODELS["full"], ROWS, compute_loss_func=func).ours
    with pytest.raises(TypeError, match="unsupported operand"):
        run(trainer)


def test_a_bad_loss_leaves_no_gradients() -> None:
    """Of the batches of its window that came before."""
    settings: dict[str, Any] = {"devices": 2, "gradient_accumulation_steps": 3, "max_steps": 1}
    pair = make_both(MODELS["full"], ROWS, GoesBadInAWindow, **settings)
    before = weights(pair.ours)
    pair.ours.bad = BAD["without a gradient"][0]
    with pytest.raises(ConfigError, match="without a gradient"):
        run(pair.ours)
    assert pair.ours.state.global_step == 0
    assert all(torch.equal(weights(pair.ours)[name], value) for name, value in before.items())
    pair.ours.bad = None
    assert_same_weights(*(weights(one) for one in Pair(*map(run, pair))), atol=1e-6)
