"""roundpipe.optim against torch.optim: the same weights after 50 steps over the same gradients."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.kernels import chunks, native
from roundpipe.optim import SGD, AdamW, LeanAdamW, Lion
from roundpipe.params.window import Master

STEPS = 50
# What torch tests its own optimizers with (the slow test below looks), and more.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.01)},
        {"betas": (0.5, 0.9), "eps": 1e-4},
        {"betas": (0.4, 0.9)},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "amsgrad": True},
    ],
    "AdamW": [
        {},
        {"lr": 0.01},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "amsgrad": True},
    ],
    "SGD": [
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.001)},
        {"weight_decay": 0.5},
        {"momentum": 0.9},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
}
# The same of those that run as torch wrote them. Two are missing: LBFGS evaluates the model several
# times in a step, SparseAdam wants sparse gradients.
PLAIN: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [
        {},
        {"lr": 0.01},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"weight_decay": 0.1, "maximize": True},
        {"rho": 0.95, "weight_decay": 0.9},
    ],
    "Adafactor": [
        {},
        {"weight_decay": 0.1, "lr": 0.01},
        {"weight_decay": 0.1, "maximize": True},
        {"beta2_decay": -1.0},
        {"d": 1.5},
    ],
    "Adagrad": [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"lr": 0.1},
        {"initial_accumulator_value": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1},
        {"lr": torch.tensor(0.001)},
    ],
    "Adamax": [
        {},
        {"lr": 0.1},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "ASGD": [
        {},
        {"lambd": 0.1},
        {"lr": 0.02},
        {"t0": 100},
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "Muon": [
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.001)},
        {"weight_decay": 0.2},
        {"momentum": 0.8},
        {"ns_steps": 6},
        {"ns_coefficients": (3.4, -4.7, 2.0)},
    ],
    "NAdam": [
        {},
        {"lr": 1e-3},
        {"momentum_decay": 6e-3},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "momentum_decay": 6e-3},
        {"weight_decay": 0.1, "momentum_decay": 6e-3, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "RAdam": [
        {},
        {"lr": 2e-3},
        {"eps": 1e-6},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "RMSprop": [
        {},
        {"lr": 1e-3},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"weight_decay": 0.1, "centered": True},
        {"maximize": True, "weight_decay": 0.1},
        {"weight_decay": 0.1, "centered": True, "momentum": 0.1},
        {"weight_decay": 0.1, "centered": True, "momentum": 0.1, "maximize": True},
    ],
    "Rprop": [
        {},
        {"lr": 2e-4},
        {"etas": (0.5, 1.5)},
        {"step_sizes": (2e-6, 100)},
        {"maximize": True},
    ],
}
GRID = [
    pytest.param(kind, options, id=f"{kind}-{options}")
    for kind, sets in OPTIONS.items()
    for options in sets
]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((outputs - target) ** 2).sum() / 64


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    clip: Callable[[Any], torch.Tensor] | None = None,
    model: nn.Module | None = None,
    steps: int = STEPS,
) -> tuple[nn.Module, list[float]]:
    """Through the engine, sync."""
    model = model or make_model()
    norms: list[float] = []
    with RoundPipe(model, devices=2) as engine:
        optimizer = make(engine.optim_parameters())

        def update() -> None:
            if clip is not None:
                norms.append(float(clip(optimizer)))
            optimizer.step()
            optimizer.zero_grad()

        for x, y in batches()[:steps]:
            engine.forward_backward(
                (x,), label=y, loss_fn=loss_fn, run_config=RoundPipeRunConfig(num_microbatch=1)
            )
            engine.step(update, is_async=False)
    return model, norms


def train_plain(
    make: Callable[[Any], torch.optim.Optimizer],
    max_norm: float | None = None,
    model: nn.Module | None = None,
    steps: int = STEPS,
) -> tuple[nn.Module, list[float]]:
    model = model or make_model()
    optimizer = make(model.parameters())
    norms: list[float] = []
    for x, y in batches()[:steps]:
        loss_fn(model(x), y).backward()
        if max_norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator))
        for _ in range(STEPS)
    ]


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), e in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            a, e, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("kind", "options"), GRID)
def test_optimizers_equal_torchs(kind: str, options: dict[str, Any]) -> None:
    model, _ = train(lambda params: getattr(roundpipe.optim, kind)(params, **options))
    expected, _ = train_plain(lambda params: getattr(torch.optim, kind)(params, **options))
    assert_same_weights(model, expected)


@pytest.mark.parametrize("kind", PLAIN)
def test_torchs_other_optimizers_step_as_on_the_plain_model(kind: str) -> None:
    """All option sets at once, each for a layer of its own. Of those that are not ours a few steps
    tell."""
    is_ours, sets = hasattr(roundpipe.optim, kind), PLAIN[kind]
    steps = STEPS if is_ours else 8
    torch.manual_seed(0)
    # Muon takes matrices only.
    model = nn.Sequential(
        *(nn.Linear(16, 16, bias=kind != "Muon") for _ in sets),
        nn.Linear(16, 8).requires_grad_(False),
    )
    per_layer = len(list(model[0].parameters()))

    def made_by(module: Any) -> Callable[[Any], torch.optim.Optimizer]:
        def make(params: Any) -> torch.optim.Optimizer:
            params = [parameter for parameter in params if parameter.requires_grad]
            groups = [
                {"params": params[at * per_layer :][:per_layer], **options}
                for at, options in enumerate(sets)
            ]
            return getattr(module, kind)(groups)

        return make

    plain = copy.deepcopy(model)
    train(made_by(roundpipe.optim if is_ours else torch.optim), model=model, steps=steps)
    train_plain(made_by(torch.optim), model=plain, steps=steps)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("kind", OPTIONS)
def test_without_a_compiler_they_still_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are so small that tiny weights take several, the last one short."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(chunks, "_CHUNK", 256)
    test_optimizers_equal_torchs(kind, OPTIONS[kind][-1])


@pytest.mark.slow
def test_the_grid_has_every_option_that_torch_tests() -> None:
    pytest.importorskip("expecttest", reason="torch's own test inputs need it")
    from torch.testing._internal.common_optimizers import optim_db

    ours = OPTIONS | PLAIN
    assert {entry.optim_cls.__name__ for entry in optim_db} == {*ours, "LBFGS", "SparseAdam"}
    for entry in optim_db:
        for inputs in (
            entry.optim_inputs_func(device="cpu") if entry.optim_cls.__name__ in ours else ()
        ):
            assert inputs.kwargs in ours[entry.optim_cls.__name__], (entry.optim_cls, inputs.desc)


@pytest.mark.parametrize(
    "make",
    [AdamW, partial(SGD, lr=0.1, momentum=0.9), Lion, LeanAdamW],
    ids=["AdamW", "SGD", "Lion", "LeanAdamW"],
)
def test_deciding_takes_no_gradient_in_hand(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer says by which rule; the gradient goes from its master to where the update is
    computed. Each has one all the same."""

    def make_optimizer() -> tuple[Any, Any]:
        made = make([Master(torch.ones(3)) for _ in range(2)])
        [group] = made.param_groups
        for master in group["params"]:
            master.grad = torch.ones(3)
        return made, group

    optimizer, group = make_optimizer()

    def refuse(_: Master) -> Any:
        raise AssertionError("a gradient was read")

    with monkeypatch.context() as patched:
        patched.setattr(Master, "offloaded", refuse)
        patched.setattr(Master, "grad", property(refuse))
        decisions = optimizer.decisions(group["params"], group)
    assert [decision.weight for decision in decisions] == group["params"]
    # Another one's, because state that was made for a decision is filled where that is computed.
    optimizer, group = make_optimizer()
    optimizer.step()
    assert all(bool((master < 1).all()) for master in group["params"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", OPTIONS)
def test_masters_that_are_not_fp32_are_updated_by_torch(kind: str, dtype: torch.dtype) -> None:
    model, plain = make_model().to(dtype), make_model().to(dtype)
    x, y = (tensor.to(dtype) for tensor in batches()[0])
    with RoundPipe(model, devices=1) as engine:
        optimizer = getattr(roundpipe.optim, kind)(engine.optim_parameters(), lr=0.1)
        engine.forward_backward(
            (x,), label=y, loss_fn=loss_fn, run_config=RoundPipeRunConfig(num_microbatch=1)
        )
        engine.step(optimizer.step, is_async=False)
    loss_fn(plain(x), y).backward()
    getattr(torch.optim, kind)(plain.parameters(), lr=0.1, fused=True).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW], ids=["ours", "torch's"])
