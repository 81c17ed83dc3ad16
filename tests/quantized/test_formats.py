"""Each format reads what other libraries have written, and writes what they would."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from roundpipe.errors import ConfigError
from roundpipe.quantized import FORMATS, FP8, INT8, MXFP4, NF4, Format
from roundpipe.quantized import format as format_module

try:
    from bitsandbytes import functional as bitsandbytes
except ImportError:
    bitsandbytes = None  # tests that are marked with its name need it

WEIGHTS = {
    "nf4": (96, 128),
    "fp8": (2, 300, 200),
    "int8": (300, 200),
    "mxfp4": (2, 64, 40),
    "nf4_double": (96, 256),
}


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made.view(-1)[:64] = 0  # a block of zeros has no largest magnitude to divide by
    return made


@pytest.fixture(params=[2**20, 4096], ids=["at once", "in pieces"], autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "_CHUNK", request.param)


@pytest.mark.bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nf4_is_that_of_bitsandbytes(dtype: torch.dtype) -> None:
    dense = weight((96, 128), dtype)
    theirs, state = bitsandbytes.quantize_4bit(dense, quant_type="nf4", blocksize=64)
    packed, magnitudes, table = NF4().quantize(dense)
    assert torch.equal(packed, theirs)
    assert torch.equal(magnitudes, state.absmax)
    assert torch.equal(table, state.code)
    expected = bitsandbytes.dequantize_4bit(theirs, state)
    assert torch.equal(NF4().dequantize((packed, magnitudes, table), dense.shape, dtype), expected)


@pytest.mark.bitsandbytes
def test_nested_magnitudes_of_bitsandbytes() -> None:
    dense = weight((96, 128))
    packed, state = bitsandbytes.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    inner = state.state2
    form = NF4(state.blocksize, inner.blocksize, float(state.offset))
    parts = (packed, state.absmax, state.code, inner.code, inner.absmax)
    form.check(parts, dense.shape)
    expected = bitsandbytes.dequantize_4bit(packed, state)
    assert torch.equal(form.dequantize(parts, dense.shape, dense.dtype), expected)
    with pytest.raises(ConfigError, match="without an offset"):
        form.quantize(dense)


@pytest.mark.bitsandbytes
def test_bitsandbytes_reads_nested_magnitudes_that_are_made_here() -> None:
    dense, form = weight((256, 256)), FORMATS["nf4_double"]
    packed, codes, table, steps, outer = form.quantize(dense)
    inner = bitsandbytes.QuantState(absmax=outer, code=steps, blocksize=256)
    inner.dtype = torch.float32
    state = bitsandbytes.QuantState(
        absmax=codes, shape=dense.shape, code=table, blocksize=64, quant_type="nf4",
        dtype=dense.dtype, offset=torch.tensor(0.0), state2=inner,
    )  # fmt: skip
    expected = bitsandbytes.dequantize_4bit(packed, state)
    actual = form.dequantize((packed, codes, table, steps, outer), dense.shape, dense.dtype)
    assert torch.equal(actual, expected)


def test_nested_magnitudes_are_nearly_those_that_are_not() -> None:
    """Also beside one that is a thousand times as large, and of a block of zeros."""
    dense = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    dense[3, 5], dense[7, :64] = 4e3, 0.0
    form = FORMATS["nf4_double"]
    parts = form.quantize(dense)
    form.check(parts, dense.shape)
    assert sum(part.nbytes for part in (parts[1], parts[4])) == 512 + 2 * 4
    plain = NF4().dequantize(NF4().quantize(dense), dense.shape, dense.dtype)
    off = (form.dequantize(parts, dense.shape, dense.dtype) - plain).abs()
    sizes = NF4().quantize(dense)[1].view(64, 8).repeat_interleave(64, 1)
    # Half a step of the root, where that is of a value that small.
    largest = parts[4].view(2, 1).repeat_interleave(32, 0)
    step = (torch.sqrt(sizes * largest) + largest / 510) / 255
    assert bool((off <= step * 1.001 + 1e-6).all())
    assert bool((off[40:] <= 0.01 * sizes[40:]).all())
    assert bool((dense[7, :64] == form.dequantize(parts, dense.shape, dense.dtype)[7, :64]).all())


def test_nested_weights_are_put_together_in_whole_blocks() -> None:
    form, dense = FORMATS["nf4_double"], [weight((128, 256)) * scale for scale in (1.0, 3.0)]
    parts = [form.quantize(one) for one in dense]
    together = form.join(parts, [(128, 256)] * 2, 0)
    values = form.dequantize(together, (256, 256), dense[0].dtype)
    apart = [form.dequantize(own, (128, 256), dense[0].dtype) for own in parts]
    assert torch.equal(values, torch.cat(apart))
    with pytest.raises(ConfigError, match="whole blocks of 16384"):
        form.join(parts, [(128, 256)] * 2, 1)


@pytest.mark.bitsandbytes
def test_a_last_block_that_is_not_full() -> None:
    """Other writers leave some: it is read, though not written."""
    dense = weight((1, 100))
    packed, state = bitsandbytes.quantize_4bit(dense, quant_type="nf4", blocksize=64)
    parts = (packed, state.absmax, state.code)
    NF4().check(parts, dense.shape)
    expected = bitsandbytes.dequantize_4bit(packed, state)
    assert torch.equal(NF4().dequantize(parts, dense.shape, dense.dtype), expected)


def test_mxfp4_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 40, 4), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    actual = MXFP4().dequantize((blocks, scales), expected.shape, torch.bfloat16)
    assert torch.equal(actual, expected)
    again = MXFP4().dequantize(MXFP4().quantize(actual), actual.shape, torch.bfloat16)
    assert torch.equal(again, actual), "numbers of the format did not stay what they are"


def test_fp8_multiplies_each_block_by_its_scale() -> None:
    dense = weight((300, 200))
    values, scales = FP8().quantize(dense)
    assert scales.shape == (3, 2)
    actual = FP8().dequantize((values, scales), dense.shape, torch.bfloat16)
    for row in range(3):
        for column in range(2):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            expected = (values[block].float() * scales[row, column]).bfloat16()
            assert torch.equal(actual[block], expected)


# Bounds of the error: half a step of the format where its steps are largest, beside the largest
# magnitude of a block, and half a step of bfloat16 (2^-9). Nested magnitudes are half a step of
# their own off: near the largest, 1 / 255 of it.
_HALF_STEP = {"nf4": 0.1521, "fp8": 2**-4, "int8": 0.5 / 127, "mxfp4": 0.25}
_HALF_STEP["nf4_double"] = _HALF_STEP["nf4"] + 1 / 255


@pytest.mark.parametrize("name", FORMATS)
def test_no_weight_is_farther_off_than_half_a_step(name: str) -> None:
    form, dense = FORMATS[name], weight(WEIGHTS[name])
    parts = form.quantize(dense)
    form.check(parts, dense.shape)
    actual = form.dequantize(parts, dense.shape, dense.dtype)
    largest = dense.abs().max().item()
    assert (actual.float() - dense.float()).abs().max() <= (_HALF_STEP[name] + 2**-9) * largest
    assert not torch.equal(actual, dense)
    assert sum(part.nbytes for part in parts) < 0.55 * dense.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_another_weight_are_refused(name: str) -> None:
    form, dense = FORMATS[name], weight(WEIGHTS[name])
    parts = form.quantize(dense)
    larger = (*dense.shape[:-1], 2 * dense.shape[-1])
    with pytest.raises(ConfigError, match=rf"{form.name}: .* elements of .*; this weight takes"):
        form.check(parts, larger)
    with pytest.raises(ConfigError, match="parts"):
        form.check(parts[:1], dense.shape)
    with pytest.raises(ConfigError, match=r"int64"):
        form.check((parts[0].long(), *parts[1:]), dense.shape)


@pytest.mark.parametrize(
    ("form", "shape"), [(NF4(), (5, 10)), (FP8(), (128,)), (INT8(), (128,)), (MXFP4(), (2, 40, 8))]
)
def test_shapes_that_do_not_divide_into_blocks(form: Format, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"leave (it|this weight) as it is"):
        form.quantize(torch.zeros(shape))
