"""Modules that run for some tokens at a time: the same numbers as whole, in less memory, where
somebody has said that they may and nothing keeps them from it."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.autoplan import planner
from roundpipe.device import VirtualDevice
from roundpipe.errors import ConfigError
from roundpipe.optim import AdamW
from roundpipe.presets.calling import ROW_WISE
from roundpipe.recompute.row_wise import RowCuts
from tests.support.device_sets import ONE, TWO
from tests.support.engines import Engines, engine_gradients
from tests.support.preset_models import TINY

WIDTH, ROWS, TOKENS, AT_ONCE = 16, 2, 25, 8
AMPLE = 1 << 40


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 56), nn.Linear(WIDTH, 56)
        self.down = nn.Linear(56, WIDTH)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[:2].numel())
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    row_wise: Any = ("mlp", "norm")

    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = mlp or MLP()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def gradients_of(layer: nn.Module, x: Tensor, towards: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(towards)
    found = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [output.detach(), x.grad, *found]


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float32, False, 1e-6),
        # Products of each part are rounded to bfloat16 before they are added up, or the sum is.
        (torch.float32, True, 1e-2),
        (torch.bfloat16, False, 1e-2),
    ],
)
def test_a_cut_module_gives_what_the_whole_one_does(
    dtype: torch.dtype, autocast: bool, tolerance: float
) -> None:
    torch.manual_seed(0)
    whole = Layer().to(dtype)
    cut = copy.deepcopy(whole)
    RowCuts().apply(cut, AT_ONCE)
    x, towards = (torch.randn(ROWS, TOKENS, WIDTH, dtype=dtype) for _ in range(2))
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        expected = gradients_of(whole, x, towards)
        found = gradients_of(cut, x, towards)
    assert isinstance(cut.mlp, MLP)
    # 50 rows: seven parts, the last one shorter, forward and again in the backward.
    assert cut.mlp.seen == [8, 8, *2 * [8, 8, 8, 8, 8, 8, 2]]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max())


def test_a_frozen_module_passes_the_gradient_on() -> None:
    whole = Layer().requires_grad_(False)
    cut = copy.deepcopy(whole)
    RowCuts().apply(cut, AT_ONCE)
    x, towards = torch.randn(ROWS, TOKENS, WIDTH), torch.randn(ROWS, TOKENS, WIDTH)
    for one, other in zip(
        gradients_of(cut, x, towards), gradients_of(whole, x, towards), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_sums_in_16_bits_are_rounded_once() -> None:
    """256 parts of one row each, of which none alone would change a sum of bfloat16 that has come
    to 256."""
    layer = nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16()
    layer.row_wise = ("0",)  # type: ignore[assignment]
    RowCuts().apply(layer, 1)
    ones = torch.ones(1, 512, 1, dtype=torch.bfloat16)
    layer(ones).backward(ones)
    assert layer[0].weight.grad.item() == 512


class WritingInto(Layer):
    """Into what its MLP has made."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.mlp(self.norm(x))
        made += x
        return made


