"""A small model with frozen quantized weights and trained adapters, the same one dense, and a few
steps of training."""

from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, optim
from roundpipe.quantized import FORMATS, QuantizedWeight

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
