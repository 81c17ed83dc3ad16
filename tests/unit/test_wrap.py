"""`wrap_model_to_roundpipe`: which way a model goes, and that through the engine it still is that model."""

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import make_llama, make_lora_llama, make_mlp
from roundpipe import ConfigError, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

ROWS, TOKENS, VOCABULARY = 5, 12, 64


@pytest.fixture
def wrap() -> Iterator[Any]:
    """`wrap_model_to_roundpipe` on one device, the engine closed afterwards."""
    with ExitStack() as stack:

        def make(model: nn.Module, **settings: Any) -> RoundPipe:
            return stack.enter_context(wrap_model_to_roundpipe(model, **{"devices": 1, **settings}))

        yield make


class Scale(nn.Module):
    """A module of the user's own, with a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return self.linear(x) * (2 if twice else 1)


def padded_batch() -> dict[str, Tensor]:
    """Rows of 12, 10, 8, 6 and 4 tokens: microbatches differ in how many count."""
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(TOKENS)[None] < TOKENS - 2 * torch.arange(ROWS)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """The model's own output and gradients."""
    twin = copy.deepcopy(model)
    output = twin(**padded_batch(), use_cache=False)
    output.loss.backward()
    return output, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: make_llama(tied=False), lambda: make_llama(tied=True), make_lora_llama])
@pytest.mark.parametrize(("num_microbatch", "devices"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_preset_through_the_engine(wrap: Any, make: Any, num_microbatch: int, devices: int) -> None:
    """Loss, logits and every gradient are the model's own; names too; PEFT's as well."""
    model = make()
    theirs, expected = plain(model)
    engine = wrap(model, devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=num_microbatch))
    loss, ours = engine.forward_backward(
        input_kwargs=padded_batch(), loss_fn=lambda outputs, _: outputs.loss, return_outputs=True
    )
    engine.synchronize()
    gradients = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    assert type(ours) is type(theirs)
    assert_close(loss, theirs.loss)
    assert_close(ours.loss, theirs.loss)
    assert_close(ours.logits, theirs.logits)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name])
    if num_microbatch == 1:
        assert torch.equal(loss, theirs.loss)
        assert torch.equal(ours.logits, theirs.logits)


def test_evaluation_and_backward_of_the_merged_loss(wrap: Any) -> None:
    """`forward` merges the loss exactly too, with grad and without."""
    model = make_llama(tied=True)
    theirs, expected = plain(model)
    engine = wrap(model, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    with torch.no_grad():
        assert_close(engine(**padded_batch()).loss, theirs.loss)
    engine(**padded_batch()).loss.backward()
    engine.synchronize()
    for name, parameter in engine.model.named_parameters():
        assert_close(parameter.grad, expected[name])


def test_num_items_in_batch_is_a_sum(wrap: Any) -> None:
    model = make_llama(tied=False)
    with torch.no_grad():
        theirs = model(**padded_batch(), num_items_in_batch=100).loss
        engine = wrap(model, model_run_config=RoundPipeRunConfig(num_microbatch=3))
        assert_close(engine(**padded_batch(), num_items_in_batch=100).loss, theirs)


def test_attributes_reach_the_original_model(wrap: Any) -> None:
    model = make_llama(tied=True)
    engine = wrap(model)
    assert engine.model is model
    assert engine.config is model.config
    assert engine.state_dict().keys() == model.state_dict().keys()
    engine.loss_function = lambda logits, labels, vocab_size, **_: 3.0 * logits.float().mean()
    with torch.no_grad():
        output = engine(**padded_batch(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert_close(output.loss, 3.0 * output.logits.mean())


def test_a_run_config_beats_the_preset(wrap: Any) -> None:
    seen: list[int] = []

    def split_input(args: Any, kwargs: Any, n: int) -> Any:
        seen.append(n)
        return [args], [kwargs]

    engine = wrap(
        make_llama(tied=False), model_run_config=RoundPipeRunConfig(num_microbatch=2, split_input=split_input)
    )
    with torch.no_grad():
        engine(**padded_batch())
    assert seen == [2]


def test_frozen_first_layers(wrap: Any) -> None:
    """BC-26 (a): everything that trains gets the gradient it gets in plain PyTorch, what is frozen none."""
    model: Any = make_llama(tied=False)
    for part in (model.model.embed_tokens, model.model.layers[0], model.model.layers[1]):
        part.requires_grad_(False)
    _, expected = plain(model)
    engine = wrap(model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    engine.forward_backward(input_kwargs=padded_batch(), loss_fn=lambda outputs, _: outputs.loss)
    engine.synchronize()
    gradients = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name])


def test_saved_files_are_the_models_own(wrap: Any, tmp_path: Any) -> None:
    """BC-31: after training, half of it frozen and tied, the files load into the plain class, nothing missing."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model: Any = make_llama(tied=True)
    model.model.layers[:2].requires_grad_(False)
    model.save_pretrained(tmp_path / "plain")
    engine = wrap(model)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(2):
        engine.forward_backward(input_kwargs=padded_batch(), loss_fn=lambda outputs, _: outputs.loss)
        engine.step(optimizer.step)
    engine.save_pretrained(tmp_path / "trained")
    names = [load_file(tmp_path / run / "model.safetensors").keys() for run in ("plain", "trained")]
    assert names[0] == names[1]
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(**padded_batch()).logits, model(**padded_batch()).logits)


# --- which way a model goes ---


def test_sequential_and_single_layer(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        sequential = wrap(make_mlp())
        assert not caplog.records
        single = wrap(Scale(), name="mine")
    assert len(sequential.planner.layer_costs.forward) == 7
    assert len(single.planner.layer_costs.forward) == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("mine: Scale has no preset")
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_close(single(x, twice=True), single.model(x, twice=True))


def test_the_preset_is_named_in_one_line(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        wrap(make_llama(tied=False), name="mine")
    assert [record.getMessage() for record in caplog.records] == [
        "mine: LlamaForCausalLM runs by its preset as 6 layers"
    ]


def test_preset_insisted_on_or_not_wanted(wrap: Any) -> None:
    with pytest.raises(NotImplementedError, match="no preset for Scale"):
        wrap(Scale(), use_sequential_preset=True)
    engine = wrap(make_llama(tied=False), use_sequential_preset=False)
    assert len(engine.planner.layer_costs.forward) == 1


def test_default_name_is_where_the_user_called() -> None:
    with wrap_model_to_roundpipe(make_mlp(), devices=1) as engine:
        assert "test_wrap.py:" in repr(engine)


@pytest.mark.parametrize(
    "option",
    [
        {"lower_threshold": 1},
        {"upper_threshold": 1},
        {"skip_modules": [nn.Linear(2, 2)]},
        {"override_config": {nn.Linear(2, 2): RoundPipeRunConfig()}},
    ],
)
def test_options_that_would_do_nothing_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        wrap_model_to_roundpipe(make_mlp(), **option)


def test_an_engine_is_not_wrapped_again(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="wrapped already"):
        wrap_model_to_roundpipe(wrap(make_mlp()))
