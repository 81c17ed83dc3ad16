"""Where only the loss is wanted the logits are never made; wherever somebody may look at them, they
are.

The oracle is the model's own forward, whose loss is made of full logits.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GraniteConfig, Phi3Config

from roundpipe import RoundPipeRunConfig
from roundpipe.presets import loss as preset_loss
from tests.support.engines import Engines
from tests.support.preset_models import (
    INPUTS,
    LANGUAGE_MODELS,
    ROWS,
    TINY,
    TOKENS,
    gradients_of,
    make_model,
    own_forward,
)
from tests.support.tolerances import assert_same_sums

IN_TWO = RoundPipeRunConfig(num_microbatch=2)
GENERIC: dict[str, Any] = {
    "phi3": lambda: Phi3Config(**TINY),
    "gemma2": lambda: Gemma2Config(**TINY, head_dim=8),
    "granite": lambda: GraniteConfig(**TINY, logits_scaling=4.0),
}


@pytest.fixture
def chunked_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The hidden states of every call of the chunked loss, by their shape."""
    calls: list[torch.Size] = []
    real = preset_loss.linear_cross_entropy

    def noting(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(hidden.shape)
        return real(hidden, *args, **kwargs)

    monkeypatch.setattr(preset_loss, "linear_cross_entropy", noting)
    return calls


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, "phi3"])
@pytest.mark.parametrize(
    "inputs", ["padded left", "shift_labels", "ignore_index", "num_items_in_batch"]
)
def test_the_default_loss_needs_no_logits(
    engines: Engines, chunked_calls: list[torch.Size], name: str, inputs: str
) -> None:
    model = make_model(name, config=GENERIC[name]() if name in GENERIC else None)
    theirs, expected = own_forward(copy.deepcopy(model), INPUTS[inputs]())
    engine = engines(model)
    chunked_calls.clear()
    loss = engine.forward_backward(input_kwargs=INPUTS[inputs](), run_config=IN_TWO)
    engine.synchronize()
    assert chunked_calls == [(2, 12, 32)] * 2
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_logits_that_are_shaped_on_their_way_to_the_loss_are_made(
    engines: Engines, chunked_calls: list[torch.Size], name: str
) -> None:
    """A soft cap, a scale: the generic preset does not know them, so it lets the model's forward
    make the loss."""
    model = make_model(config=GENERIC[name]())
    theirs, _ = own_forward(copy.deepcopy(model), INPUTS["labels"]())
    loss = engines(model).forward_backward(input_kwargs=INPUTS["labels"](), run_config=IN_TWO)
    assert chunked_calls == []
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)


def test_logits_are_made_for_who_may_look_at_them(
    engines: Engines, chunked_calls: list[torch.Size]
) -> None:
    """A loss_fn of the caller's, returned outputs, forward, a head with an adapter or hook, another
    loss function."""
    model = make_model("llama")
    engine = engines(model)
    labels, seen = INPUTS["labels"](), []

    def loss_fn(output: Any, _: Any) -> Any:
        seen.append(output.logits.shape)
        return output.loss

    engine.forward_backward(input_kwargs=labels, loss_fn=loss_fn, run_config=IN_TWO)
    assert seen == [(2, 12, 61)] * 2
    _, output = engine.forward_backward(input_kwargs=labels, return_outputs=True, run_config=IN_TWO)
    assert output.logits.shape == (4, 12, 61)
    with torch.no_grad():
        assert engine(**labels).logits.shape == (4, 12, 61)
    hook = model.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    engine.forward_backward(input_kwargs=labels, run_config=IN_TWO)
    assert seen[2:] == ["head", "head"]
    hook.remove()
    engine.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    engine.forward_backward(input_kwargs=labels, run_config=IN_TWO)
    assert chunked_calls == []


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2"])
def test_skip_logits_says_so_where_the_engine_cannot_know(
    engines: Engines, chunked_calls: list[torch.Size], name: str
) -> None:
    """The argument is Liger's. Also in evaluation, where nobody wants a batch of logits on the
    host."""
    model = make_model(name, config=GENERIC[name]() if name in GENERIC else None)
    theirs, _ = own_forward(copy.deepcopy(model), INPUTS["padded left"]())
    engine = engines(model)
    chunked_calls.clear()
    with torch.no_grad():
        output = engine(**INPUTS["padded left"](), skip_logits=True, roundpipe_run_config=IN_TWO)
    assert type(output) is type(theirs)
    assert output.logits is None
    assert len(chunked_calls) == (0 if name == "gemma2" else 2)
    assert_same_sums(output.loss, theirs.loss, terms=ROWS * TOKENS)


def test_nothing_to_predict_is_nan_as_in_the_model(engines: Engines) -> None:
    kwargs = {**INPUTS["labels"](), "labels": torch.full((4, 12), -100)}
    engine = engines(make_model("llama"))
    for num_microbatch in (1, 2):
        loss = engine.forward_backward(
            input_kwargs=kwargs, run_config=RoundPipeRunConfig(num_microbatch=num_microbatch)
        )
        assert loss.isnan()
        engine.zero_grad()
