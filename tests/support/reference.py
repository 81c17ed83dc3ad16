"""The plain-PyTorch oracles: one call, ordinary training (R0), training whose gradients are one
step old (R1).

Knows nothing of the engine. Everything here is a loop a reader can check by eye against what
`RoundPipe.step` promises.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LossFn = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Tensors = dict[str, Tensor]


class Microbatch(NamedTuple):
    """What one forward and backward consumes: the same triple
    `forward_backward(microbatches=[...])` takes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any


class PlainCall(NamedTuple):
    """What one call of `forward_backward` must give."""

    loss: Tensor
    outputs: list[Any]
    gradients: Tensors


def weights_of(model: nn.Module) -> Tensors:
    """A copy of every parameter; a tied weight appears once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def buffers_of(model: nn.Module) -> Tensors:
    """A copy of every buffer."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def split_rows(
    num_microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any
) -> list[Microbatch]:
    """Cut a batch of tensors into equal microbatches. Equal only: how uneven batches are cut is
    left open."""

    def cut(value: Tensor) -> Sequence[Tensor]:
        assert len(value) % num_microbatch == 0, "this oracle only knows how equal splits are cut"
        return value.chunk(num_microbatch)

    columns = [cut(value) for value in args]
    named = {key: cut(value) for key, value in kwargs.items()}
    labels = cut(label)
    return [
        Microbatch(
            args=tuple(column[index] for column in columns),
            kwargs={key: pieces[index] for key, pieces in named.items()},
            label=labels[index],
        )
        for index in range(num_microbatch)
    ]


def plain_call(model: nn.Module, microbatches: Iterable[Microbatch], loss_fn: LossFn) -> PlainCall:
    """Run microbatches one after the other; sum losses and gradients from zero, in microbatch
    order.

    Gradients are summed in fp32 (or wider), which for fp32 models is what accumulating `.grad`
    does, to the bit.
    """
    loss: Tensor | None = None
    outputs: list[Any] = []
    gradients: Tensors = {}
    for args, kwargs, label in microbatches:
        model.zero_grad(set_to_none=True)
        output = model(*args, **kwargs)
        microbatch_loss = loss_fn(output, label)
        microbatch_loss.backward()
        outputs.append(output)
        detached = microbatch_loss.detach()
        loss = detached if loss is None else loss + detached
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                wide = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                gradients[name] = gradients[name] + wide if name in gradients else wide.clone()
    model.zero_grad(set_to_none=True)
    assert loss is not None, "a call needs at least one microbatch"
    return PlainCall(loss, outputs, gradients)


class Reference:
    """Training with gradients `staleness` steps old: 0 is the ordinary loop (R0), 1 is R1.

    The gradient of step t is computed at W_max(t - 1 - staleness, s) and applied to W_(t-1) with
    the hyper-parameters of step t, giving W_t; s is the last step before a flush. Gradients of
    several calls add up until the step.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        staleness: int = 0,
        optim_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self._working = copy.deepcopy(model)
        self._masters = (
            copy.deepcopy(model) if optim_dtype is None else copy.deepcopy(model).to(optim_dtype)
        )
        self._staleness = staleness
        self._grad_dtype = grad_dtype
        self._gradients: Tensors = {}
        self._versions = [weights_of(self._masters)]
        self._flushed_at = 0
        self.optimizer = make_optimizer([p for p in self._masters.parameters() if p.requires_grad])

    @property
    def weights(self) -> Tensors:
        """W_t: every update taken so far."""
        return self._versions[-1]

    @property
    def buffers(self) -> Tensors:
        return buffers_of(self._working)

    @property
    def gradients(self) -> Tensors:
        """What was accumulated since the last step."""
        return dict(self._gradients)

    def forward_backward(self, microbatches: Iterable[Microbatch], loss_fn: LossFn) -> Tensor:
        steps_taken = len(self._versions) - 1
        self._load_working(self._versions[max(steps_taken - self._staleness, self._flushed_at)])
        call = plain_call(self._working, microbatches, loss_fn)
        for name, gradient in call.gradients.items():
            offloaded = (
                gradient
                if self._grad_dtype is None
                else gradient.to(self._grad_dtype).to(gradient.dtype)
            )
            self._gradients[name] = (
                self._gradients[name] + offloaded if name in self._gradients else offloaded
            )
        return call.loss

    def step(self, before_update: Callable[[Iterable[Tensor]], object] | None = None) -> None:
        """Update the masters; `before_update` sees them with their gradients (clipping goes
        there)."""
        for name, master in self._masters.named_parameters():
            gradient = self._gradients.get(name)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        if before_update is not None:
            before_update([p for p in self._masters.parameters() if p.grad is not None])
        self.optimizer.step()
        self._gradients = {}
        self._versions.append(weights_of(self._masters))

    def flush(self) -> None:
        """A synchronisation point: what follows is computed at the newest weights."""
        self._flushed_at = len(self._versions) - 1

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """`load_state_dict`: flush, drop gradients, keep moments, masters take the loaded
        values."""
        with torch.no_grad():
            for name, master in self._masters.named_parameters():
                if name in weights:
                    master.copy_(weights[name])
        self._gradients = {}
        self._versions[-1] = weights_of(self._masters)
        self.flush()

    def _load_working(self, weights: Tensors) -> None:
        with torch.no_grad():
            for name, parameter in self._working.named_parameters():
                parameter.copy_(weights[name])
