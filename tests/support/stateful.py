"""A model that has every kind of state, and the plain-PyTorch oracle of who may change it when.

Knows nothing of the engine. `Plain` follows the table of docs/internals/model-state.md.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import MLP_WIDTH, Batch
from tests.support.reference import Tensors, plain_call

LARGE = 520  # squared fp32 numbers are more than the megabyte up to which buffers are compared


class Mixed(nn.Module):
    """Has one of each: what trains, what is frozen, buffers small and large, one that it writes."""

    scale: Tensor
    large: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MLP_WIDTH))
        self.frozen = nn.Parameter(torch.ones(MLP_WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.ones(MLP_WIDTH))
        self.register_buffer("large", torch.ones(LARGE, LARGE))
        self.register_buffer("mean", torch.zeros(MLP_WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        shift = self.mean.clone()
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        factor = self.weight * self.frozen * self.scale * self.large[3, :MLP_WIDTH]
        return hidden * factor - shift


def make_stateful(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """``2.weight`` is tied to ``4.weight``; layer 5 is frozen."""
    torch.manual_seed(0)
    linears = [nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(4)]
    linears[2].weight = linears[1].weight
    linears[3].requires_grad_(requires_grad=False)
    first, second, third, last = linears
    return nn.Sequential(first, Mixed(), second, nn.Tanh(), third, last).to(dtype)


TRAINED, TIED, FROZEN = "1.weight", "2.weight", "1.frozen"
SMALL, LARGE_BUFFER, WRITTEN = "1.scale", "1.large", "1.mean"


def tensor_of(model: nn.Module, name: str) -> Any:
    """The parameter or buffer."""
    module, _, own = name.rpartition(".")
    return getattr(model.get_submodule(module), own)


class Plain:
    """Training with masters, whose calls are one step behind an asynchronous step."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        optim_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: nn.Parameter(p.detach().to(optim_dtype or p.dtype, copy=True))
            for name, p in self.trained.items()
        }
        self.optimizer = make_optimizer(list(self.masters.values()))
        self.gradients: Tensors = {}
        self._stale: Tensors | None = None  # what calls compute with, if not the newest

    @property
    def is_behind(self) -> bool:
        return self._stale is not None

    def forward_backward(self, batch: Batch, num_microbatch: int) -> Tensor:
        newest = {name: p.detach().clone() for name, p in self.trained.items()}
        self._set(self._stale or {})
        call = plain_call(self.model, batch.split(num_microbatch), batch.loss_fn)
        self._set(newest)
        for name, gradient in call.gradients.items():
            self.gradients[name] = self.gradients.get(name, 0) + gradient
        return call.loss

    def step(self, *, is_async: bool) -> None:
        self.follow()
        before = {name: p.detach().clone() for name, p in self.trained.items()}
        for name, master in self.masters.items():
            gradient = self.gradients.get(name)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.optimizer.step()
        self.gradients = {}
        self._set(self.masters)
        self._stale = before if is_async else None

    def flush(self) -> None:
        self._stale = None

    def follow(self) -> None:
        """Masters keep what the weights hold of them."""
        with torch.no_grad():
            for name, weight in self.trained.items():
                master = self.masters[name]
                is_other = master.to(weight.dtype) != weight
                master.copy_(torch.where(is_other, weight.to(master.dtype), master))

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Weights and masters are what is loaded, to the bit; gradients are dropped."""
        with torch.no_grad():
            for name, value in values.items():
                tensor_of(self.model, name).copy_(value)
                if name in self.masters:
                    self.masters[name].copy_(value)
        self.gradients = {}

    def _set(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.trained[name].copy_(value)
