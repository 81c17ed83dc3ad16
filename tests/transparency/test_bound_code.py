"""Modules whose code has got hold of modules or weights: by methods, partials, closures, hooks.
What runs on a device must use the weights there, or they would silently get no gradient."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundpipe import (
    ConfigError,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from tests.support.device_sets import TWO
from tests.support.engines import Engines, engine_gradients
from tests.support.preset_models import INPUTS, gradients_of, make_model, own_forward

WIDTH = 8
RECOMPUTED = ModelExecutePlan(fwd_plan=[range(2)], bwd_plan=[range(1, 2), range(1)])


class Lambda(nn.Module):
    """Attributes that are closures over the module and one of its weights, and a partial of a
    method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.scaled = lambda x: self.linear(x) * scale
        self.shifted = functools.partial(Lambda.shift, self)

    def shift(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scaled(x) + self.shifted(x))


class Adapted(nn.Module):
    """A hook adds what another child makes; a method of the parent, hooked as well, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adapter, self.count = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0
        self.linear.register_forward_hook(lambda _, args, output: output + self.adapter(args[0]))
        self.linear.register_forward_pre_hook(self.note)

    def note(self, *_: Any) -> None:
        self.count += 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Empty(nn.Module):
    """False where somebody asks for its truth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def patched(patch: Callable[[nn.Linear], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH)
        linear.forward = patch(linear)  # type: ignore[method-assign]
        return linear

    return make


def doubled(linear: nn.Linear) -> Any:
    before = linear.forward
    return lambda x: 2 * before(x)


def with_default(linear: nn.Linear) -> Any:
    return lambda x, of=linear: F.linear(x, of.weight, of.bias) * 2


def of_partial(linear: nn.Linear) -> Any:
    return functools.partial(lambda of, x: F.linear(x, of.weight, of.bias) * 2, linear)


def compiled() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.compile(backend="eager")
    return linear


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "closures and partials": Lambda,
    "hooks": Adapted,
    "no length": lambda: nn.Sequential(Empty()),
    "a forward around the forward": patched(doubled),
    "a default argument": patched(with_default),
    "a partial": patched(of_partial),
    "compiled in place": compiled,
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("plan", [None, RECOMPUTED], ids=["fused", "recomputed"])
def test_layers_use_the_weights_of_the_device(
    engines: Engines, make: Callable[[], nn.Module], plan: ModelExecutePlan | None
) -> None:
    torch.manual_seed(0)
    layers, x = [make(), make()], torch.randn(4, WIDTH)
    model = nn.Sequential(*layers)
    loss = model(x).square().sum()
    loss.backward()
    expected = gradients_of(model)
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    counts = [getattr(layer, "count", 0) for layer in layers]
    engine = engines(model, TWO)
    ours = engine.forward_backward(
        (x,),
        loss_fn=lambda output, _: output.square().sum(),
        run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=plan),
    )
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-6, atol=1e-6)
    found = engine_gradients(engine)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert [
        getattr(layer, "count", 0) - 2 * count for layer, count in zip(layers, counts, strict=True)
    ] == counts


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_models_compiled_in_place(engines: Engines, name: str, what: str) -> None:
    """`Module.compile` leaves code that runs the user's own module; here it runs as if it had not
    been called."""
    from transformers import Phi3Config

    from tests.support.preset_models import TINY

    model = make_model(name, config=Phi3Config(**TINY) if name == "phi3" else None)
    theirs, expected = own_forward(copy.deepcopy(model), INPUTS["labels"]())
    for module in model.model.layers if what == "blocks" else [model]:
        module.compile(backend="eager")
    engine = engines(model)
    loss = engine.forward_backward(
        input_kwargs=INPUTS["labels"](), run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    torch.testing.assert_close(loss, theirs.loss.detach(), rtol=1e-6, atol=1e-6)
    found = engine_gradients(engine)
    assert found.keys() == expected.keys()
    for parameter, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[parameter], rtol=1e-5, atol=1e-6, msg=parameter
        )


@pytest.mark.parametrize(
    ("wrapped", "match"),
    [
        (
            lambda linear: torch.compile(linear, backend="eager"),
            r"1 is a OptimizedModule.*pass compile=True",
        ),
        (torch.jit.script, "1 is a RecursiveScriptModule.*given to torch.jit"),
        (nn.DataParallel, "1 is a DataParallel.*wrap its .module"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_computes_with_its_own_weights_only_is_refused(wrapped: Any, match: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), wrapped(nn.Linear(2, 2)))
    for wrap in (RoundPipe, wrap_model_to_roundpipe):
        with pytest.raises(ConfigError, match=match):
            wrap(model, devices=1)
