"""A quantized weight is seen as the dense one by all that reads it, and cannot be written."""

import copy
import io

import pytest
import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.quantized import FP8, INT8, MXFP4, NF4, Format, QuantizedWeight


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(128, 64, dtype=torch.bfloat16)
    weight = QuantizedWeight.quantize(made.weight.detach(), NF4())
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def dense(linear: nn.Linear) -> nn.Linear:
    made = copy.deepcopy(linear)
    made.weight = nn.Parameter(linear.weight.dequantize(), requires_grad=False)
    return made


def test_it_looks_like_the_dense_one(linear: nn.Linear) -> None:
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.shape, weight.dtype, weight.device) == (
        (64, 128),
        torch.bfloat16,
        torch.device("cpu"),
    )
    assert weight.num_bytes < 0.3 * weight.nbytes
    assert "nf4" in repr(weight)


def test_a_forward_and_backward_through_it(linear: nn.Linear) -> None:
    one, other = (torch.ones(3, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    plain = dense(linear)
    assert torch.equal(linear(one), plain(other))
    linear(one).sum().backward()
    plain(other).sum().backward()
    assert torch.equal(one.grad, other.grad)
    assert linear.weight.grad is None


def test_writes_are_refused(linear: nn.Linear) -> None:
    before = linear.weight.dequantize()
    for write in (
        lambda: linear.weight.data.add_(1),
        lambda: linear.weight.data.fill_(0),
        lambda: nn.init.zeros_(linear.weight),
        lambda: torch.add(before, 1, out=linear.weight),
        lambda: torch._foreach_mul_([linear.weight], 2.0),
    ):
        with pytest.raises(ConfigError, match=r"quantized \(nf4, \(64, 128\)\)"):
            write()
    with pytest.raises(RuntimeError, match="writes to a weight that is quantized"):
        linear.load_state_dict(dense(linear).state_dict())
    assert torch.equal(linear.weight.dequantize(), before)


def test_copies_are_quantized_and_their_own(linear: nn.Linear) -> None:
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for made in (copy.deepcopy(linear), torch.load(file, weights_only=False)):
        assert isinstance(made.weight, QuantizedWeight)
        assert isinstance(made.weight, nn.Parameter)
        assert made.weight.data_ptr() != linear.weight.data_ptr()
        assert torch.equal(made.weight.dequantize(), linear.weight.dequantize())


def test_another_dtype_or_values_are_refused(linear: nn.Linear) -> None:
    """`Module.to` assigns to `data`, which would leave the parts what they were."""
    before = linear.weight.dequantize()
    assert linear.to(torch.bfloat16).weight.parts
    with pytest.raises(ConfigError, match=r"torch.bfloat16\) cannot become torch.float32 in place"):
        linear.float()
    with pytest.raises(ConfigError, match="cannot become torch.bfloat16 in place"):
        linear.weight.data = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert torch.equal(linear.weight.dequantize(), before)
    assert torch.equal(linear.weight.float(), before.float())
    linear.weight.data = QuantizedWeight.quantize(before * 2, NF4())
    assert torch.equal(linear.weight.dequantize(), before * 2)


def test_its_parts_may_move(linear: nn.Linear) -> None:
    before = linear.weight.dequantize()
    linear.weight.move_to([part.clone() for part in linear.weight.parts])
    assert linear.weight.data_ptr() == linear.weight.parts[0].data_ptr()
    assert torch.equal(linear.weight.dequantize(), before)


def test_wrong_parts_are_refused() -> None:
    weight = torch.zeros(64, 128)
    with pytest.raises(ConfigError, match="8192 of torch.int8"):
        QuantizedWeight(INT8(), FP8().quantize(weight), weight.shape, torch.bfloat16)
    parts = INT8().quantize(weight)
    odd = torch.zeros(8193, dtype=torch.int8)[1:].view(64, 128)
    with pytest.raises(ConfigError, match="begins at byte 1"):
        QuantizedWeight(INT8(), (odd, parts[1]), weight.shape, torch.bfloat16)


@pytest.mark.parametrize("form", [NF4(), FP8(), INT8()], ids=lambda form: form.name)
def test_weights_are_put_together_as_they_are(form: Format) -> None:
    """As experts of a checkpoint are: stacked, then two stacks along their rows."""
    torch.manual_seed(0)
    weights = [torch.randn(128, 64) for _ in range(4)]
    quantized = [QuantizedWeight.quantize(weight, form) for weight in weights]
    stacks = torch.stack(quantized[:2]), torch.stack(quantized[2:], dim=0)
    both = torch.cat(stacks, dim=1)
    assert isinstance(both, QuantizedWeight)
    dense = [weight.dequantize() for weight in quantized]
    expected = torch.cat((torch.stack(dense[:2]), torch.stack(dense[2:])), 1)
    assert both.shape == expected.shape
    assert torch.equal(both.dequantize(), expected)
    assert type(torch.stack([quantized[0], weights[1]])) is torch.Tensor
    assert type(torch.stack(quantized, dim=1)) is torch.Tensor


def test_blocks_stay_whole() -> None:
    weights = [QuantizedWeight.quantize(torch.randn(96, 64), FP8()) for _ in range(2)]
    with pytest.raises(ConfigError, match="in whole blocks of 128"):
        torch.cat(weights)
    columns = [QuantizedWeight.quantize(torch.randn(4, 64), INT8()) for _ in range(2)]
    with pytest.raises(ConfigError, match="which has one scale"):
        torch.cat(columns, 1)
    with pytest.raises(ConfigError, match="mxfp4: weights cannot be put together"):
        torch.cat([QuantizedWeight.quantize(torch.randn(2, 32, 4), MXFP4()) for _ in range(2)])


def test_merging_as_bitsandbytes_does_is_refused_by_name(linear: nn.Linear) -> None:
    """PEFT said that a QuantizedWeight has no attribute quant_state."""
    assert not hasattr(linear.weight, "quant_state")
    with pytest.raises(ConfigError, match="merge_and_save"):
        _ = linear.weight.quant_state
