"""Linear layers of replicas that compute in fp8."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.scaled_linear import ALIGNMENT, scaled_linear

# Smaller ones would gain nothing, and among them are what rounds badly: routers of experts, and the
# two matrices of a LoRA adapter.
_SMALLEST = 512


class ScaledLinear(nn.Linear):
    """What a replica's `nn.Linear` is turned into."""

    def forward(self, input: Tensor) -> Tensor:
        """Args: a tensor of shape (..., in_features). Returns (..., out_features)."""
        # An adapter may have put something else in the weight's place.
        if not isinstance(self.weight, Tensor) or input.numel() == 0:
            return super().forward(input)
        return scaled_linear(input, self.weight, self.bias)


def use_fp8(layers: Sequence[nn.Module]) -> Callable[[nn.Module], None]:
    """What turns linear layers of a replica into scaled ones: those inside of layers whose class
    repeats, which embeddings, head and final norm do not.

    The class of the replica's module is another, so nobody else's module is touched.

    Raises:
        ConfigError: there is none.
    """
    counts = Counter(map(type, layers))
    kinds = {kind for kind, count in counts.items() if count > 1}
    if not any(type(layer) in kinds and _scalable(layer) for layer in layers):
        raise ConfigError(
            "compute_dtype='fp8': none of the model's layers has a linear layer for it. It is for "
            f"nn.Linear of at least {_SMALLEST} inputs and outputs, both multiples of {ALIGNMENT}, "
            f"inside of layers whose class repeats; the layers are {_in_words(counts)}. Leave "
            "compute_dtype out, or give the model's blocks as layers of their own"
        )

    def turn(replica: nn.Module) -> None:
        if type(replica) in kinds:
            for module in _scalable(replica):
                module.__class__ = ScaledLinear

    return turn


def _scalable(layer: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in layer.modules()
        if module is not layer
        # No subclass, which may compute something else, nor what a user has patched.
        and type(module) is nn.Linear
        and "forward" not in vars(module)
        and min(module.in_features, module.out_features) >= _SMALLEST
        and module.in_features % ALIGNMENT == 0
        and module.out_features % ALIGNMENT == 0
        and module.weight.dtype is not torch.float64
    ]


def _in_words(counts: Counter[type[nn.Module]]) -> str:
    return ", ".join(f"{count} {kind.__name__}" for kind, count in counts.items())
