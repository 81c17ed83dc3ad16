"""A checkpoint was loaded, the model held it, and the next step brought the old weights back.

Optimizers work on masters, copies at their own precision. They followed a load only for keys
spelled as the parameters are, and only if nothing was raised: a hook that renames keys (torch's
own, for weight norm of older checkpoints), or a strict error after some keys had been loaded, left
masters behind, and the next step written back those. Likewise `reload_parameters` threw away the
update that was still to be written back.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, make_mlp, mlp_batch
from tests.support.reference import weights_of

BATCH = mlp_batch(rows=6)
DTYPES = [None, torch.float64]
"""Of the masters."""


def sgd(engine: RoundPipe, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(engine.optim_parameters(), lr=lr)


def train(engine: RoundPipe, optimizer: torch.optim.Optimizer, *, is_async: bool = False) -> None:
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step, is_async=is_async)


def without_learning(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Its next steps write back the masters as they are."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


@pytest.mark.parametrize("optim_dtype", DTYPES, ids=str)
def test_masters_follow_keys_that_a_hook_renames(
    optim_dtype: torch.dtype | None, devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        weight_norm(nn.Linear(MLP_WIDTH, MLP_WIDTH)), nn.Linear(MLP_WIDTH, MLP_WIDTH)
    )
    engine = engines(model, devices, optim_dtype=optim_dtype)
    optimizer = sgd(engine)
    train(engine, optimizer)
    loaded = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): torch.full_like(value, 0.25)
        for name, value in engine.state_dict().items()
    }
    assert "0.weight_g" in loaded
    engine.load_state_dict(loaded)
    train(engine, without_learning(optimizer))
    weights = engine_weights(engine)
    devices.check(weights, {name: torch.full_like(value, 0.25) for name, value in weights.items()})


class Scaled(nn.Linear):
    """Keeps checkpoints at ten times the scale, as a hook of the user's may."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        key = prefix + "weight"
        state_dict[key] = state_dict[key] / 10
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_masters_follow_values_that_a_hook_changes(devices: DeviceSet, engines: Engines) -> None:
    torch.manual_seed(0)
    engine = engines(nn.Sequential(Scaled(MLP_WIDTH, MLP_WIDTH), nn.Tanh()), devices)
    optimizer = sgd(engine)
    train(engine, optimizer)
    engine.load_state_dict(
        {name: torch.ones_like(value) for name, value in engine.state_dict().items()}
    )
    train(engine, without_learning(optimizer))
    weights = engine_weights(engine)
    devices.check(weights["0.weight"], torch.full_like(weights["0.weight"], 0.1))
    devices.check(weights["0.bias"], torch.ones_like(weights["0.bias"]))


@pytest.mark.parametrize("optim_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_masters_follow_what_a_failing_load_has_loaded(
    fault: str, optim_dtype: torch.dtype | None, devices: DeviceSet, engines: Engines
) -> None:
    """torch loads what it can and raises afterwards; whatever the model holds by then must stay."""
    model = make_mlp()
    engine = engines(model, devices, optim_dtype=optim_dtype)
    optimizer = sgd(engine)
    train(engine, optimizer)
    loaded: dict[str, Tensor] = {
        name: torch.full_like(value, 0.25) for name, value in engine.state_dict().items()
    }
    if fault == "missing":
        del loaded["4.weight"]
    elif fault == "unexpected":
        loaded["5.weight"] = torch.ones(1)
    else:
        loaded["4.weight"] = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict"):
        engine.load_state_dict(loaded)
    held = weights_of(model)
    assert bool((held["0.weight"] == 0.25).all())
    assert bool((held["4.weight"] == 0.25).all()) == (fault == "unexpected")
    train(engine, without_learning(optimizer))
    devices.check(engine_weights(engine), held)


def test_reloading_while_an_update_is_to_be_written_back_is_refused(
    devices: DeviceSet, engines: Engines
) -> None:
    """The weights that were changed are older than the masters: either would be lost. After
    synchronize() it works."""
    model = make_mlp()
    engine = engines(model, devices)
    optimizer = sgd(engine)
    start = weights_of(model)
    train(engine, optimizer, is_async=True)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    with pytest.raises(ConfigError, match="synchronize"):
        engine.reload_parameters()
    engine.synchronize()
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    engine.reload_parameters()
    held = weights_of(model)
    assert not torch.equal(held["2.weight"], start["2.weight"]), (
        "the update of another layer is lost"
    )
    train(engine, without_learning(optimizer))
    devices.check(engine_weights(engine), held)
