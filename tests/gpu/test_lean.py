"""Low-precision optimizer state on a real device: the torch code has the CPU's bits there."""

import pytest
import torch
from torch import Tensor

from roundpipe.optim.lean import FORMATS, LeanRule, MomentFormat
from roundpipe.optim.moments import Noise
from roundpipe.optim.optimizers import AdamRule

pytestmark = pytest.mark.gpu
COUNT = 70_003
ADAM = AdamRule(
    step=2.0,
    lr=1e-2,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.1,
    amsgrad=False,
    maximize=True,
    is_decoupled=True,
)


def trained(device: str, stored: MomentFormat, master: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(COUNT, generator=generator).to(master)
    state = [tensor for form in FORMATS[stored] for tensor in form.zeros(weight)]
    weight, state = weight.to(device), [tensor.to(device) for tensor in state]
    for step in range(4):
        sizes = 10 ** (6 * torch.rand(COUNT, generator=generator) - 6)
        gradient = (torch.randn(COUNT, generator=generator) * sizes).to(device)
        LeanRule(ADAM, FORMATS[stored], Noise(step)).apply([weight], [gradient], [state])
    return [tensor.cpu() for tensor in (weight, *state)]


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", FORMATS)
def test_a_device_has_the_cpus_bits(stored: MomentFormat, master: torch.dtype) -> None:
    """Each sum and each product is an operation of its own, so nothing is contracted."""
    for there, here in zip(
        trained("cuda", stored, master), trained("cpu", stored, master), strict=True
    ):
        torch.testing.assert_close(there, here, rtol=0, atol=0)
