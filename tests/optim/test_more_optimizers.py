"""Adafactor, Lion and Muon over masters: after 50 synchronous steps the weights of the optimizer
they are named after.

The oracle is torch's class on the plain model; for Lion, which torch has not got, the published
algorithm in six lines.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, GradScaler
from roundpipe.kernels import chunks
from roundpipe.optim import Adafactor, Lion, Muon
from tests.support.device_sets import TWO
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import Batch, make_mlp, mlp_batch
from tests.support.reference import Reference

STEPS = 50
BATCHES = [mlp_batch(rows=4, seed=seed) for seed in range(STEPS)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK", 100)


class WrittenLion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    def __init__(
        self,
        params: Any,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.99,
        decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "b1": b1, "b2": b2, "decay": decay, "sign": -1 if maximize else 1}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for theta in group["params"]:
                g, m = (
                    group["sign"] * theta.grad,
                    self.state[theta].get("m", torch.zeros_like(theta)),
                )
                c = group["b1"] * m + (1 - group["b1"]) * g
                theta.copy_(theta - group["lr"] * (c.sign() + group["decay"] * theta))
                self.state[theta]["m"] = group["b2"] * m + (1 - group["b2"]) * g


Make = Callable[[Any], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adafactor": (lambda p: Adafactor(p, lr=0.02), lambda p: torch.optim.Adafactor(p, lr=0.02)),
    "adafactor, decay": (
        lambda p: Adafactor(p, lr=0.02, weight_decay=0.1, d=2.0, beta2_decay=-0.5),
        lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1, d=2.0, beta2_decay=-0.5),
    ),
    "lion": (lambda p: Lion(p, lr=1e-3), lambda p: WrittenLion(p, 1e-3)),
    "lion, decay": (
        lambda p: Lion(p, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.5, maximize=True),
        lambda p: WrittenLion(p, 1e-3, 0.8, 0.95, 0.5, maximize=True),
    ),
    "muon": (lambda p: Muon(p, lr=0.02), lambda p: torch.optim.Muon(p, lr=0.02)),
    "muon, matched": (
        lambda p: Muon(
            p, lr=0.02, adjust_lr_fn="match_rms_adamw", nesterov=False, weight_decay=0.0
        ),
        lambda p: torch.optim.Muon(
            p, lr=0.02, adjust_lr_fn="match_rms_adamw", nesterov=False, weight_decay=0.0
        ),
    ),
}


def make_matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 16, bias=False))


@pytest.mark.parametrize(
    ("name", "is_async"),
    [*((name, False) for name in PAIRS), *((name, True) for name in ("adafactor", "lion", "muon"))],
)
def test_fifty_steps_equal_the_original(name: str, is_async: bool, engines: Engines) -> None:
    ours, theirs = PAIRS[name]
    model = make_matrices() if name.startswith("muon") else make_mlp(2)
    reference = Reference(model, theirs, staleness=int(is_async))
    engine = engines(copy.deepcopy(model), TWO)
    optimizer = ours(engine.optim_parameters())
    for batch in BATCHES:
        reference.forward_backward(batch.split(1), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 1)
        engine.step(optimizer.step, is_async=is_async)
    TWO.check(engine_weights(engine), reference.weights, bitwise=False)


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_clipping_and_loss_scaling_work_with_each(name: str, engines: Engines) -> None:
    """Against torch's own scaler and clipping on the plain model, one step in three overflowing."""
    ours, theirs = PAIRS[name]
    plain = make_matrices() if name.startswith("muon") else make_mlp(2)
    engine = engines(copy.deepcopy(plain), TWO)
    optimizer, scaler = ours(engine.optim_parameters()), GradScaler(init_scale=64.0)
    expected, reference = theirs(plain.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        roundpipe.clip_grad_norm_(optimizer, 0.05)
        scaler.step(optimizer)
        optimizer.zero_grad()

    for index in range(6):
        batch = mlp_batch(4, index)
        if index % 3 == 1:
            batch.label[0, 0] = math.inf
        reference.scale(batch.loss_fn(plain(*batch.args), batch.label)).backward()
        reference.unscale_(expected)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step(expected)
        reference.update()
        expected.zero_grad()
        run_batch(
            engine,
            batch._replace(loss_fn=lambda out, t, of=batch.loss_fn: scaler.scale(of(out, t))),
            1,
        )
        engine.step(step_fn, is_async=False)
        scaler.update()
    TWO.check(
        engine_weights(engine), {n: p.detach() for n, p in plain.named_parameters()}, bitwise=False
    )


def test_lion_on_bf16_masters_and_outside_of_an_engine_steps_as_written() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parameters = [[Tensor([1.0, -2.0, 3.0]).to(dtype).requires_grad_()] for _ in range(2)]
        optimizers = [
            Lion(parameters[0], lr=0.125, weight_decay=0.5),
            WrittenLion(parameters[1], 0.125, decay=0.5),
        ]
        for (parameter,), optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = Tensor([0.5, 0.0, -1.0]).to(dtype)
            optimizer.step()
        torch.testing.assert_close(parameters[0][0], parameters[1][0])


def test_lion_says_what_is_wrong_with_its_settings() -> None:
    with pytest.raises(ConfigError, match="lr is -1"):
        Lion([torch.ones(1)], lr=-1)
    with pytest.raises(ConfigError, match="betas are"):
        Lion([torch.ones(1)], betas=(0.9, 1.0))


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_state_dicts_wait_for_the_steps_called_and_load_again(name: str, engines: Engines) -> None:
    """Taken right behind an asynchronous step; a second engine goes on from it like the first."""
    make = PAIRS[name][0]
    model = make_matrices() if name.startswith("muon") else make_mlp(2)
    first, second = engines(copy.deepcopy(model), TWO), engines(model, TWO)
    optimizer, other = make(first.optim_parameters()), make(second.optim_parameters())
    for batch in BATCHES[:3]:
        run_batch(first, batch, 1)
        first.step(optimizer.step)
    state = copy.deepcopy(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    other.load_state_dict(state)
    for engine, stepped in ((first, optimizer), (second, other)):
        batch: Batch = BATCHES[3]
        run_batch(engine, batch, 1)
        engine.step(stepped.step)
    TWO.check(engine_weights(second), engine_weights(first))
