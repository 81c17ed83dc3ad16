"""A plan that its own limit did not hold.

A head of 16-bit weights that did not train was copied into fp32, whole, for the gradient of what
goes into it. Nothing had planned that: the first call left half of the device free, and the next
one, planned from measurements, ran out of memory.
"""

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipeRunConfig
from roundpipe.device.virtual import VirtualDevice
from roundpipe.kernels import linear_cross_entropy as kernel
from roundpipe.optim import AdamW
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines

WIDTH, VOCABULARY, TOKENS = 64, 8192, 3
HEAD_BYTES = 2 * WIDTH * VOCABULARY


class Adapted(nn.Module):
    """Frozen 16-bit weights as large as two heads, and a small bias that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, 2 * VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.frozen.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.frozen(x)[..., :WIDTH]
        return x + torch.tanh(narrow) + self.adapter


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.zeros(x.shape[:-1], dtype=torch.long)
        return kernel.linear_cross_entropy(x, self.head.weight, labels, reduction="sum")


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small beside this head as they are beside a real one."""
    monkeypatch.setattr(kernel, "_COPIED_BYTES", HEAD_BYTES // 16)


@pytest.mark.usefixtures("small_copies")
def test_a_head_is_not_copied_whole_for_the_gradient_of_its_input() -> None:
    device = VirtualDevice(0, 100 * HEAD_BYTES)
    assert device.capacity is not None
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    head = Head()
    with device.compute.work():
        head(hidden).backward()
    assert device.capacity.peak < HEAD_BYTES / 2
    logits = (hidden.detach().double().requires_grad_(), head.head.weight.double())
    expected = nn.functional.cross_entropy(
        logits[0] @ logits[1].T, torch.zeros(TOKENS, dtype=torch.long), reduction="sum"
    )
    expected.backward()
    assert hidden.grad is not None
    assert logits[0].grad is not None
    torch.testing.assert_close(hidden.grad.double(), logits[0].grad, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("small_copies")
@pytest.mark.parametrize("heads", [9, 11, 13, 16])
def test_a_plan_made_from_measurements_is_held(heads: int, engines: Engines) -> None:
    """With layers that stay on the device in what the plan leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(12)), Head())
    engine = engines(
        model,
        DeviceSet(kind="virtual", count=1),
        max_gpu_memory=f"{heads * HEAD_BYTES}B",
        model_run_config=RoundPipeRunConfig(num_microbatch=2),
    )
    optimizer = AdamW(engine.optim_parameters(), lr=1e-3)
    (device,) = engine.devices
    assert isinstance(device, VirtualDevice)
    assert device.capacity is not None
    for _ in range(6):
        x = torch.randn(2, TOKENS, WIDTH, dtype=torch.bfloat16)
        engine.forward_backward((x,), loss_fn=lambda loss, _: loss)
        engine.step(optimizer.step)
    engine.synchronize()
    assert engine.planner.shortages == (0, 0)
    assert engine.statistics()["slot_bytes"][device.name] > 0.5 * device.capacity.num_bytes
    assert device.capacity.peak <= device.capacity.num_bytes
