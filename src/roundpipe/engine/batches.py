"""From what a call is given to its microbatches, and from what these give to what the caller
gets."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ..config import RoundPipeRunConfig
from ..device import Device
from ..errors import ConfigError
from ..microbatch import Microbatches, merge, refuse_packed, split
from ..microbatch.packed import RoundPipePackedData
from ..microbatch.sizes import tensor_leaves
from ..microbatch.split import Inputs
from ..plan.costs import Grain
from ..presets.preset import SplitForward
from ..runtime.call import Call
from ..transfer.boundaries import Boundary, delivered

GivenMicrobatches = Sequence[tuple[Sequence[Any], Mapping[str, Any], Any]]
CutMicrobatches = Callable[[int], GivenMicrobatches]
Destinations = Sequence[Sequence[torch.device | None]]


class Batch:
    """What a call is given, in microbatches, and how it is to run.

    ``boundaries``: what goes into the first layer. Lives no longer than the engine's function that
    was called, because it may be memory of the devices. ``is_spent``: a call with it has had an
    effect that outlives its failure.
    """

    def __init__(
        self, parts: Microbatches, config: RoundPipeRunConfig, cut: CutMicrobatches | None = None
    ) -> None:
        self.config = config
        self.labels = parts.labels
        self.boundaries = [_boundary(inputs) for inputs in parts.inputs]
        self.is_spent = False
        self._rows = parts.rows
        self._cut = cut
        self._writes = [_writes(tensor) for tensor in self._tensors()]

    @classmethod
    def cut(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        label: Any,
        count: int,
        config: RoundPipeRunConfig,
    ) -> Self:
        """In ``count`` microbatches, or as many as ``config`` says.

        Raises:
            ConfigError: ``args`` are no tuple or ``kwargs`` no dictionary.
        """
        parts = split(
            _positional(args, "input_args"),
            _named(kwargs, "input_kwargs"),
            label,
            config.num_microbatch or count,
            split_input=config.split_input,
            split_label=config.split_label,
        )
        return cls(parts, config)

    @classmethod
    def _given(
        cls,
        microbatches: GivenMicrobatches,
        config: RoundPipeRunConfig,
        cut: CutMicrobatches | None = None,
    ) -> Self:
        """Cut by the caller, who may also have said how to ``cut`` it otherwise.

        Raises:
            ConfigError: there are none, one is not of three parts, or has keywords that nothing in
                the model reads.
        """
        if not microbatches:
            raise ConfigError("microbatches is empty; give at least one (args, kwargs, label)")
        parts = []
        for index, microbatch in enumerate(microbatches):
            where = f"microbatches[{index}]"
            if not isinstance(microbatch, (tuple, list)) or len(microbatch) != 3:
                raise ConfigError(f"{where} is not (args, kwargs, label)")
            args, kwargs, label = microbatch
            refuse_packed(
                (args, kwargs, label),
                "microbatches are cut already; give one of its values to each",
            )
            given = _positional(args, f"{where}'s args"), _named(kwargs, f"{where}'s kwargs")
            if isinstance(config.split_input, SplitForward):
                config.split_input.check_cut(*given)
            parts.append(split(*given, label, 1))
        together = Microbatches(
            inputs=tuple(part.inputs[0] for part in parts),
            labels=tuple(part.labels[0] for part in parts),
            rows=tuple(part.rows[0] for part in parts),
            batch_size=sum(part.batch_size for part in parts),
        )
        return cls(together, config, cut)

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        label: Any,
        microbatches: GivenMicrobatches | CutMicrobatches | None,
        count: int,
        config: RoundPipeRunConfig,
    ) -> Self:
        """A whole batch, or one that the caller has cut or cuts.

        Raises:
            ConfigError: both were given, or one is not as it has to be.
        """
        if microbatches is None:
            return cls.cut(args, kwargs, label, count, config)
        if _positional(args, "input_args") or _named(kwargs, "input_kwargs") or label is not None:
            raise ConfigError(
                "give either input_args, input_kwargs and label, or microbatches, not both"
            )
        if callable(microbatches):
            given = microbatches(config.num_microbatch or count)
            return cls._given(given, config, microbatches)
        return cls._given(microbatches, config)

    def in_at_least(self, count: int) -> Self | None:
        """The same batch in that many microbatches; None if it has as many, or nobody may cut it
        finer."""
        if self._cut is None or self.num_microbatches >= count:
            return None
        finer = self._given(self._cut(count), self.config, self._cut)
        return finer if finer.num_microbatches > self.num_microbatches else None

    def recompute_by_layer(self) -> None:
        """Unless the caller has said what is recomputed at once."""
        if self.config.recompute_grain is None:
            self.config = replace(self.config, recompute_grain="layer")

    @property
    def num_microbatches(self) -> int:
        return len(self.boundaries)

    @property
    def grain(self) -> Grain:
        """What is recomputed at once."""
        return self.config.recompute_grain or "stage"

    @property
    def wants_gradients(self) -> bool:
        """Whether the caller does, for something that goes in."""
        return any(any(boundary.carries) for boundary in self.boundaries)

    @property
    def wanted(self) -> list[torch.Tensor]:
        """The caller's tensors that want a gradient, microbatch by microbatch."""
        return [
            leaf
            for b in self.boundaries
            for leaf, carried in zip(b.leaves, b.carries, strict=True)
            if carried
        ]

    @property
    def destinations(self) -> Destinations:
        """Per microbatch and leaf the device that its gradient goes to; None where none is
        wanted."""
        return [
            [
                leaf.device if carried else None
                for leaf, carried in zip(b.leaves, b.carries, strict=True)
            ]
            for b in self.boundaries
        ]

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (leaf for boundary in self.boundaries for leaf in tensor_leaves(boundary.leaves))

    @contextmanager
    def spent_by(self, call: Call) -> Iterator[None]:
        """The call runs inside."""
        try:
            yield
        finally:
            self.is_spent |= call.reaches_out

    def can_run_again(self, devices: Sequence[Device]) -> bool:
        """Whether a call on ``devices`` that has failed has left no trace on what it was given."""
        return not self.is_spent and all(
            writes == _writes(tensor)
            if writes is not None
            else not any(device.holds(tensor) for device in devices)
            for tensor, writes in zip(self._tensors(), self._writes, strict=True)
        )

    def delivered(self, call: Call) -> list[Boundary]:
        """The call's outputs where the caller wants them, complete."""
        target = None if self.config.merge_output is False else torch.device("cpu")
        if self.config.output_device is not None:
            target = torch.device(self.config.output_device)
        # A call with losses may have late stage runs, which go on with whatever they hold.
        shared = call.kept.memory() if call.asked.loss_fn is None else None
        return [delivered(call.outputs[m], target, shared) for m in range(self.num_microbatches)]

    def joined(self, values: list[Any], outputs: list[Boundary]) -> Any:
        """``values``, which are those of ``outputs``, as one value; or packed."""
        if self.config.merge_output is False:
            ready = [output.ready for output in outputs if output.ready is not None]
            return RoundPipePackedData(values, self._rows, ready)
        return merge(values, self._rows, self.config.merge_output)


