"""A preset for a model class of one's own: it runs as a sequence, and has `forward_backward`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundpipe import wrap_model_to_roundpipe
from roundpipe.optim import SGD
from roundpipe.presets import Cut, register_preset


class Tagger(nn.Module):
    """One class for each token. Its head is tied to its embedding."""

    def __init__(self, num_blocks: int = 4, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean loss over (rows, tokens), or without labels logits (rows, tokens, classes)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


State = dict[str, Any]  # what each layer returns and the next one takes


class First(nn.Module):
    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, tokens: Tensor, labels: Tensor | None = None, share: float = 1.0) -> State:
        return {"hidden": self.embed(tokens), "labels": labels, "share": share}


class Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, state: State) -> State:
        return {**state, "hidden": state["hidden"] + self.block(state["hidden"])}


class Last(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, state: State) -> Tensor:
        logits, labels = self.head(state["hidden"]), state["labels"]
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * state["share"]


def split_input(args: Any, kwargs: Any, n: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """Takes positional tensors, (rows, tokens). Losses of microbatches add up to the batch's mean,
    because each counts for its share of the rows."""
    parts = list(zip(*(tensor.chunk(n) for tensor in args), strict=True))
    return parts, [{"share": len(part[0]) / len(args[0])} for part in parts]


def merge_output(outputs: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return torch.stack(list(outputs)).sum() if outputs[0].ndim == 0 else torch.cat(list(outputs))


def cut(model: Tagger) -> Cut:
    layers = nn.Sequential(First(model.embed), *map(Block, model.blocks), Last(model.head))
    return Cut(sequential=layers, split_input=split_input, merge_output=merge_output)


def train(model: Tagger, batches: Sequence[tuple[Tensor, Tensor]], **settings: Any) -> list[float]:
    register_preset(Tagger, cut)
    losses = []
    with wrap_model_to_roundpipe(model, use_sequential_preset=True, **settings) as engine:
        optimizer = SGD(engine.optim_parameters(), lr=0.1)
        for tokens, labels in batches:
            losses.append(engine.forward_backward((tokens, labels)).item())
            engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return losses


if __name__ == "__main__":
    rows = [(tokens, tokens.flip(1)) for tokens in torch.randint(32, (3, 6, 5))]
    print(train(Tagger(), rows))
