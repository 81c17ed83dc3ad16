"""Train a ResNet, a model that is no sequence, written as torchvision writes it and in plain
PyTorch.

    python examples/resnet.py --devices 3

The stages of blocks run on devices, their shortcuts included; what the model's own forward does
between them runs on the CPU. Four lines differ from a plain loop, marked below. The images are made
up: waves in one of ten directions.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig, virtual, wrap_model_to_roundpipe

NUM_CLASSES, SIZE = 10, 32


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        made = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(made)) + self.downsample(x))


class ResNet(nn.Module):
    """A stem, stages of blocks, a head."""

    def __init__(self, width: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for number, count in enumerate(blocks, start=1):
            made = width * 2 ** (number - 1)
            first = BasicBlock(channels, made, 1 if number == 1 else 2)
            self.add_module(
                f"layer{number}",
                nn.Sequential(first, *(BasicBlock(made, made, 1) for _ in range(1, count))),
            )
            channels = made
        self.num_stages = len(blocks)
        self.fc = nn.Linear(channels, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        for number in range(1, self.num_stages + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def make_model(width: int = 16) -> ResNet:
    """Seeded."""
    torch.manual_seed(0)
    return ResNet(width, blocks=(2, 2, 2))


def batches(count: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy waves, and the numbers of their directions."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for _ in range(count):
        labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
        angles = (labels * torch.pi / NUM_CLASSES)[:, None, None]
        waves = torch.sin(0.8 * (rows * torch.cos(angles) + columns * torch.sin(angles)))
        noise = torch.randn(batch_size, 3, SIZE, SIZE, generator=generator)
        yield waves[:, None] + 0.3 * noise, labels


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the loss of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=int, help="virtual devices on the CPU; default: the GPUs there are"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument(
        "--num_microbatch", type=int, default=1, help="batch norm sees one microbatch at a time"
    )
    options = parser.parse_args(argv)
    in_microbatches = RoundPipeRunConfig(num_microbatch=options.num_microbatch)
    losses = []
    with wrap_model_to_roundpipe(  # was: model = make_model()
        make_model(),
        devices=options.devices and virtual(options.devices),
        model_run_config=in_microbatches,
    ) as model:
        print(model)
        optimizer = roundpipe.optim.AdamW(
            model.optim_parameters(), lr=3e-3
        )  # was: torch.optim, model.parameters()
        for step, (images, labels) in enumerate(
            batches(options.steps, options.batch_size), start=1
        ):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            model.step(
                optimizer.step, is_async=False
            )  # was: optimizer.step(), and optimizer.zero_grad() beside it
            losses.append(loss.item())
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
        model.eval()
        images, labels = next(batches(1, 200))
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean().item()
        print(f"{right:.0%} of 200 images right")
    return losses


if __name__ == "__main__":
    main()
