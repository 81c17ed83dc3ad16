"""Functions and reducers that join the microbatches' outputs, in the forms that scripts write.

A function of the outputs alone ended in a bare TypeError, after the whole forward had run, and a
reducer of ``torch.distributed.pipelining`` was refused though its chunk specs were not.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    merge_chunks,
    sum_reducer,
)

from roundpipe import ConfigError, RoundPipeRunConfig
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines
from tests.support.models import make_mlp, mlp_batch

X = mlp_batch(rows=5).args[0]


def last_dim(outputs: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    return torch.cat([output.t() for output in outputs], dim).t()


@pytest.mark.parametrize(
    "merge",
    [
        torch.cat,
        lambda outputs: torch.cat(outputs),
        lambda outputs, rows: torch.cat(outputs) + 0 * sum(rows),
        lambda *given: torch.cat(given[0]),
        last_dim,
    ],
    ids=["builtin", "outputs", "outputs and rows", "any", "another argument"],
)
def test_a_function_may_leave_out_the_rows(
    merge: Any, devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make_mlp(), devices)
    for count in (1, 3):
        config = RoundPipeRunConfig(num_microbatch=count, merge_output=merge)
        output = engine(X, roundpipe_run_config=config)
        devices.check(output, make_mlp()(X), bitwise=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"merge_output": lambda: None}, r"merge_output cannot be called as \(outputs, rows\)"),
        ({"merge_output": lambda a, b, c: None}, "merge_output cannot be called"),
        ({"split_input": lambda args: None}, r"split_input .* \(args, kwargs, n\)"),
        ({"split_label": lambda label: None}, r"split_label .* \(label, n\)"),
    ],
)
def test_a_function_of_another_form_is_refused_before_anything_runs(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RoundPipeRunConfig(**settings)


class TwoOutputs(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.square().sum()


def test_reducers_do_what_they_do_in_torch(devices: DeviceSet, engines: Engines) -> None:
    largest = _CustomReducer(torch.tensor(0.0), torch.maximum)
    model = nn.Sequential(make_mlp(), TwoOutputs())
    engine = engines(model, devices)
    for count in (1, 2, 5):
        for reducer in (sum_reducer, largest):
            spec = (TensorChunkSpec(0), reducer)
            config = RoundPipeRunConfig(num_microbatch=count, merge_output=spec)
            with torch.no_grad():
                output = engine(X, roundpipe_run_config=config)
                expected = merge_chunks([model(part) for part in X.tensor_split(count)], spec)
            devices.check(dict(enumerate(output)), dict(enumerate(expected)), bitwise=False)


def test_a_reducer_is_no_way_to_split() -> None:
    engine_config = RoundPipeRunConfig(num_microbatch=2, split_input=((sum_reducer,), {}))
    from roundpipe import RoundPipe

    with RoundPipe(make_mlp(), devices=1) as engine, pytest.raises(ConfigError, match="split_inp"):
        engine(X, roundpipe_run_config=engine_config)
