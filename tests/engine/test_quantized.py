"""Frozen weights that are quantized: losses and gradients are bitwise those of the same model with
the dequantized weights, wherever the parts lie and whatever runs beside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from roundpipe import ConfigError, RoundPipe, load_checkpoint, optim, save_checkpoint
from roundpipe.memory.slot_sizes import ALIGNMENT
from roundpipe.quantized import FORMATS, QuantizedWeight
from roundpipe.testing import AdversarialDevice
from tests.support.quantized_models import WIDTH, Adapted, data, dense, loss_fn, make, trained


@pytest.mark.parametrize(
    ("name", "pin_model", "num_devices", "is_async"),
    list(
        zip(
            FORMATS,
            ("off", "alloc", "register", "off", "alloc"),
            (1, 3, 1, 3, 1),
            (False, True, True, False, True),
            strict=True,
        )
    ),
)
def test_numbers_are_those_of_dense_weights(
    name: str, pin_model: str, num_devices: int, is_async: bool
) -> None:
    """Each format, and each setting with one of them; all of them together below."""
    check_numbers(name, pin_model, num_devices, is_async=is_async)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_whole_grid(name: str, pin_model: str, num_devices: int, is_async: bool) -> None:
    check_numbers(name, pin_model, num_devices, is_async=is_async)


def check_numbers(name: str, pin_model: str, num_devices: int, *, is_async: bool) -> None:
    devices = [AdversarialDevice(index) for index in range(num_devices)]
    settings: dict[str, Any] = {"devices": devices, "pin_model": pin_model, "is_async": is_async}
    actual = trained(make(name), **settings)
    devices = [AdversarialDevice(index) for index in range(num_devices)]
    expected = trained(dense(name), **{**settings, "devices": devices})
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FORMATS)
def test_what_goes_up_is_the_parts(name: str) -> None:
    """And a slot has room for both."""
    model = make(name)
    with RoundPipe(model, devices=1) as engine:
        layer = engine._store.layers[0]
        block = model[0]
        plain = [p.nbytes for p in block.parameters() if not isinstance(p, QuantizedWeight)]
        parts = [part.nbytes for part in block.base.parts]
        aligned = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in (*plain, *parts))
        assert layer.image_bytes == aligned
        assert layer.num_bytes == aligned + block.base.nbytes


def test_a_quantized_weight_that_would_train_is_refused() -> None:
    model = make("nf4")
    model[1].base.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"layer 1: parameter 'base' is quantized and trains"):
        RoundPipe(model, devices=1)


def test_a_forward_that_writes_to_one_is_refused() -> None:
    class Writes(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            self.base.data.mul_(2)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Writes("nf4"), nn.Linear(WIDTH, 5))
    with (
        RoundPipe(model, devices=1) as engine,
        pytest.raises(ConfigError, match="writes to its frozen parameter 'base'"),
    ):
        engine(data()[0][0])


def test_a_checkpoint_goes_on_to_the_bit_and_refuses_another_base(tmp_path: Path) -> None:
    """It could not be loaded at all: it held dense values, which quantized weights refuse."""
    path = tmp_path / "half.safetensors"

    def two_steps(model: nn.Sequential, *, saves: bool) -> list[Tensor]:
        with RoundPipe(model, devices=1) as engine:
            optimizer = optim.Adam(engine.optim_parameters(), lr=0.1)
            if not saves:
                load_checkpoint(path, engine, optimizer)
            for x, label in data()[:2] if saves else data()[1:2]:
                engine.forward_backward((x,), label=label, loss_fn=loss_fn)
                engine.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                if saves and not path.exists():
                    save_checkpoint(path, engine, optimizer)
            engine.synchronize()
        return [p.detach() for p in model.parameters() if p.requires_grad]

    expected, again = two_steps(make("nf4"), saves=True), make("nf4")
    for parameter in again.parameters():
        if parameter.requires_grad:
            nn.init.zeros_(parameter)
    for one, other in zip(two_steps(again, saves=False), expected, strict=True):
        assert torch.equal(one, other)
    assert "model/0.base" not in load_file(path)

    other_base = make("nf4")
    other_base[2].base.parts[0][5] ^= 1
    before = [p.detach().clone() for p in other_base.parameters() if p.requires_grad]
    with pytest.raises(ConfigError, match=r"other values of 'quantized/2.base/0'"):
        two_steps(other_base, saves=False)
    after = [p.detach() for p in other_base.parameters() if p.requires_grad]
    assert all(map(torch.equal, after, before))