def test_clipping_equals_torch(make: Any) -> None:
    """The factor is applied when the gradient is read, by whichever optimizer."""
    model, norms = train(
        lambda params: make(params, lr=1e-2),
        lambda optimizer: roundpipe.clip_grad_norm_(optimizer, 0.05),
    )
    expected, expected_norms = train_plain(lambda params: torch.optim.AdamW(params, lr=1e-2), 0.05)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-5, atol=0)
    assert min(expected_norms) > 0.05, "nothing was clipped"
    assert_same_weights(model, expected)


@pytest.mark.parametrize("gradient", [float("inf"), float("nan")])
def test_clipping_a_gradient_that_is_not_finite_does_what_torch_does(gradient: float) -> None:
    seen = []

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return torch.full_like(g, gradient)

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    plain = copy.deepcopy(model)
    x = torch.ones(2, 4)
    with RoundPipe(model, devices=1) as engine:
        optimizer = SGD(engine.optim_parameters(), lr=1.0)
        engine.forward_backward((x,), loss_fn=lambda outputs, _: Poison.apply(outputs).sum())

        def update() -> None:
            seen.append(roundpipe.clip_grad_norm_(optimizer, 1.0))
            optimizer.step()
            optimizer.zero_grad()

        engine.step(update, is_async=False)
    Poison.apply(plain(x)).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    torch.testing.assert_close(seen[0], expected, equal_nan=True)
    torch.testing.assert_close(model[0].weight, plain[0].weight, equal_nan=True)


