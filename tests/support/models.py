"""The small models and batches every test trains. Seeded inside, so two calls give the same
thing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.reference import LossFn, Microbatch, split_rows

MLP_WIDTH = 16
LLAMA_VOCABULARY = 64
LLAMA_LENGTH = 12
IGNORED = -100


class Batch(NamedTuple):
    """One batch and the loss whose sum over microbatches is the loss of the whole batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    loss_fn: LossFn

    def split(self, num_microbatch: int) -> list[Microbatch]:
        """Equal microbatches, for the plain loop."""
        return split_rows(num_microbatch, self.args, self.kwargs, self.label)

    def whole(self) -> list[Microbatch]:
        """The batch as a single microbatch."""
        return [Microbatch(self.args, self.kwargs, self.label)]


def make_mlp(num_linears: int = 4, width: int = MLP_WIDTH, seed: int = 0) -> nn.Sequential:
    """Linear, Tanh, Linear, ...: 2 * num_linears - 1 layers, every other one without parameters."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(num_linears):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def squared_error_over(rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Squared error divided by the rows of the whole batch, so microbatch losses add up to the
    batch's."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() / rows

    return loss_fn


def mlp_batch(rows: int, seed: int = 0, width: int = MLP_WIDTH) -> Batch:
    generator = torch.Generator().manual_seed(1000 + seed)
    inputs = torch.randn(rows, width, generator=generator)
    targets = torch.randn(rows, width, generator=generator)
    return Batch((inputs,), {}, targets, squared_error_over(rows))


def make_llama(*, tied: bool) -> nn.Module:
    """A tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def make_lora_llama() -> nn.Module:
    """TinyLlama with rank-2 adapters on q and v. B starts random: with B = 0 every gradient of A
    would be zero."""
    from peft import LoraConfig, get_peft_model

    base = make_llama(tied=False)
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return get_peft_model(base, config)


def token_mean_over(num_valid: int) -> LossFn:
    """Causal cross-entropy summed over unmasked tokens, divided by the whole batch's number of
    them."""

    def loss_fn(outputs: Any, labels: Tensor) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        total = nn.functional.cross_entropy(
            logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / max(num_valid, 1)

    return loss_fn


def llama_batch(num_labels: list[int], seed: int = 0) -> Batch:
    """One row per entry; the entry says how many of its 12 labels are kept, the tail is masked.

    No attention mask: padding is a separate matter. `num_labels` counts before the causal shift.
    """
    generator = torch.Generator().manual_seed(2000 + seed)
    input_ids = torch.randint(
        0, LLAMA_VOCABULARY, (len(num_labels), LLAMA_LENGTH), generator=generator
    )
    labels = input_ids.clone()
    for row, kept in enumerate(num_labels):
        labels[row, kept:] = IGNORED
    num_valid = int((labels[:, 1:] != IGNORED).sum())
    return Batch((), {"input_ids": input_ids}, labels, token_mean_over(num_valid))


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model to be transparent for. `tied`: one weight has two uses, and autograd adds them in
    another order."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]  # (rows, seed)
    tied: bool = False

    def __str__(self) -> str:
        return self.name


def _uneven_llama_batch(rows: int, seed: int) -> Batch:
    return llama_batch([(2, 5, 9, 11, 12)[row % 5] for row in range(rows)], seed)


MLP = ModelCase(name="mlp", make=make_mlp, batch=mlp_batch)
LLAMA = ModelCase(name="llama", make=lambda: make_llama(tied=False), batch=_uneven_llama_batch)
TIED_LLAMA = ModelCase(
    name="llama-tied", make=lambda: make_llama(tied=True), batch=_uneven_llama_batch, tied=True
)
LORA_LLAMA = ModelCase(name="llama-lora", make=make_lora_llama, batch=_uneven_llama_batch)
CASES = [MLP, LLAMA, TIED_LLAMA, LORA_LLAMA]
