"""`wrap_model_to_roundpipe`: which way a model goes, and that through the engine it still is that
model."""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import (
    AutoRoundPipe,
    ConfigError,
    RoundPipe,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from tests.support.branching import bert_batch, make_bert, make_branches, make_t5, t5_batch
from tests.support.models import make_llama, make_lora_llama, make_mlp

ROWS, TOKENS, VOCABULARY = 5, 12, 64


@pytest.fixture
def wrap() -> Iterator[Any]:
    """`wrap_model_to_roundpipe` on one device, the engine closed afterwards."""
    with ExitStack() as stack:

        def make(model: nn.Module, **settings: Any) -> Any:
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


@pytest.mark.parametrize(
    "make", [lambda: make_llama(tied=False), lambda: make_llama(tied=True), make_lora_llama]
)
@pytest.mark.parametrize(("num_microbatch", "devices"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_preset_through_the_engine(wrap: Any, make: Any, num_microbatch: int, devices: int) -> None:
    """Loss, logits and every gradient are the model's own; names too; PEFT's as well."""
    model = make()
    theirs, expected = plain(model)
    engine = wrap(
        model, devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=num_microbatch)
    )
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
        make_llama(tied=False),
        model_run_config=RoundPipeRunConfig(num_microbatch=2, split_input=split_input),
    )
    with torch.no_grad():
        engine(**padded_batch())
    assert seen == [2]


def test_frozen_first_layers(wrap: Any) -> None:
    """Everything that trains gets the gradient it gets in plain PyTorch, what is frozen none."""
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
    """After training, half of it frozen and tied, the files load into the plain class, nothing
    missing."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model: Any = make_llama(tied=True)
    model.model.layers[:2].requires_grad_(False)
    model.save_pretrained(tmp_path / "plain")
    engine = wrap(model)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(2):
        engine.forward_backward(
            input_kwargs=padded_batch(), loss_fn=lambda outputs, _: outputs.loss
        )
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


def test_which_engine_a_model_gets(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A sequence one of its children, a small module one of a single layer, all else one for each
    part."""
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        sequential = wrap(make_mlp())
        single = wrap(Scale())
        assert not caplog.records
        parts = wrap(make_branches(), name="mine", upper_threshold=100)
    assert [engine.statistics()["layers"] for engine in (sequential, single)] == [7, 1]
    assert type(parts) is AutoRoundPipe
    assert parts.statistics()["engines"] == {
        "left": 3,
        "right": 2,
        "blocks.0": 1,
        "blocks.1": 1,
        "blocks.2": 1,
    }
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "mine: Branches runs part by part: left, right, blocks.0, blocks.1, blocks.2"
    )
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_close(single(x, twice=True), single.model(x, twice=True))


def test_parts_depend_on_the_number_of_devices(wrap: Any) -> None:
    """By default a part may have the model's bytes over the devices + 1."""
    one, three = (
        wrap(make_t5(), devices=count, use_sequential_preset=False).statistics()["engines"]
        for count in (1, 3)
    )
    assert "encoder" in one
    assert "encoder" not in three
    assert {"encoder.block.0", "encoder.block.1", "loss_function"} <= three.keys()


def test_all_that_a_model_skips_runs_on_the_cpu(wrap: Any) -> None:
    model: Any = make_branches()
    engine = wrap(model, skip_modules=[model.left, model.right, *model.blocks])
    assert engine.statistics()["engines"] == {}
    x = torch.randn(3, 16)
    with torch.no_grad():
        assert torch.equal(engine(x), model(x))


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
    assert type(engine) is AutoRoundPipe
    batch = padded_batch()
    with torch.no_grad():
        assert_close(engine(**batch).loss, engine.model(**batch).loss)


def test_default_name_is_where_the_user_called() -> None:
    with wrap_model_to_roundpipe(make_mlp(), devices=1) as engine:
        assert "test_wrap.py:" in repr(engine)


def test_settings_for_modules_that_are_no_parts(wrap: Any) -> None:
    """They would have no effect, so they are refused: for a preset's model, for a module elsewhere
    or inside a part."""
    other, config = nn.Linear(2, 2), RoundPipeRunConfig(num_microbatch=1)
    model: Any = make_branches()
    with pytest.raises(ConfigError, match="runs by its preset"):
        wrap(make_llama(tied=False), skip_modules=[other])
    with pytest.raises(ConfigError, match="skip_modules names a Linear that is not in the model"):
        wrap(model, skip_modules=[other])
    with pytest.raises(ConfigError, match=r"override_config names a Linear .* left, right"):
        wrap(model, override_config={model.left[0]: config})
    with pytest.raises(ConfigError, match="model_run_config sets split_label"):
        wrap(model, model_run_config=RoundPipeRunConfig(split_label=lambda *_: []))


