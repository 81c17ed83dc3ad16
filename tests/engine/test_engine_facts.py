"""What an engine says of itself, and that there is only one of each."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ConfigError, RoundPipe, wrap_model_to_roundpipe
from tests.support.device_sets import ONE, TWO
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.late_work import LATE, make_pausing
from tests.support.models import MLP_WIDTH, make_mlp, mlp_batch
from tests.support.optimizers import Gate
from tests.support.reference import weights_of

BATCH = mlp_batch(rows=6)


def test_statistics_tell_what_goes_on_without_waiting_for_it(engines: Engines) -> None:
    gate = Gate()
    engine = engines(make_pausing(gate), TWO)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    assert engine.statistics()["is_idle"]
    run_batch(engine, BATCH, 2, execute_plan=LATE)
    gate.wait_reached()
    assert not engine.statistics()["is_idle"]
    gate.open()
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    said = engine.statistics()
    assert (said["is_idle"], said["steps"], said["version"], said["layers"]) == (True, 1, 1, 5)
    num_bytes = sum(parameter.nbytes for parameter in engine.model.parameters())
    assert (said["working_bytes"], said["master_bytes"]) == (num_bytes, num_bytes)
    assert sorted(said["slot_bytes"]) == [device.name for device in engine.devices]
    assert sum(said["slot_bytes"].values()) >= 4 * MLP_WIDTH**2


def test_the_repr_names_the_engine_and_its_state(engines: Engines) -> None:
    engine = engines(make_mlp(), TWO, name="mine")
    assert "mine" in repr(engine)
    assert "7 layers on virtual:0, virtual:1, " in repr(engine)
    assert "0 steps" in repr(engine)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step, is_async=False)
    assert "1 steps" in repr(engine)
    engine.close()
    assert "closed" in repr(engine)


def test_an_engine_without_a_name_is_called_after_its_place() -> None:
    """The user's line, however deep inside the package the name is asked for."""
    for engine in (
        RoundPipe(make_mlp(), devices=1),
        wrap_model_to_roundpipe(make_mlp(), devices=1),
    ):
        with engine:
            assert "test_engine_facts.py:" in repr(engine)


COPIES: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda engine: torch.save(engine, io.BytesIO()),
}


@pytest.mark.parametrize("how", COPIES)
def test_an_engine_can_not_be_copied_but_its_model_can(how: str, engines: Engines) -> None:
    """Two engines over one set of weights would train each other's; the error says what to do."""
    engine = engines(make_mlp(), ONE)
    run_batch(engine, BATCH, 2)
    before = engine_gradients(engine)
    with pytest.raises(ConfigError, match=r"\.model"):
        COPIES[how](engine)
    ONE.check(engine_gradients(engine), before)
    engine.zero_grad()
    twin = copy.deepcopy(engine.model)
    ONE.check(weights_of(twin), weights_of(engine.model))
    for value in pickle.loads(pickle.dumps(twin)).state_dict().values():
        assert isinstance(value, torch.Tensor)


def test_compiled_blocks_have_code_of_their_own(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler gives up on a code object after a few variants, whoever has asked for them."""
    compiled: list[Any] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compiled.append(function) or function
    )
    for _ in range(2):
        run_batch(engines(make_mlp(), TWO, compile=True), mlp_batch(rows=8), 4)
    codes = [function.__code__ for function in compiled if function.__name__ == "forward"]
    assert len(codes) == len({id(code) for code in codes}) >= 4
    assert not {id(code) for code in codes} & {
        id(nn.Linear.forward.__code__),
        id(nn.Tanh.forward.__code__),
    }
