"""Two adapters on one engine, trained in turn, each by an optimizer of its own.

The story: what trains was read once when the engine was made, so after `set_adapter` the first
adapter went on to train, or nothing did. The oracle does the same with the plain model.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from roundpipe import ConfigError, RoundPipeRunConfig
from tests.support.engines import Engines
from tests.support.models import make_llama
from tests.support.preset_models import INPUTS

IN_TWO = RoundPipeRunConfig(num_microbatch=2)


def make(*, use_dora: bool = False) -> Any:
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_dora=use_dora
    )
    model = get_peft_model(make_llama(tied=False), config, adapter_name="one")
    model.add_adapter("two", config)
    model.set_adapter("one")
    return model


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def of_adapter(adapter: str, names: Any) -> set[str]:
    return {name for name in names if f".{adapter}." in name or name.endswith(f".{adapter}")}


def plain_steps(model: Any, adapter: str) -> Callable[[int], None]:
    """Trains one adapter of a plain model."""
    model.set_adapter(adapter)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def run(count: int) -> None:
        model.set_adapter(adapter)
        for _ in range(count):
            model(**INPUTS["labels"](), use_cache=False).loss.backward()
            optimizer.step()
            model.zero_grad()

    return run


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_only_the_adapter_that_is_set_trains(engines: Engines, use_dora: bool) -> None:
    """Three steps of each on one engine: what plain PyTorch gives, everything else to the bit as it
    was."""
    model = make(use_dora=use_dora)
    plain = copy.deepcopy(model)
    engine = engines(model)
    states = [weights(model)]
    for adapter in ("one", "two"):
        model.set_adapter(adapter)
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        for _ in range(3):
            engine.forward_backward(
                input_kwargs=INPUTS["labels"](),
                loss_fn=lambda output, _: output.loss,
                run_config=IN_TWO,
            )
            engine.step(optimizer.step, is_async=False)
        engine.synchronize()
        states.append(weights(model))
    names = states[0].keys()
    assert changed(states[0], states[1]) == of_adapter("one", names)
    assert changed(states[1], states[2]) == of_adapter("two", names)
    for adapter in ("one", "two"):
        plain_steps(plain, adapter)(3)
    for name, weight in weights(plain).items():
        torch.testing.assert_close(states[2][name], weight, rtol=0, atol=2e-6, msg=name)


def optimizer_of(engine: Any, adapter: str) -> torch.optim.Optimizer:
    engine.model.set_adapter(adapter)
    return torch.optim.SGD(engine.optim_parameters(), lr=0.1)


def gradients_of_both(engine: Any) -> None:
    for adapter in ("one", "two"):
        engine.model.set_adapter(adapter)
        engine.forward_backward(
            input_kwargs=INPUTS["labels"](),
            loss_fn=lambda output, _: output.loss,
            run_config=IN_TWO,
        )


def test_gradients_of_both_then_a_step_of_one(engines: Engines) -> None:
    """Gradients with one, then with two, then a step over the masters of one: it moves by its own,
    two not at all.

    When the step begins two is set, so one does not require a gradient any more; what arrived
    before counts all the same, as it does in torch.
    """
    model = make()
    plain = copy.deepcopy(model)
    engine = engines(model)
    before = weights(model)
    optimizer, _ = optimizer_of(engine, "one"), optimizer_of(engine, "two")
    gradients_of_both(engine)
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    after = weights(model)
    assert changed(before, after) == of_adapter("one", before)
    plain_steps(plain, "one")(1)
    for name, weight in weights(plain).items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6, msg=name)


def test_an_adapter_that_no_optimizer_knows_is_refused(engines: Engines) -> None:
    """Its gradient would be dropped in silence."""
    engine = engines(make())
    optimizer = optimizer_of(engine, "one")
    gradients_of_both(engine)
    with pytest.raises(
        ConfigError, match=r"lora_A\.two\.weight.* became trainable after the optimizer was made"
    ):
        engine.step(optimizer.step, is_async=False)
