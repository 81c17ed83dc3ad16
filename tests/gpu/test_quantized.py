"""On an accelerator quantized weights are made dense by kernels of their own, to the bit as plain
torch makes them on the host, and train as dense ones."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roundpipe.quantized import FORMATS, FP8, INT8, MXFP4, NF4, Format, QuantizedWeight
from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.quantized_models import dense, make, trained

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES: list[tuple[Format, tuple[int, ...]]] = [
    (NF4(), (96, 192)),
    (NF4(), (4096, 1536)),
    (FP8(), (2, 300, 200)),
    (FP8(), (512, 5000)),
    (INT8(), (3, 300, 200)),
    (INT8(), (64, 9001)),
    (MXFP4(), (2, 64, 40)),
    (MXFP4(), (3, 2880, 720)),
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def check(
    form: Format, parts: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    expected = form.dequantize(parts, shape, dtype)
    actual = form.dequantize([part.cuda() for part in parts], shape, dtype)
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "shape"), SHAPES, ids=str)
def test_the_bits_are_those_of_the_host(
    form: Format, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    check(form, form.quantize(weight), shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nested_magnitudes(dtype: torch.dtype) -> None:
    """A product and a sum, which a card would round once; and a last byte with one weight."""
    generator = torch.Generator().manual_seed(0)
    count = 64 * 700 - 29
    parts = (
        torch.randint(0, 256, (-(-count // 2), 1), dtype=torch.uint8, generator=generator),
        torch.randint(0, 256, (700,), dtype=torch.uint8, generator=generator),
        NF4().quantize(torch.randn(64))[2],
        torch.randn(256, generator=generator),
        torch.rand(3, generator=generator),
    )
    check(NF4(64, 256, 0.0371), parts, (1, count), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_powers_and_codes(dtype: torch.dtype) -> None:
    """Subnormal powers and numbers too, and both zeros."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    check(MXFP4(), (codes, scales), (1, 512, 255), dtype)
    finite = [code for code in range(256) if code & 127 != 127]
    values = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, -1)
    check(FP8(), (values, torch.tensor([[1.7e-38, 3.0]])), (1, len(finite)), dtype)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
@pytest.mark.parametrize("devices", ACCELERATORS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_training_is_that_of_dense_weights(
    name: str, devices: DeviceSet, pin_model: str, is_async: bool
) -> None:
    settings = {"devices": devices.argument, "pin_model": pin_model, "is_async": is_async}
    actual, expected = trained(make(name), **settings), trained(dense(name), **settings)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("devices", ACCELERATORS, ids=str)
def test_parts_in_a_mapped_file(devices: DeviceSet, tmp_path: Path) -> None:
    """They go up through the ring, at addresses that are no multiple of 16."""
    actual_model, tensors = make("nf4"), {"odd": torch.zeros(3, dtype=torch.uint8)}
    for index, block in enumerate(actual_model[:-1]):
        tensors |= {f"{index}.{n}": part for n, part in enumerate(block.base.parts[:2])}
    save_file(tensors, tmp_path / "parts.safetensors")
    mapped = load_file(tmp_path / "parts.safetensors")
    for index, block in enumerate(actual_model[:-1]):
        parts = [mapped[f"{index}.0"], mapped[f"{index}.1"], block.base.parts[2]]
        weight = QuantizedWeight(NF4(), parts, block.base.shape, block.base.dtype)
        block.base = nn.Parameter(weight, requires_grad=False)
    settings = {"devices": devices.argument, "pin_model": "off", "is_async": False}
    for one, other in zip(
        trained(actual_model, **settings), trained(dense("nf4"), **settings), strict=True
    ):
        assert torch.equal(one, other)
