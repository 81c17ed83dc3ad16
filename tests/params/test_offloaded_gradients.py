"""Small gradients go down together: in one copy, and whatever of them is there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.device.virtual import VirtualDevice, VirtualLane
from roundpipe.optim import clip_grad_norm_
from roundpipe.params import gradient_buffers, gradients
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import plain_call

SMALL, ALL = MLP_WIDTH + 1, 1 << 20
"""Elements: vectors are smaller, or all."""


class Choice(nn.Module):
    """Computes with one of two scales: the other gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(MLP_WIDTH)) for _ in range(2))
        self.chosen = 0

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.linear(hidden) * self.scales[self.chosen]).tanh()


def make_choices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Choice() for _ in range(3)))


@pytest.mark.parametrize("least", [1, SMALL, ALL])
@pytest.mark.parametrize("on", [ONE, TWO], ids=str)
def test_gradients_are_plain_whatever_goes_together(
    least: int, on: DeviceSet, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buffers, "_LEAST_ALONE", least)
    model, batch = make_choices(), mlp_batch(rows=6)
    engine = engines(model, on)
    for chosen in ([0, 0, 0], [0, 1, 0], [1, 1, 1]):
        for layer, choice in zip(model, chosen, strict=True):
            layer.chosen = choice
        expected = plain_call(model, batch.split(3), batch.loss_fn)
        engine.zero_grad()
        on.check(run_batch(engine, batch, 3), expected.loss)
        on.check(engine_gradients(engine), expected.gradients)
        norm = engine.step(lambda: clip_grad_norm_(engine, float("inf"))).result()
        plain = torch.nn.utils.get_total_norm(list(expected.gradients.values()))
        torch.testing.assert_close(norm, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_copy_for_all_small_ones_of_a_layer(
    dtype: torch.dtype, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_choices(), mlp_batch(rows=6)
    for layer in model:
        layer.scales[1].requires_grad_(False)
    engine = engines(model, ONE, grad_dtype=dtype)
    copies, copy = list[Tensor](), VirtualLane.copy_

    def note(lane: Any, target: Tensor, source: Tensor) -> None:
        if target.dtype == dtype and target.ndim == 1:
            copies.append(target)
        copy(lane, target, source)

    run_batch(engine, batch, 3)
    engine.zero_grad()
    with monkeypatch.context() as noting:
        noting.setattr(VirtualLane, "copy_", note)
        run_batch(engine, batch, 3)
    count = sum(parameter.numel() for parameter in model[0].parameters() if parameter.requires_grad)
    assert [target.numel() for target in copies if target.numel() == count] == [count] * len(model)
    expected = plain_call(model, batch.split(3), batch.loss_fn).gradients
    offloaded = {name: gradient.to(dtype).float() for name, gradient in expected.items()}
    ONE.check(engine_gradients(engine), offloaded)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(MLP_WIDTH, dtype=torch.complex64))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * self.factors).abs()


@pytest.mark.parametrize("least", [1, ALL])
def test_complex_gradients_offload_too(
    least: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buffers, "_LEAST_ALONE", least)
    torch.manual_seed(0)
    model, batch = nn.Sequential(Wave(), nn.Linear(MLP_WIDTH, MLP_WIDTH)), mlp_batch(rows=6)
    engine = engines(model)
    expected = plain_call(model, batch.split(3), batch.loss_fn)
    run_batch(engine, batch, 3)
    ONE.check(engine_gradients(engine), expected.gradients, bitwise=False)
    norm = engine.step(lambda: clip_grad_norm_(engine, float("inf"))).result()
    plain = torch.nn.utils.get_total_norm(list(expected.gradients.values()))
    torch.testing.assert_close(norm, plain, rtol=1e-6, atol=0)


def test_offloading_together_takes_memory_for_what_offloads_alone() -> None:
    """Sums are twice as wide, and nobody has planned for them to be there twice."""
    device = VirtualDevice(0, num_bytes=1 << 30)
    assert device.capacity is not None
    with device.compute.work():
        sums = {place: torch.randn(1000) for place in range(8)}
        before = device.capacity.used
        together = gradients._together(sums, torch.bfloat16)
    assert together.whole is not None
    assert device.capacity.peak - before < 1.5 * together.whole.nbytes
    for place, total in sums.items():
        ONE.check(together.gradients[place], total.bfloat16())