def test_an_engine_is_not_wrapped_again(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="wrapped already"):
        wrap_model_to_roundpipe(wrap(make_mlp()))
    with pytest.raises(ConfigError, match="wrapped already"):
        wrap_model_to_roundpipe(wrap(make_branches()))


# --- through the engine it still is that model ---


@pytest.mark.parametrize(
    "make", [lambda: make_llama(tied=False), make_lora_llama, make_bert, make_t5, make_branches]
)
def test_it_looks_like_the_model(wrap: Any, make: Any) -> None:
    """What libraries look at to tell what a model takes and is: signatures, attributes, methods,
    modules."""
    model = make()
    engine = wrap(model)
    assert inspect.signature(engine.forward) == inspect.signature(model.forward)
    assert [name for name, _ in engine.named_modules()] == [
        name for name, _ in model.named_modules()
    ]
    assert [name for name, _ in engine.named_children()] == [
        name for name, _ in model.named_children()
    ]
    assert all(one is other for one, other in zip(engine.modules(), model.modules(), strict=True))
    for name, module in model.named_modules():
        assert engine.get_submodule(name) is module
    for name, buffer in model.named_buffers():
        assert engine.get_buffer(name) is buffer
    for name in ("config", "main_input_name", "base_model_prefix", "loss_function"):
        if hasattr(model, name):
            assert getattr(engine, name) == getattr(model, name)
    if hasattr(model, "generate"):
        assert inspect.signature(engine.generate) == inspect.signature(model.generate)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        engine.missing  # noqa: B018


@pytest.mark.parametrize("make", [lambda: make_llama(tied=False), make_bert, make_branches])
def test_writes_and_deletes_reach_the_model(wrap: Any, make: Any) -> None:
    """Also modes, and the next forward sees them."""
    model = make()
    engine = wrap(model)
    engine.note = "written"
    assert model.note == "written"
    del engine.note
    assert not hasattr(model, "note")
    assert engine.eval() is engine
    assert not any(module.training for module in model.modules())
    assert not engine.training
    model.train()
    assert engine.training


@pytest.mark.parametrize("make", [lambda: make_llama(tied=False), make_branches])
def test_what_modules_do_with_their_own_is_done_to_the_model(wrap: Any, make: Any) -> None:
    """An engine has no children, parameters or buffers of its own; what is added to it would be
    lost."""
    model = make()
    engine, seen = wrap(model), []
    assert engine.apply(seen.append) is engine
    assert seen[-1] is model
    engine.register_buffer("mean", torch.ones(2))
    assert "mean" in model.state_dict()
    engine.set_submodule("extra", nn.Identity())
    assert model.extra is engine.get_submodule("extra")
    with pytest.raises(ConfigError, match="wrap the model again"):
        engine.zero_grad()
    with pytest.raises(ConfigError, match="compile=True"):
        engine.compile()