class Ending(MLP):
    """The graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("whole", [WritingInto(), Layer(Ending())], ids=["written", "ended"])
def test_what_a_cut_module_makes_is_as_good_as_a_whole_ones(whole: Layer) -> None:
    cut = copy.deepcopy(whole)
    RowCuts().apply(cut, AT_ONCE)
    x, towards = torch.randn(ROWS, TOKENS, WIDTH), torch.randn(ROWS, TOKENS, WIDTH)
    expected, found = gradients_of(whole, x, towards), gradients_of(cut, x, towards)
    # The norm before an MLP that ends the graph has a gradient of zeros, where it had none.
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# With an engine.


def tiny_llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **settings}))


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # which begins with zeros
            nn.init.normal_(parameter, std=0.1)
    return adapted


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each run of an MLP."""
    rows: list[int] = []
    forward = LlamaMLP.forward

    def noting(self: Any, x: Tensor) -> Tensor:
        rows.append(x.shape[:2].numel())
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", noting)
    return rows


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("prepare", [lambda model: model, with_adapters])
def test_an_engine_trains_as_plain_torch(
    engines: Engines, seen: list[int], prepare: Callable[[Any], Any], grain: Any, devices: Any
) -> None:
    """Two asynchronous steps apart by a flush, which so are two steps of plain torch."""
    model = prepare(tiny_llama())
    plain, ids = copy.deepcopy(model), torch.randint(TINY["vocab_size"], (4, 50))
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(plain(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.clear()
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain, tokens_at_once=32)
    engine = engines(model, devices, model_run_config=config)
    ours = AdamW(engine.optim_parameters(), lr=1e-3)
    for loss in losses:
        found = engine.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        engine.step(lambda: (ours.step(), ours.zero_grad()))
        engine.synchronize()
    assert max(seen) == 25  # 100 rows in four parts
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        # The first steps of AdamW are as long for a gradient of rounding errors as for any other.
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_compiled_layers_are_cut_too(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over parts stays out of what is compiled, which is the layer around it and one
    part; norms stay whole."""
    graphs: list[Any] = []

    def compile_(graph: Any, inputs: Any, **_: Any) -> Any:
        graphs.append([tuple(each.shape) for each in inputs if isinstance(each, Tensor)])
        return aot_eager(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_)
    model = tiny_llama()
    plain, ids = copy.deepcopy(model), torch.randint(TINY["vocab_size"], (1, 50))
    loss = plain(input_ids=ids, labels=ids).loss
    loss.backward()
    config = RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer", tokens_at_once=16)
    engine = engines(model, ONE, model_run_config=config, compile=True)
    for _ in range(2):
        made = len(graphs)
        found = engine.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        for name, gradient in engine_gradients(engine).items():
            own = plain.get_parameter(name).grad
            torch.testing.assert_close(gradient, own, rtol=1e-5, atol=1e-6)
        engine.zero_grad()
    assert made == len(graphs)  # nothing is compiled anew
    parts = {shapes for each in graphs for shapes in each if len(shapes) == 3}
    assert (1, 13, 32) in parts
    assert (1, 50, 48) not in parts


SCALED = {  # an 8B model's proportions
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}


class Limited:
    """Adapters of a small model on a device of ``num_bytes``."""

    def __init__(self, num_bytes: int, **settings: Any) -> None:
        self.device = VirtualDevice(0, num_bytes)
        config = RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer", **settings)
        self.engine: Any = wrap_model_to_roundpipe(
            with_adapters(tiny_llama(**SCALED)), devices=[self.device], model_run_config=config
        )

    def __enter__(self) -> "Limited":
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(torch.OutOfMemoryError):
            self.engine.close()

    def gradients(self, length: int) -> dict[str, Tensor]:
        """A call that fails after it has returned is made again, with another plan."""
        ids = torch.randint(61, (1, length), generator=torch.Generator().manual_seed(1))
        error: Any = None
        for _ in range(4):
            try:
                self.engine.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
                self.engine.synchronize()
                found = engine_gradients(self.engine)
                self.engine.zero_grad()
                return found
            except torch.OutOfMemoryError as failure:
                error = failure.with_traceback(None)
            with suppress(torch.OutOfMemoryError):
                self.engine.synchronize()
            self.engine.zero_grad()
        raise error


def least_bytes(length: int, tokens_at_once: int) -> int:
    """Peak of a device that computes layer by layer."""
    layers = [range(layer, layer + 1) for layer in range(5)]
    plan = ModelExecutePlan(layers[:-1], layers[::-1])
    with Limited(AMPLE, tokens_at_once=tokens_at_once, execute_plan=plan) as limited:
        limited.gradients(length)
        assert limited.device.capacity is not None
        return limited.device.capacity.peak


def test_a_call_that_fits_nowhere_else_is_cut(
    monkeypatch: pytest.MonkeyPatch, seen: list[int]
) -> None:
    """The planner finds out: from guesses, from what it measures, or by running out of memory."""
    monkeypatch.setattr(planner, "TOKENS_AT_ONCE", 64)
    length = 512
    whole, cut = least_bytes(length, 0), least_bytes(length, 64)
    assert cut < 0.6 * whole
    limit = int(0.75 * whole)
    seen.clear()
    with Limited(AMPLE) as limited:
        expected = limited.gradients(length)
    assert min(seen) == length  # because there is room
    with Limited(limit, tokens_at_once=0) as limited, pytest.raises(torch.OutOfMemoryError):
        limited.gradients(length)
    with Limited(limit) as limited:
        for then in (length, length + length // 4, length):
            seen.clear()
            found = limited.gradients(then)
            assert seen[-1] == 64
        assert max(seen) == 64  # from then on at once
        limited.gradients(length // 4)
        assert seen[-1] == length // 4  # which fits whole
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


# Refusals.


class Drawing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class LateDrawing(MLP):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, self.p, self.training) if self.p else x)


class Writing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Averaging(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.mean.mul_(0.9).add_(made.detach().mean(), alpha=0.1)
        return made - self.mean


class Replacing(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().abs().amax()
        return super().forward(x / self.scale)


class Closing(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.others[0])


class Joining(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1, keepdim=True).expand(1, 3, WIDTH)


class Seeing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.softmax(1)


def hooked() -> nn.Module:
    mlp = MLP()
    mlp.up.register_forward_hook(lambda *_: None)
    return mlp


def patched() -> nn.Module:
    mlp = MLP()
    mlp.up.forward = lambda x: x.new_ones(*x.shape[:-1], 56)  # type: ignore[method-assign]
    return mlp


def stacked() -> nn.Module:
    mlp = MLP()
    mlp.weights = nn.Parameter(torch.ones(2, 2, 2))
    return mlp


def experts() -> nn.Module:
    mlp = MLP()
    mlp.experts = nn.ModuleList([nn.Linear(2, 2)])
    return mlp


@pytest.mark.parametrize(
    ("mlp", "why"),
    [
        (nn.Sequential(MLP(), nn.Dropout(0.1)), r"mlp of Layer .*Dropout .* random .*p=0.1"),
        (hooked(), "mlp of Layer .*Linear in it has hooks"),
        (patched(), "mlp of Layer .*forward of Linear in it is patched"),
        (stacked(), "mlp of Layer .*MLP in it has stacked weights"),
        (experts(), "mlp of Layer .*mixture of experts"),
        (Drawing(), r"mlp \(Drawing\) is named in row_wise, but draws random numbers"),
        (Writing(), r"mlp \(Writing\) is named in row_wise, but writes to its input"),
        (Averaging(), r"mlp \(Averaging\) .* writes to its buffer mean"),
        (Replacing(), r"mlp \(Replacing\) .* writes to its buffer scale"),
        (Seeing(), r"mlp \(Seeing\) .* lets a token see others"),
        (Closing(), r"mlp \(Closing\) computes with a tensor of shape \(16,\)"),
        (Joining(), r"mlp \(Joining\) .* makes \(1, 3, 16\) of \(1, 8, 16\)"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(engines: Engines, mlp: nn.Module, why: str) -> None:
    engine = engines(nn.Sequential(Layer(mlp), Layer()), ONE)
    x = torch.randn(ROWS, TOKENS, WIDTH)
    config = RoundPipeRunConfig(num_microbatch=1, tokens_at_once=AT_ONCE)
    with pytest.raises(ConfigError, match=why):
        engine.forward_backward((x,), loss_fn=lambda y, _: y.sum(), run_config=config)
    if why.startswith("mlp of"):  # no draws that differ between the two
        engine.forward_backward((x,), loss_fn=lambda y, _: y.sum())


@pytest.mark.parametrize("is_later", [False, True])
def test_draws_are_found_wherever_they_begin(engines: Engines, is_later: bool) -> None:
    """In a module of a class, in a layer or in a call of which others draw nothing."""
    layers = nn.Sequential(Layer(LateDrawing(0)), Layer(LateDrawing(0 if is_later else 0.5)))
    engine = engines(layers, ONE)
    x, config = torch.randn(ROWS, TOKENS, WIDTH), RoundPipeRunConfig(tokens_at_once=AT_ONCE)
    if is_later:
        engine.forward_backward((x,), loss_fn=lambda y, _: y.sum(), run_config=config)
        layers[1].mlp.p = 0.5
    with pytest.raises(ConfigError, match=r"mlp \(LateDrawing\) .* draws random numbers"):
        engine.forward_backward((x,), loss_fn=lambda y, _: y.sum(), run_config=config)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), "no layer names modules"),
        (("mpl",), "row_wise of Layer names 'mpl', which it does not have"),
        ("mlp", "row_wise of Layer is 'mlp'; give a tuple"),
    ],
)
def test_names_must_be_those_of_modules(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, names: Any, why: str
) -> None:
    monkeypatch.setattr(Layer, "row_wise", names)
    engine = engines(nn.Sequential(Layer(), Layer()), ONE)
    config = RoundPipeRunConfig(num_microbatch=1, tokens_at_once=AT_ONCE)
    with pytest.raises(ConfigError, match=why):
        engine.forward_backward(
            (torch.randn(ROWS, TOKENS, WIDTH),), loss_fn=lambda y, _: y.sum(), run_config=config
        )


@pytest.mark.parametrize("tokens", [-1, 0.5, True, "many"])
def test_the_setting_is_a_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="tokens_at_once is"):
        RoundPipeRunConfig(tokens_at_once=tokens)


# What presets say.


@pytest.mark.parametrize("name", sorted(ROW_WISE))
def test_known_classes_keep_tokens_apart(name: str) -> None:
    """A change of one token changes that token's output alone."""
    home, _, kind = name.rpartition(".")
    made: Any = getattr(__import__(home, fromlist=[kind]), kind)
    if kind.endswith("Norm"):
        module = made(32)
    else:
        model = home.split(".")[2]
        sizes = {"n_embd": 32, "n_inner": 48} if model == "gpt2" else TINY
        config = transformers.AutoConfig.for_model(
            {"gemma3": "gemma3_text"}.get(model, model), **sizes
        )
        module = made(48, config) if model == "gpt2" else made(config)
    module = module.eval()
    x = torch.randn(1, 6, 32)
    other = x.clone()
    other[0, 3] += 1
    changed = (module(x) != module(other)).any(-1)[0]
    assert changed.tolist() == [False, False, False, True, False, False]


def test_a_part_that_nobody_knows_is_not_cut(engines: Engines) -> None:
    """Somebody has put something of their own into an MLP of transformers'."""
    model = tiny_llama()
    model.model.layers[0].mlp.act_fn = Layer(nn.Identity())
    engine = engines(model, ONE)
    names = [layer.row_wise for layer in engine._runner.layers[1:]]
    norms = ("block.input_layernorm", "block.post_attention_layernorm")
    whole = ("block.mlp", *norms)
    assert names == [norms, whole, whole, ("norm",)]