def test_state_dict_is_torchs() -> None:
    """State saved by one loads into the other and training goes on as if nothing had happened."""
    parameters = [p.detach().clone().requires_grad_() for p in make_model().parameters()]
    theirs = torch.optim.AdamW(parameters, lr=1e-2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    with RoundPipe(make_model(), devices=1) as engine:
        ours = AdamW(engine.optim_parameters(), lr=1e-2)
        ours.load_state_dict(theirs.state_dict())
        x, y = batches()[0]
        engine.forward_backward((x,), label=y, loss_fn=loss_fn)
        engine.step(ours.step, is_async=False)
        state = ours.state_dict()["state"]
    assert {key: sorted(value) for key, value in state.items()} == {
        key: sorted(value) for key, value in theirs.state_dict()["state"].items()
    }
    assert all(float(value["step"]) == 2.0 for value in state.values())


def test_the_callers_zero_grad_does_not_reach_into_a_step_under_way() -> None:
    """A habit from plain loops: the step is still running on the optimizer thread when the caller
    zeroes gradients."""

    entered, go_on = threading.Event(), threading.Event()

    class Held(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            entered.set()
            assert go_on.wait(20)
            return super().step(closure)

    model = make_model()
    start = copy.deepcopy(model)
    with RoundPipe(model, devices=1) as engine:
        optimizer = Held(engine.optim_parameters(), lr=0.1)
        x, y = batches()[0]
        go_on.set()
        engine.step(optimizer.step, is_async=False)  # the very first step would wait for the end
        entered.clear()
        go_on.clear()
        engine.forward_backward((x,), label=y, loss_fn=loss_fn)
        engine.step(optimizer.step)
        assert entered.wait(20)
        optimizer.zero_grad()
        go_on.set()
    assert not torch.equal(model[0].weight, start[0].weight)


def state_of(make: Any, width: int) -> dict[str, Any]:
    """After a step over a linear layer from that width to 3."""
    with RoundPipe(nn.Sequential(nn.Linear(width, 3)), devices=1) as engine:
        optimizer = make(engine.optim_parameters(), lr=0.1)
        engine.forward_backward((torch.ones(2, width),), loss_fn=lambda out, _: out.sum())
        engine.step(optimizer.step)
        engine.synchronize()
        return copy.deepcopy(optimizer.state_dict())


def test_codes_of_eight_bits_are_not_taken_for_moments() -> None:
    """AdamW began with a second moment of 255 and hardly moved for thousands of steps."""
    codes = state_of(partial(roundpipe.optim.LeanAdamW, moments="8bit"), 2)
    with RoundPipe(nn.Sequential(nn.Linear(2, 3)), devices=1) as engine:
        optimizer = AdamW(engine.optim_parameters(), lr=0.1)
        with pytest.raises(roundpipe.ConfigError, match="moments in 8 bits"):
            optimizer.load_state_dict(codes)
        assert not optimizer.state


@pytest.mark.parametrize(
    "make",
    [
        AdamW,
        partial(SGD, momentum=0.9),
        roundpipe.optim.Lion,
        partial(roundpipe.optim.LeanAdamW, moments=torch.float32),
    ],
    ids=["AdamW", "SGD", "Lion", "LeanAdamW"],
)
def test_state_of_another_model_is_refused(make: Any) -> None:
    """The kernel read and wrote beyond the end of it, which crashed or spoilt memory."""

    small = state_of(make, 2)
    with RoundPipe(nn.Sequential(nn.Linear(64, 3)), devices=1) as engine:
        optimizer = make(engine.optim_parameters(), lr=0.1)
        optimizer.load_state_dict(small)
        engine.forward_backward((torch.ones(2, 64),), loss_fn=lambda out, _: out.sum())
        with pytest.raises(roundpipe.ConfigError, match=r"shape \(3, 64\) has .* shape \(3, 2\)"):
            engine.step(optimizer.step, is_async=False)
