"""A layer as one visit sees it: the user's modules, shallowly copied, with parameters and buffers on the device.

Each visit makes its own replica, because hooks, adapters and train/eval flags of the user's modules may change between
calls and because two devices may run the same layer at the same time. Replicas share everything but tensors.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def replicate(module: nn.Module, parameters: dict[int, nn.Parameter], place: TensorMap) -> nn.Module:
    """Copies ``module``'s structure.

    Args:
        parameters: resident parameters by the ``id`` of the working parameter.
        place: gives the device's copy of a buffer or of a tensor held as a plain attribute.
    """
    return _Replication(parameters, place).of(module)


class _Replication:
    def __init__(self, parameters: dict[int, nn.Parameter], place: TensorMap) -> None:
        self._parameters = parameters
        self._place = place
        self._done: dict[int, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._done:
            return self._done[id(module)]
        replica = module.__new__(type(module))
        self._done[id(module)] = replica
        state = {name: self._attribute(module, replica, value) for name, value in module.__dict__.items()}
        state["_parameters"] = {name: self._tensor(p) for name, p in module._parameters.items()}
        state["_buffers"] = {name: self._tensor(b) for name, b in module._buffers.items()}
        state["_modules"] = {name: child and self.of(child) for name, child in module._modules.items()}
        replica.__dict__ = state
        return replica

    def _tensor(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        resident = self._parameters.get(id(tensor))
        return resident if resident is not None else self._place(tensor)

    def _attribute(self, module: nn.Module, replica: nn.Module, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return types.MethodType(value.__func__, replica)
        # Lists of parameters (recurrent modules keep one) must name the resident copies too.
        if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(self._tensor(item) if isinstance(item, torch.Tensor) else item for item in value)
        return value


def buffers_with_owners(module: nn.Module, replica: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
    """Every buffer of ``replica`` beside the module of the user's that owns the original."""
    found: list[tuple[nn.Module, str, torch.Tensor | None]] = []
    seen: set[int] = set()

    def walk(original: nn.Module, copy: nn.Module) -> None:
        if id(original) in seen:
            return
        seen.add(id(original))
        found.extend((original, name, buffer) for name, buffer in copy._buffers.items())
        for name, child in original._modules.items():
            if child is not None:
                walk(child, copy._modules[name])  # type: ignore[arg-type]

    walk(module, replica)
    return found
