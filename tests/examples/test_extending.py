"""The examples of CONTRIBUTING.md train as plain torch does, and what they add is what ran."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, virtual, wrap_model_to_roundpipe

FOLDER = Path(__file__).parents[2] / "examples" / "extending"
STEPS, ROWS = 4, 6
Batch = tuple[Tensor, Tensor]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"extending_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
) -> list[float]:
    losses = []
    for inputs, targets in batches:
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def random_rows(width: int) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(ROWS, width), torch.randn(ROWS, width)) for _ in range(STEPS)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_examples_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


@pytest.mark.parametrize("num_devices", [1, 2])
def test_preset(num_devices: int) -> None:
    example = load("preset")
    torch.manual_seed(0)
    model = example.Tagger()
    expected = copy.deepcopy(model)
    batches = [(tokens, tokens.flip(1)) for tokens in torch.randint(32, (STEPS, ROWS, 5))]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = plainly(expected, optimizer, batches, lambda m, tokens, labels: m(tokens, labels))
    found = example.train(model, batches, devices=virtual(num_devices))
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_weights(model, expected)
    with wrap_model_to_roundpipe(model, devices=virtual(num_devices)) as engine:
        assert isinstance(engine, RoundPipe)
        assert engine.statistics()["layers"] == 2 + len(model.blocks)
        torch.testing.assert_close(engine(batches[0][0]), expected(batches[0][0]))


def test_device() -> None:
    example = load("device")
    torch.manual_seed(0)
    model = example.make_model()
    expected = copy.deepcopy(model)
    batches = random_rows(8)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = plainly(
        expected, optimizer, batches, lambda m, x, y: (m(x) - y).square().sum() / len(x)
    )
    devices = [example.CountingDevice(0), example.CountingDevice(1)]
    assert example.train(model, batches, devices) == pytest.approx(losses, rel=1e-5)
    assert_same_weights(model, expected)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(device.up.num_bytes for device in devices) >= num_bytes


@pytest.mark.parametrize("kind", ["SignMomentum", "OnePassSignMomentum"])
def test_optimizer(kind: str) -> None:
    example = load("optimizer")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    expected = copy.deepcopy(model)
    batches = random_rows(4)
    optimizer = example.SignMomentum(expected.parameters(), lr=1e-2)
    plainly(expected, optimizer, batches, lambda m, x, y: (m(x) - y).square().sum())
    example.train(model, batches, getattr(example, kind))
    assert_same_weights(model, expected)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_packed_format(num_devices: int) -> None:
    example = load("packed_format")
    torch.manual_seed(0)
    model = nn.Sequential(*(example.Adapted(8) for _ in range(3)))
    expected = copy.deepcopy(model)
    for layer in expected:
        assert set(layer.weight.dequantize().abs().unique().tolist()) != {0.0}
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    batches = random_rows(8)
    trained = [parameter for parameter in expected.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = plainly(
        expected, optimizer, batches, lambda m, x, y: (m(x) - y).square().sum() / len(x)
    )
    found = example.train(model, batches, virtual(num_devices))
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_weights(model, expected)
