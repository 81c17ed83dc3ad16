"""Complex weights lost their imaginary part in real masters, and our optimizers refused them.

With ``optim_dtype=torch.float32`` a step at rate 0 turned 1 + 1j into 1. A real ``optim_dtype``
means its complex partner now. ``roundpipe.optim`` asked torch for its fused steps, which take no
complex numbers; torch's others do.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import Reference, weights_of

STEPS = 4
one_and_three = pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(MLP_WIDTH, dtype=torch.complex64))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * self.factors).abs()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Wave(), nn.Linear(MLP_WIDTH, MLP_WIDTH), Wave())


@one_and_three
@both
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("AdamW", {"foreach": True}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "-".join(value) or "plain",
)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torchs"])
def test_they_train_as_in_torch(
    ours: bool,
    name: str,
    options: dict[str, Any],
    is_async: bool,
    devices: DeviceSet,
    engines: Engines,
) -> None:
    model, batch = make_model(), mlp_batch(rows=6)
    options = {"lr": 0.1, **options}
    kind = getattr(torch.optim, name)
    reference = Reference(model, lambda params: kind(params, **options), staleness=int(is_async))
    engine = engines(model, devices, optim_dtype=torch.float32)
    optimizer = (getattr(roundpipe.optim, name) if ours else kind)(
        iter(engine.optim_parameters()), **options
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        expected = reference.forward_backward(batch.split(3), batch.loss_fn)
        reference.step()
        devices.check(run_batch(engine, batch, 3), expected, bitwise=False)
        engine.step(update, is_async=is_async)
    engine.synchronize()
    reference.flush()
    devices.check(weights_of(model), reference.weights, bitwise=False)
    dtypes = {master.dtype for master in engine.optim_parameters()}
    assert dtypes == {torch.complex64, torch.float32}


@one_and_three
@pytest.mark.parametrize(
    "settings", [{}, {"grad_dtype": torch.float32}], ids=["", "fp32 gradients"]
)
def test_a_step_at_rate_zero_changes_nothing(
    settings: dict[str, Any], devices: DeviceSet, engines: Engines
) -> None:
    model = make_model()
    before = weights_of(model)
    engine = engines(model, devices, optim_dtype=torch.float32, **settings)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.0)
    run_batch(engine, mlp_batch(rows=6), 3)
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    devices.check(weights_of(model), before)


@pytest.mark.parametrize("as_groups", [False, True])
def test_an_optimizer_that_has_no_complex_step_says_so(as_groups: bool, engines: Engines) -> None:
    engine = engines(make_model(), ONE, optim_dtype=torch.float32)
    params: Any = engine.optim_parameters()
    params = [{"params": iter(params)}] if as_groups else params
    with pytest.raises(ConfigError, match="Lion has a complex parameter"):
        roundpipe.optim.Lion(params)
