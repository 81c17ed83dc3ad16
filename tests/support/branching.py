"""Small models that are no sequence, for `AutoRoundPipe`: every kind of place a parameter may be
at. Seeded inside."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Batch

WIDTH = 16


class Branches(nn.Module):
    """Two sequences beside each other, a parameter of the model's own, and a weight that is used
    three times: as a layer, in another sequence, and read by the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.right[0].weight = self.left[2].weight

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        x = self.left(x) * self.scale + self.right(x)
        for index, block in enumerate(self.blocks):
            x = block(x, shift=index)
        return torch.nn.functional.linear(x, self.left[2].weight) * factor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, shift: int) -> Tensor:
        return x + torch.tanh(self.inner(x + shift))


def make_branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


class Residual(nn.Module):
    """The block of a ResNet. Group norm, because batch statistics would be those of each
    microbatch."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, two stages of blocks, pooling, head: the shape of torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(
            self.avgpool(self.layer2(self.layer1(torch.relu(self.conv1(images))))).flatten(1)
        )


def make_resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet()


def make_bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config).train()


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train()


def _output_error(rows: int) -> Any:
    return lambda output, target: (output - target).square().sum() / rows


def branches_batch(rows: int = 6, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return Batch((x,), {"factor": 2.0}, y, _output_error(rows))


def resnet_batch(rows: int = 6, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 3, 8, 8, generator=generator)
    classes = torch.randint(5, (rows,), generator=generator)
    return Batch(
        (images,), {}, classes, lambda output, target: nn.functional.cross_entropy(output, target)
    )


def bert_batch(rows: int = 6, seed: int = 0) -> Batch:
    ids, mask, generator = _padded(rows, seed)
    labels = torch.randint(2, (rows,), generator=generator)
    return Batch((), {"input_ids": ids, "attention_mask": mask, "labels": labels}, None, _own_loss)


def t5_batch(rows: int = 6, seed: int = 0) -> Batch:
    ids, mask, generator = _padded(rows, seed)
    labels = torch.randint(1, 50, (rows, 5), generator=generator)
    labels[::2, 3:] = -100
    return Batch((), {"input_ids": ids, "attention_mask": mask, "labels": labels}, None, _own_loss)


def _padded(rows: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (rows, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    return ids, mask, generator


def _own_loss(output: Any, _: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss
