"""What a finished call leaves for the caller: summed losses, input gradients, written buffers."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..transfer.boundaries import Boundary
from .call import Call


def wanted(boundaries: list[Boundary]) -> list[torch.Tensor]:
    """The caller's tensors that want a gradient, microbatch by microbatch."""
    return [
        leaf
        for b in boundaries
        for leaf, carried in zip(b.leaves, b.carries, strict=True)
        if carried
    ]


Destinations = Sequence[Sequence[torch.device | None]]


def destinations(boundaries: list[Boundary]) -> Destinations:
    """Per microbatch and leaf the device that its gradient goes to; None where none is wanted."""
    return [
        [
            leaf.device if carried else None
            for leaf, carried in zip(b.leaves, b.carries, strict=True)
        ]
        for b in boundaries
    ]


def input_gradients(call: Call, targets: Destinations) -> list[torch.Tensor | None]:
    """Gradients for ``wanted(boundaries)``, each on its tensor's device. The call lets go of them,
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
    for m in range(call.settings.num_microbatches):
        # A copy, because the caller may write to its loss while the backward that made it still
        # runs.
        parts = [part.to("cpu", copy=True) for part in call.losses[m].parts]
        if totals and len(parts) != len(totals):
            raise ConfigError(
                f"loss_fn returned {len(totals)} losses for the first microbatches and "
                f"{len(parts)} for microbatch "
                f"{m}; they are added up, so return as many each time"
            )
        totals = (
            [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
        )
    for total in totals:
        # Because a tensor without a graph would only say that it has none.
        setattr(total, "backward", _already_run)  # noqa: B010
    return totals if call.losses[0].is_sequence else totals[0]


def _already_run(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "backward was already run by forward_backward(); use forward() to call backward() yourself"
    )


def refuse_shared_buffers(call: Call) -> None:
    """Raises ConfigError if two stage runs wrote one buffer: each worked on a copy, one would be
    lost."""
    is_shared = any(
        len(stage_run.microbatches) < call.settings.num_microbatches
        for stage_run in call.schedule.stage_runs
    )
    seen: set[tuple[int, str]] = set()
    for owner, name, *_ in call.buffer_updates:
        if (id(owner), name) in seen:
            if is_shared:
                raise ConfigError(
                    f"a {type(owner).__name__} writes its buffer {name!r} in a stage that the plan "
                    "stage runs in shares, "
                    "none of which sees what the others wrote; list each stage once in execute_plan"
                )
            raise ConfigError(
                f"a {type(owner).__name__} is used in more than one layer and writes its buffer "
                f"{name!r}; give each "
                "layer a module of its own"
            )
        seen.add((id(owner), name))


def write_buffers(call: Call) -> None:
    """Buffers and attributes that forwards changed go to their owners, now that the call has
    succeeded."""
    for module, name, value in call.attribute_updates:
        module.__dict__[name] = value
    for owner, name, value, source, ready in call.buffer_updates:
        ready.wait()
        original = owner._buffers.get(name)
        if value is None:
            owner._buffers[name] = None
            continue
        source.lend_to_caller(value)
        with torch.no_grad():
            if (
                original is not None
                and original.shape == value.shape
                and original.dtype == value.dtype
            ):
                original.copy_(value)
            else:
                owner._buffers[name] = value.detach().to("cpu", copy=True)