def _boundary(inputs: Inputs) -> Boundary:
    """The first layer's input. Whether a gradient is wanted is what the caller's tensors say."""
    leaves, spec = pytree.tree_flatten(inputs)
    carries = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    return Boundary(tuple(leaves), spec, carries, None, None)


def _writes(tensor: torch.Tensor) -> int | None:
    """torch's count of in-place writes; None for a tensor that has none."""
    return None if tensor.is_inference() else tensor._version


def _positional(args: Any, what: str) -> tuple[Any, ...]:
    """Refuses an argument given in place of the tuple of all: rows of a tensor would be taken for
    arguments."""
    if not isinstance(args, (tuple, list)) or isinstance(args, RoundPipePackedData):
        raise ConfigError(
            f"{what}: a {type(args).__name__}; give the positional arguments as a tuple, such as "
            "(x,)"
        )
    return tuple(args)


def _named(kwargs: Any, what: str) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"{what}: a {type(kwargs).__name__}; give the arguments by name in a dictionary"
        )
    return dict(kwargs or {})


def input_gradients(call: Call, targets: Destinations) -> list[torch.Tensor | None]:
    """Gradients for `Batch.wanted`, each on its tensor's device. The call lets go of them,
    because it lives until its gradients are committed, and they are on devices."""
    gradients: list[torch.Tensor | None] = []
    for m, devices in enumerate(targets):
        received = call.input_gradients.pop(m, None)
        if not any(devices):
            continue
        leaves = received.leaves if received is not None else (None,) * len(devices)
        if received is not None and received.ready is not None:
            received.ready.wait()
        for device, gradient in zip(devices, leaves, strict=True):
            if (
                device is not None
                and gradient is not None
                and received is not None
                and received.source is not None
            ):
                received.source.lend_to_caller(gradient)
                gradient = gradient.to(device)
            if device is not None:
                gradients.append(gradient)
    return gradients


def backward_into(tensors: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    flowing = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if gradient is not None
    ]
    torch.autograd.backward(
        [tensor for tensor, _ in flowing], [gradient for _, gradient in flowing]
    )


def sum_losses(call: Call) -> Any:
    totals: list[torch.Tensor] = []
    for m in range(call.asked.num_microbatches):
        # A copy, because the caller may write to its loss while the backward that made it still
        # runs.
        parts = [part.to("cpu", copy=True) for part in call.losses[m].parts]
        if totals and len(parts) != len(totals):
            raise ConfigError(
                f"loss_fn returned {len(totals)} losses for the first microbatches and "
                f"{len(parts)} for microbatch {m}; they are added up, so return as many each time"
            )
        totals = (
            [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
        )
    for total in totals:
        marked_as_run(total)
    return totals if call.losses[0].is_sequence else totals[0]


def marked_as_run(loss: torch.Tensor) -> torch.Tensor:
    """``loss``, which has no graph: its ``backward`` says why, where torch would only say that."""
    setattr(loss, "backward", _already_run)  # noqa: B010
    return loss


def _already_run(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "backward was already run by forward_backward(); use forward() to call backward() yourself"
    )


def in_one_microbatch(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """For a ``loss_fn``, which sees one microbatch, of a loss that is of all rows together."""
    warnings.warn(
        "the model's loss is of all rows together (the auxiliary loss of its routers), and loss_fn "
        "sees one microbatch, so the batch is one; leave loss_fn out to have it cut",
        stacklevel=3,
    )
    return replace(config, num_microbatch=1)


def outputs_as_loss(outputs: Any, _: Any) -> Any:
    """The loss where no ``loss_fn`` is given: the outputs, or what they carry as Hugging Face
    models' do."""
    return getattr(outputs, "loss", outputs)
