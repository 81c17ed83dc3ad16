"""A format of one's own for frozen weights: -1, 0 or 1 times a scale for each row, four to a byte.

A `Format` makes parts of a weight and, on whatever device the parts are, the weight of its parts. A
`QuantizedWeight` of it takes the place of any frozen parameter: host memory and the link carry the
parts, and everything else sees a dense weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundpipe import ConfigError, RoundPipe
from roundpipe.optim import SGD
from roundpipe.quantized import Format, QuantizedWeight

PLACES = (1, 4, 16, 64)  # of the four digits of a byte


@dataclass(frozen=True)
class Ternary(Format):
    """Parts: (weights / 4,) uint8, digits to the base 4; (rows, 1) float32 scales."""

    name = "ternary"

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 2 or shape[1] % 4:
            raise ConfigError(f"ternary: rows of {tuple(shape)} do not divide by four")

    def quantize(self, weight: Tensor) -> tuple[Tensor, ...]:
        self.check_shape(weight.shape)
        scales = weight.abs().mean(1, keepdim=True).float()
        digits = (weight / scales).round().clamp(-1, 1).to(torch.int64) + 1
        places = torch.tensor(PLACES, device=weight.device)
        return (digits.view(-1, 4) * places).sum(1).to(torch.uint8), scales

    def check(self, parts: Sequence[Tensor], shape: Sequence[int]) -> None:
        self.check_shape(shape)
        if parts[0].numel() * 4 != math.prod(shape) or len(parts[1]) != shape[0]:
            raise ConfigError(f"ternary: {len(parts[0])} bytes for a weight of {tuple(shape)}")

    def dequantize_into(self, parts: Sequence[Tensor], out: Tensor) -> None:
        places = torch.tensor(PLACES, device=out.device)
        digits = parts[0][:, None].to(torch.int64) // places % 4 - 1
        out.copy_(digits.view(out.shape) * parts[1])


class Adapted(nn.Linear):
    """A frozen ternary layer with a trained adapter of rank 2."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        weight = QuantizedWeight.quantize(self.weight.detach(), Ternary())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input) + self.up(self.down(input)))


def train(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]], devices: list[torch.device]
) -> list[float]:
    """Losses, each a mean over the batch."""
    losses = []
    with RoundPipe(model, devices=devices) as engine:
        optimizer = SGD(engine.optim_parameters(), lr=0.1)
        for inputs, targets in batches:
            loss_fn = partial(mean_of_sums, num_rows=len(inputs))
            loss = engine.forward_backward((inputs,), label=targets, loss_fn=loss_fn)
            losses.append(loss.item())
            engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return losses


def mean_of_sums(outputs: Tensor, targets: Tensor, *, num_rows: int) -> Tensor:
    """A microbatch's part of the mean over `num_rows` rows."""
    return F.mse_loss(outputs, targets, reduction="sum") / num_rows


if __name__ == "__main__":
    data = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    print(train(nn.Sequential(*(Adapted(8) for _ in range(4))), data, [torch.device("cpu")]))
