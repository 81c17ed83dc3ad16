"""Frozen weights that are quantized: losses and gradients are bitwise those of the same model with
the dequantized weights, wherever the parts lie and whatever runs beside."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ConfigError, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.memory.slot_sizes import ALIGNMENT
from roundpipe.quantized import FORMATS, QuantizedWeight
from roundpipe.testing import AdversarialDevice

WIDTH, NUM_BLOCKS = 64, 4


class Adapted(nn.Module):
    """A frozen linear map, or a stack of two, with a trained adapter of rank 2."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        shape = (2, WIDTH, WIDTH) if name == "mxfp4" else (WIDTH, WIDTH)
        weight = torch.randn(shape, dtype=torch.bfloat16) / WIDTH**0.5
        quantized = QuantizedWeight.quantize(weight, FORMATS[name])
        self.base = nn.Parameter(quantized, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / WIDTH)
        self.up = nn.Parameter(torch.randn(2, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one = self.norm(x)
        for base in self.base.unbind() if self.base.dim() == 3 else (self.base,):
            one = one @ base.float().T
        return x + torch.tanh(one + self.bias + (one @ self.down) @ self.up)


def make(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(name) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 5))


def dense(name: str) -> nn.Sequential:
    model = make(name)
    for block in model[:-1]:
        block.base = nn.Parameter(block.base.dequantize(), requires_grad=False)
    return model


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(6, WIDTH, generator=generator),
            torch.randint(5, (6,), generator=generator),
        )
        for _ in range(3)
    ]


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, label, reduction="sum") / 6


def train(engine: RoundPipe, *, is_async: bool) -> list[Tensor]:
    optimizer = optim.SGD(engine.optim_parameters(), lr=0.1)
    losses = []
    for x, label in data():
        config = RoundPipeRunConfig(num_microbatch=3)
        losses.append(
            engine.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)
        )
        engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    with torch.no_grad():
        losses.append(engine(data()[0][0]))
    engine.synchronize()
    return losses


def trained(model: nn.Sequential, *, is_async: bool, **settings: Any) -> list[Tensor]:
    with RoundPipe(model, **settings) as engine:
        losses = train(engine, is_async=is_async)
    return [*losses, *(p.detach() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_dense_weights(name: str) -> None:
    check_numbers(name, "off", 1, is_async=False)
    check_numbers(name, "alloc", 3, is_async=True)


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
