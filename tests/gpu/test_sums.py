"""Sums of gradients by the kernel: torch's to the bit, and norms of what is rounded."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import roundpipe
from tests.support.device_sets import ACCELERATORS
from tests.support.engines import Engines

sum_kernel = pytest.importorskip("roundpipe.kernels.gradient_sums")
pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SHAPES = [(1031, 257), (512, 512), (3, 5, 40001), (262144, 1)]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first, second, third = (make(shape, dtype) for _ in range(3))
    assert sum_kernel.can_add(first, second, torch.float32)
    total = sum_kernel.add(first, second)
    assert torch.equal(total, first.float() + second.float())
    expected = total + third.float()
    assert sum_kernel.add(total, third) is total
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    total = make(shape, torch.float32)
    assert sum_kernel.can_round(total, dtype)
    rounded, norms = sum_kernel.rounded(total, dtype)
    assert torch.equal(rounded, total.to(dtype))
    expected = torch.linalg.vector_norm(rounded.double(), dim=tuple(range(1, rounded.dim())))
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=0)


def test_what_is_not_finite_stays_so() -> None:
    total = make((512, 512), torch.float32)
    total[3, 5], total[4, 6], total[5, 7] = float("nan"), float("inf"), 1e6
    rounded, norms = sum_kernel.rounded(total, torch.float16)
    assert torch.equal(rounded.isnan(), total.isnan())
    assert rounded[5, 7].isinf()  # too large for this dtype
    assert norms[3].isnan()
    assert norms[4].isinf()
    assert norms[5].isinf()
    assert norms[:3].isfinite().all()


def test_others_are_left_to_torch() -> None:
    small, wide = make((8, 8), torch.bfloat16), make((1024, 1024), torch.float32)
    assert not sum_kernel.can_add(small, small, torch.float32)
    assert not sum_kernel.can_add(wide, wide, torch.float32)
    assert not sum_kernel.can_add(wide.bfloat16(), wide.bfloat16().T, torch.float32)
    assert not sum_kernel.can_round(wide, torch.float32)
    assert not sum_kernel.can_round(wide.T, torch.bfloat16)


@pytest.mark.parametrize("places", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 5)], ids=str)
def test_sums_do_not_depend_on_how_tensors_are_aligned(places: tuple[int, int]) -> None:
    """What was compiled for one alignment is not used for another, whichever comes first."""
    torch.manual_seed(0)
    for first, second in (places, places[::-1], (0, 0)):
        one = torch.randn(1 << 18 | 8, device=DEVICE)[first:][: 1 << 18].view(512, 512)
        other = make((1 << 18 | 8,), torch.bfloat16)[second:][: 1 << 18].view(512, 512)
        expected = one + other.float()
        assert torch.equal(sum_kernel.add(one, other), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_kernel_is_compiled_while_a_device_waits(
    dtype: torch.dtype, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step finds those of the loss and of sums as they were made with the engine."""
    from triton import knobs

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
    engine = engines(model, ACCELERATORS[0], optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-4)
    engine.step(lambda: None, is_async=False)  # the thread that does this has compiled before
    compiled: list[str] = []

    def note(**known: Any) -> None:
        compiled.append(str(known.get("fn")))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    tokens = torch.randint(0, 4096, (4, 64))
    inputs = {"input_ids": tokens, "labels": tokens}
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    engine.forward_backward(input_kwargs=inputs, run_config=config)
    engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert not compiled
