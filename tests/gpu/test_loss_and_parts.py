"""What only a GPU shows of the chunked loss and models in parts: wide sums of 16-bit products,
outputs left on it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.kernels.linear_cross_entropy import linear_cross_entropy
from tests.support.branching import branches_batch, make_branches, make_t5, t5_batch
from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.models import Batch
from tests.support.reference import plain_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]


def loss_and_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunked_loss(dtype: torch.dtype) -> None:
    """Against double precision; 16-bit gradients are at most as far from it as those of the whole
    logits."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, vocabulary = 2048, 128, 3000
    hidden = torch.randn(tokens, width, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (
        (torch.randn(vocabulary, width, generator=generator) * 0.1)
        .to("cuda", dtype)
        .requires_grad_()
    )
    bias = torch.randn(vocabulary, generator=generator).to("cuda", dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator).cuda()
    labels[::3] = -100
    given = (hidden, weight, bias)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    exact = loss_and_gradients(F.cross_entropy(F.linear(*wide), labels), *wide)
    full = loss_and_gradients(F.cross_entropy(F.linear(*given).float(), labels), *given)
    chunked = loss_and_gradients(
        linear_cross_entropy(
            hidden, weight, labels, bias, chunk_bytes=300 * vocabulary * dtype.itemsize
        ),
        *given,
    )
    for ours, theirs, right in zip(chunked, full, exact, strict=True):
        assert ours.dtype == theirs.dtype
        error, allowed = ((each.double() - right).norm() for each in (ours, theirs))
        assert error <= 1.05 * allowed + 1e-6 * right.norm()


@pytest.mark.parametrize("head_trains", [True, False])
def test_a_tenth_of_the_memory(head_trains: bool) -> None:
    """bf16, 8K tokens, 152K vocabulary: bytes on top of the inputs, the returned gradients among
    them."""
    hidden = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(
        151_936, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=head_trains
    )
    labels = torch.randint(151_936, (8192,), device="cuda")

    def peak(loss_of: Any) -> int:
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: linear_cross_entropy(hidden, weight, labels)) < 0.1 * peak(
        lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels)
    )


@pytest.mark.parametrize("devices", ACCELERATORS, ids=str)
@pytest.mark.parametrize(
    ("make", "batch_of"), [(make_branches, branches_batch), (make_t5, t5_batch)]
)
def test_models_in_parts(devices: DeviceSet, make: Any, batch_of: Any) -> None:
    """Outputs between blocks stay on the GPUs in microbatches; loss and gradients are the plain
    model's."""
    model, batch = make(), batch_of()
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    with wrap_model_to_roundpipe(
        model,
        use_sequential_preset=False,
        devices=devices.argument,
        lower_threshold=100,
        upper_threshold=100,
    ) as engine:
        loss = batch.loss_fn(engine(*batch.args, **batch.kwargs), batch.label)
        loss.backward()
        engine.synchronize()
        devices.check(loss, expected.loss)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        devices.check(found, expected.gradients)


class Chain(nn.Module):
    """Elements of a list, and what the model's own code does with an output that is still on
    GPUs."""

    def __init__(self, width: int, length: int, between: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(length))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


def _written(x: Tensor) -> Tensor:
    x[:, 0] = 0.5
    return x


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x


BETWEEN = {
    "nothing": lambda x: x,
    "written": _written,
    "hook": _hooked,
    "added": lambda x: x + x.detach().relu(),
}


@pytest.mark.parametrize("devices", ACCELERATORS, ids=str)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_own_code_between_elements_finds_a_tensor(devices: DeviceSet, between: Any) -> None:
    torch.manual_seed(0)
    model, (x, y) = Chain(16, 3, between), torch.randn(2, 6, 16)
    batch = Batch((x,), {}, y, F.mse_loss)
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    with wrap_model_to_roundpipe(
        model, devices=devices.argument, lower_threshold=1, upper_threshold=0
    ) as engine:
        loss = batch.loss_fn(engine(x), y)
        loss.backward()
        engine.synchronize()
        devices.check(loss, expected.loss, bitwise=False)
        devices.check(
            {name: p.grad for name, p in model.named_parameters()},
            expected.gradients,
            bitwise=False,
        )


def test_parts_together_stay_under_the_limit() -> None:
    """Eight inputs of 128 MiB are kept for their backwards, each of a part whose own plan has room
    for it."""
    limit = 768 * 2**20
    model, x = Chain(2048, 8, lambda x: x), torch.randn(16384, 2048)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with wrap_model_to_roundpipe(
        model,
        devices=[torch.device("cuda", 0)],
        lower_threshold=1,
        upper_threshold=0,
        max_gpu_memory=f"{limit}B",
        model_run_config=RoundPipeRunConfig(num_microbatch=4),
    ) as engine:
        for _ in range(4):
            engine(x).square().mean().backward()
    assert torch.cuda.max_memory_allocated() - before < limit
