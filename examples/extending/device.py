"""A device of one's own: a virtual one that counts the bytes that pass its lanes.

`roundpipe.device.protocol` says what an engine asks of a device: a name, three ordered queues of
work (`compute`, `up`, `down`), events on these, and random numbers. A device for other hardware
answers all of it; this one inherits the answers of the CPU and changes one.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundpipe import RoundPipe
from roundpipe.device.virtual import VirtualDevice, VirtualLane  # internal: may change
from roundpipe.optim import SGD


class CountingLane(VirtualLane):
    """Counts what is copied on it. Used by one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """A lane of real hardware would queue the copy here and return at once."""
        self.num_bytes += source.nbytes
        super().copy_(target, source)


class CountingDevice(VirtualDevice):
    """Keeps a lane for each direction, so that what comes up and what goes down are told apart."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.name = f"counting:{index}"
        self.up: CountingLane = CountingLane()
        self.down: CountingLane = CountingLane()


def train(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]], devices: list[CountingDevice]
) -> list[float]:
    """Losses, each a mean over the batch."""
    losses = []
    with RoundPipe(model, devices=devices) as engine:
        optimizer = SGD(engine.optim_parameters(), lr=0.1)
        for inputs, targets in batches:
            loss = engine.forward_backward(
                (inputs,),
                label=targets,
                loss_fn=partial(mean_of_sums, num_rows=len(inputs)),
            )
            losses.append(loss.item())
            engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return losses


def mean_of_sums(outputs: Tensor, targets: Tensor, *, num_rows: int) -> Tensor:
    """A microbatch's part of the mean over `num_rows` rows."""
    return F.mse_loss(outputs, targets, reduction="sum") / num_rows


def make_model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))


if __name__ == "__main__":
    devices = [CountingDevice(0), CountingDevice(1)]
    print(train(make_model(), [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)], devices))
    for device in devices:
        print(f"{device}: {device.up.num_bytes} bytes up, {device.down.num_bytes} bytes down")
