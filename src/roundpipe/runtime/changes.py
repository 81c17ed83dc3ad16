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
        # Frozen parameters, by id, that a forward has written at least once.
        self._compared: set[int] = set()

    def note(self, call: Call, stage: Stage) -> None:
        """A stage run's forwards are over; ``call`` gets what they have changed."""
        stage.untouched.update(
            index for index, replica in stage.replicas.items() if replica.is_as_made
        )
        self._store.written.update(
            index for index, residents in stage.residents.items() if residents.is_one_written
        )
        call.buffer_updates.extend(self._buffer_updates(stage))
        call.attribute_updates.extend(self._attribute_updates(call, stage))

    def _buffer_updates(self, stage: Stage) -> list[BufferUpdate]:
        updates = []
        ready = self._device.compute.record()
        written = {
            index for index, residents in stage.residents.items() if residents.is_frozen_one_written
        }
        for owner, replica in chain.from_iterable(
            replica.with_buffers if index in stage.untouched - written else replica.pairs
            for index, replica in stage.replicas.items()
        ):
            self._refuse_written_parameters(owner, replica)
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

    def _refuse_written_parameters(self, owner: nn.Module, replica: nn.Module) -> None:
        """Raises ConfigError for a frozen parameter whose value a forward has changed: it is in a
        slot, and lost there.

        Compared once, because adapters write to a parameter what it already is, in every forward.
        """
        for name, resident in replica._parameters.items():
            original = owner._parameters.get(name)
            is_written = (
                resident is not None and resident._version > 0 and not resident.requires_grad
            )
            is_known = id(original) in self._store.stepped or id(original) in self._compared
            if resident is None or original is None or not is_written or is_known:
                continue
            self._compared.add(id(original))
            if not torch.equal(resident.detach().cpu(), original.detach()):
                raise ConfigError(
                    f"{type(owner).__name__}.forward writes to its frozen parameter {name!r}, "
                    "which would be lost: "
                    "weights on a device are copies. Register it with register_buffer"
                )

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