def test_set_original_model() -> None:
    """The target of attribute forwarding: names, keys, attributes and methods are its own from then
    on."""

    class Original(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head, self.note = nn.Linear(4, 4), nn.Linear(4, 2), "mine"

    original = Original()
    with RoundPipe(nn.Sequential(original.encoder, nn.Tanh(), original.head), devices=1) as engine:
        assert [name for name, _ in engine.named_parameters()] == [
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        ]
        engine.set_original_model(original)
        names = ["encoder.weight", "encoder.bias", "head.weight", "head.bias"]
        assert [name for name, _ in engine.named_parameters()] == names
        assert [name for name, _ in engine.optim_named_parameters()] == names
        assert engine.model is original
        assert engine.note == "mine"
        engine.note = "theirs"
        assert original.note == "theirs"
        original.extra = nn.Linear(1, 1)
        with pytest.raises(
            ConfigError, match="'extra.weight' of the original model is in no layer"
        ):
            engine.set_original_model(original)
        del original.extra
        engine.set_original_model(original)


def test_a_loss_function_of_the_users_own(wrap: Any) -> None:
    """Assigned through the engine it replaces the model's, which runs on a device; the user's runs
    on the CPU."""
    model: Any = make_llama(tied=True)
    engine = wrap(model, use_sequential_preset=False)
    batch = padded_batch()
    with torch.no_grad():
        assert torch.equal(engine(**batch).loss, model(**batch).loss)
        engine.loss_function = lambda logits, labels, vocab_size, **_: 3.0 * logits.float().mean()
        output = engine(**batch)
        assert_close(output.loss, 3.0 * output.logits.mean())


@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_that_is_divided_by_a_given_number_is_cut(wrap: Any, count: int) -> None:
    """Rows of a batch then add up to its loss, so the logits never are on a device at once."""
    model: Any = make_llama(tied=True)
    engine = wrap(
        model,
        use_sequential_preset=False,
        model_run_config=RoundPipeRunConfig(num_microbatch=count),
        lower_threshold=1,
    )
    for items in (torch.tensor(30), 30):
        loss = engine(**padded_batch(), num_items_in_batch=items).loss
        assert_close(loss, model(**padded_batch(), num_items_in_batch=items).loss)


def test_key_value_caches_are_never_built(wrap: Any) -> None:
    """Microbatches would write to one cache: it is off, and asking for it is an error."""
    model: Any = make_t5()
    engine = wrap(model, use_sequential_preset=False)
    batch = t5_batch().kwargs
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
        assert engine(**batch).past_key_values is None
    with pytest.raises(ConfigError, match="key-value cache"):
        engine(**batch, use_cache=True)


def test_generate_sees_every_update(wrap: Any) -> None:
    """A method of the model's, reached through the engine: pending steps are written back first."""
    model: Any = make_t5().eval()
    engine = wrap(model, use_sequential_preset=False)
    ids = t5_batch().kwargs["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False}
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1.0)
    engine(**t5_batch().kwargs).loss.backward()
    engine.step(optimizer.step)
    found = engine.generate(ids, **settings)
    masters = {name: master.detach() for name, master in engine.optim_named_parameters()}
    twin = make_t5().eval()
    twin.load_state_dict(masters, strict=False)
    assert torch.equal(found, twin.generate(ids, **settings))


def test_saved_files_of_a_model_in_parts(wrap: Any, tmp_path: Any) -> None:
    """A tied T5, half of it frozen, after training: the plain class loads it, nothing missing."""
    from safetensors.torch import load_file
    from transformers import T5ForConditionalGeneration

    model: Any = make_t5()
    model.encoder.block.requires_grad_(False)
    model.save_pretrained(tmp_path / "plain")
    engine = wrap(model, use_sequential_preset=False)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(2):
        engine(**t5_batch().kwargs).loss.backward()
        engine.step(optimizer.step)
    engine.save_pretrained(tmp_path / "trained")
    names = [load_file(tmp_path / run / "model.safetensors").keys() for run in ("plain", "trained")]
    assert names[0] == names[1]
    loaded, info = T5ForConditionalGeneration.from_pretrained(
        tmp_path / "trained", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(
            loaded(**t5_batch().kwargs).logits, model.eval()(**t5_batch().kwargs).logits
        )
    state = engine.state_dict()
    fresh = make_t5()
    fresh.load_state_dict(state, strict=True)
    assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())


def test_several_adapters(wrap: Any) -> None:
    """Only the selected adapter changes, as if the other were not there; the engine is wrapped anew
    after it."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(1)
        config = LoraConfig(
            r=2, target_modules=["query", "value"], init_lora_weights=False, modules_to_save=[]
        )
        model = get_peft_model(make_bert(), config, adapter_name="first")
        model.add_adapter("second", config)
        return model

    def train(engine: Any, steps: int) -> None:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        for seed in range(steps):
            engine(**bert_batch(seed=seed).kwargs).loss.backward()
            engine.step(optimizer.step)
        engine.synchronize()  # because asynchronous steps leave the model's own weights behind

    both, only_b = adapted(), adapted()
    before = {name: parameter.detach().clone() for name, parameter in both.named_parameters()}
    train(wrap(both), 2)
    both.set_adapter("second")
    train(wrap(both), 2)
    only_b.set_adapter("second")
    train(wrap(only_b), 2)
    alone = dict(only_b.named_parameters())
    for name, parameter in both.named_parameters():
        if ".second." in name:
            assert not torch.equal(parameter, before[name])
            assert torch.equal(parameter, alone[name])
        else:
            assert torch.equal(parameter, before[name]) == (".first." not in name)
