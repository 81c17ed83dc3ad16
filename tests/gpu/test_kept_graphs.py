"""Graphs that stay on a GPU from a forward to its backward."""

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.support.device_sets import ACCELERATORS
from tests.support.engines import Engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
WIDTH, STEPS = 256, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_loss_over_the_batch(keeps: bool, engines: Engines) -> None:
    """What the loss takes between is known after the first call: its square matrix."""
    torch.manual_seed(0)
    model, oracle = (nn.Sequential(*(Block() for _ in range(8))) for _ in range(2))
    oracle.load_state_dict(model.state_dict())
    engine = engines(model, ACCELERATORS[0])
    device = ACCELERATORS[0].argument[0]
    config = RoundPipeRunConfig(keep_graphs=keeps, num_microbatch=4, output_device=device)
    ours = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.01)
    theirs = torch.optim.SGD(oracle.parameters(), lr=0.01)
    for x in torch.randn(STEPS, 64, WIDTH):
        out = engine(x, roundpipe_run_config=config)
        loss = (out @ out.T / WIDTH).square().mean()
        loss.backward()
        engine.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        out = oracle(x)
        expected = (out @ out.T / WIDTH).square().mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-6)
    engine.synchronize()
    ACCELERATORS[0].check(
        dict(model.named_parameters()), dict(oracle.named_parameters()), bitwise=False
    )
