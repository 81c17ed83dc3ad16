"""What forwards have changed of their modules: kept for the user's own modules, or refused because
it would be lost."""

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..device import Device
from ..errors import ConfigError
from ..layers.buffers import BufferCache
from ..layers.contents import is_container, with_inner
from ..layers.replica import attributes_set, is_plain
from ..params.working import ParameterStore
from .call import AttributeUpdate, BufferUpdate, Call
from .stage import Stage


class ModuleChanges:
    """Looks at the replicas of one device. Used by the device's worker."""

    def __init__(self, device: Device, store: ParameterStore, buffers: BufferCache) -> None:
        self._device = device
        self._store = store
        self._buffers = buffers
        self._told: set[tuple[type, str]] = set()
        # Parameters, by id, that a forward has written at least once.
        self._compared: set[int] = set()

    def note(self, call: Call, stage: Stage) -> None:
        """A stage run's forwards are over; ``call`` gets what they have changed."""
        stage.untouched.update(
            index for index, replica in stage.replicas.items() if replica.is_as_made
        )
        for index, residents in stage.residents.items():
            written = residents.written()
            if written:
                self._store.written.add(index)
            if written or index not in stage.untouched:
                self._refuse_lost_parameters(stage, index, written)
        call.buffer_updates.extend(self._buffer_updates(stage))
        call.attribute_updates.extend(self._attribute_updates(call, stage))

    def _buffer_updates(self, stage: Stage) -> list[BufferUpdate]:
        updates = []
        ready = self._device.compute.record()
        for owner, replica in chain.from_iterable(
            replica.with_buffers if index in stage.untouched else replica.pairs
            for index, replica in stage.replicas.items()
        ):
            names = [
                name
                for name, value in replica._buffers.items()
                if self._is_replaced(owner, name, value)
            ]
            for name, value in replica._buffers.items():
                # If a module wrote one buffer openly, it may have written the others silently.
                if name in names or self._is_written_silently(
                    owner, name, value, look_again=bool(names)
                ):
                    updates.append(BufferUpdate(owner, name, value, self._device, ready))
        return updates

    def _refuse_lost_parameters(self, stage: Stage, index: int, written: set[int]) -> None:
        """Raises ConfigError for a parameter that a forward has replaced, or whose value it has
        changed: it is in a slot, and lost there.

        Frozen ones are compared once, because adapters write to a parameter what it already is, in
        every forward. So do embeddings that limit norms, but not for good.
        """
        own = stage.residents[index].parameters
        for owner, replica in stage.replicas[index].pairs:
            for name, original in owner._parameters.copy().items():
                resident = own.get(id(original))
                if original is None or resident is None:
                    continue
                if replica._parameters.get(name) is not resident:
                    raise _lost(owner, name, "replaces", is_trained=resident.requires_grad)
                if id(original) in written and self._has_changed(
                    stage, index, owner, original, resident
                ):
                    raise _lost(owner, name, "writes to", is_trained=resident.requires_grad)

    def _has_changed(
        self,
        stage: Stage,
        index: int,
        owner: nn.Module,
        original: torch.Tensor,
        resident: nn.Parameter,
    ) -> bool:
        is_known = id(original) in self._compared and not resident.requires_grad
        if is_known and getattr(owner, "max_norm", None) is None:
            return False
        self._compared.add(id(original))
        then = self._store.working(self._store.uses[id(original)][0], stage.weights.version)
        is_in_slot = not stage.uploaded[index].is_on_device
        return not (is_in_slot and torch.equal(resident.detach().cpu(), then))

    def _is_replaced(self, owner: nn.Module, name: str, value: torch.Tensor | None) -> bool:
        return not self._buffers.is_placed(owner._buffers.get(name), value)

    def _is_written_silently(
        self, owner: nn.Module, name: str, value: torch.Tensor | None, *, look_again: bool
    ) -> bool:
        original = owner._buffers.get(name)
        if original is None or value is None:
            return False
        return self._buffers.is_written_silently(
            original, value, owner.training, look_again=look_again
        )

    def _attribute_updates(self, call: Call, stage: Stage) -> Iterator[AttributeUpdate]:
        """Plain attributes. Tensors live on the device and are left there."""
        touched = (
            replica.pairs
            for index, replica in stage.replicas.items()
            if index not in stage.untouched
        )
        for owner, replica in chain.from_iterable(touched):
            for name, value in attributes_set(owner, replica):
                if is_plain(value) or _is_container_of_values(value):
                    yield AttributeUpdate(owner, name, value)
                elif isinstance(value, torch.Tensor) and name in owner.__dict__:
                    self._tell_if_lost(call, owner, name, value)

    def _tell_if_lost(self, call: Call, owner: nn.Module, name: str, value: torch.Tensor) -> None:
        key, theirs = (type(owner), name), owner.__dict__[name]
        if isinstance(theirs, torch.Tensor) and self._buffers.is_placed(theirs, value):
            return
        call.lost_attributes.append((owner, name))
        if key not in self._told:
            self._told.add(key)
            warnings.warn(
                f"{type(owner).__name__}.forward sets the tensor attribute {name!r}, which the "
                "next call will not see: tensors stay on the device that made them. Register it "
                "with register_buffer if it is to be kept.",
                stacklevel=2,
            )


def _is_container_of_values(value: Any) -> bool:
    """Whether it is a list or the like that a forward has made. Those that a replica was given
    copies of have modules or tensors in them, which are of the device."""
    return is_container(value) and not with_inner([value]).has((nn.Module, torch.Tensor))


def _lost(owner: nn.Module, name: str, what: str, *, is_trained: bool) -> ConfigError:
    remedy = "Register it with register_buffer"
    if is_trained:
        remedy = "Change it between steps, after synchronize(), or its master in step_fn"
    if getattr(owner, "max_norm", None) is not None:
        remedy = f"Set max_norm=None. {remedy}" if is_trained else "Set max_norm=None"
    return ConfigError(
        f"{type(owner).__name__}.forward {what} its {'trained' if is_trained else 'frozen'} "
        f"parameter {name!r}, which would be lost: weights on a device are copies. {remedy}"
    )


class WrittenInShares(ConfigError):
    """A forward has written state in a stage whose microbatches several stage runs had between
    them."""


def refuse_shared_writes(call: Call) -> None:
    """Raises ConfigError if stage runs wrote what others should have seen: each worked on a copy,
    and one would be lost."""
    is_shared = any(
        len(stage_run.microbatches) < call.asked.num_microbatches
        for stage_run in call.schedule.stage_runs
    )
    buffers = [(owner, name, "buffer") for owner, name, *_ in call.buffer_updates]
    attributes = [(owner, name, "attribute") for owner, name, _ in call.attribute_updates]
    for owner, name, kind in [*buffers, *attributes] if is_shared else ():
        raise WrittenInShares(
            f"a {type(owner).__name__} writes its {kind} {name!r} in a stage that the plan runs in "
            "shares, none of which sees what the others wrote; list each stage once in execute_plan"
        )
    seen: set[tuple[int, str]] = set()
    for owner, name, _ in buffers:
        if (id(owner), name) in seen:
            raise ConfigError(
                f"a {type(owner).__name__} is used in more than one layer and writes its buffer "
                f"{name!r}; give each layer a module of its own"
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
