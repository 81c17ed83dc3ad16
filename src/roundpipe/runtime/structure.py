"""Which modules and parameters something is made of, walked once and compared in no time at every call."""

import operator
from collections.abc import Collection, Iterable

from torch import nn


class Structure:
    """The modules and parameters of ``roots``, each once, as they are now."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = list({id(m): m for root in roots for m in root.modules()}.values())
        own = [list(module._parameters.values()) for module in self.modules]
        self.parameters: list[nn.Parameter] = list({id(p): p for some in own for p in some if p is not None}.values())
        self._parts = [
            (module, list(module._modules.values()), parameters)
            for module, parameters in zip(self.modules, own, strict=True)
        ]
        self._kinds = [(parameter.dtype, parameter.shape) for parameter in self.parameters]

    def has_changed(self) -> bool:
        """Whether modules or parameters were added, removed or replaced since, or parameters cast or resized."""
        return any(
            not (_are(module._modules.values(), children) and _are(module._parameters.values(), parameters))
            for module, children, parameters in self._parts
        ) or any(
            parameter.dtype != dtype or parameter.shape != shape
            for parameter, (dtype, shape) in zip(self.parameters, self._kinds, strict=True)
        )


def _are(now: Collection[object], then: Collection[object]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))
