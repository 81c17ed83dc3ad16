"""The optimizer's own copies: masters are made on first use, follow loaded weights, and are published."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .gradients import GradientRules, GradientWindow
from .store import LayerParameters, ParameterStore


class Masters:
    """One master per trainable parameter, tied weights once.

    Owned by the optimizer thread while a step runs; the caller reads them only in an optimizer context, which waits.
    """

    def __init__(self, store: ParameterStore, rules: GradientRules) -> None:
        self._store = store
        self._rules = rules
        self._masters: dict[int, nn.Parameter] = {}
        self._is_ahead: set[int] = set()

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a trainable parameter, made from its working copy on first use."""
        master = self._masters.get(id(parameter))
        if master is None:
            dtype = self._rules.master(parameter)
            master = nn.Parameter(parameter.detach().to(dtype, copy=True, memory_format=torch.contiguous_format))
            self._masters[id(parameter)] = master
        return master

    def existing(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of working parameter and master."""
        for parameter in self._store.parameters:
            if id(parameter) in self._masters:
                yield parameter, self._masters[id(parameter)]

    def give_gradients(self, window: GradientWindow) -> None:
        """Sets every master's ``.grad`` in the master's dtype, None where no gradient arrived.

        Raises:
            ConfigError: a gradient arrived for a parameter that no optimizer can have, since it has no master yet.
        """
        handed_out = bool(self._masters)
        for parameter in self._store.parameters:
            if not parameter.requires_grad:
                continue
            gradient = window.gradient(parameter, self._rules.master(parameter))
            if handed_out and gradient is not None and id(parameter) not in self._masters:
                raise ConfigError(
                    f"parameter {self._store.name_of(parameter)!r} became trainable after the optimizer was made and "
                    "would get no update; make the optimizer again over optim_parameters()"
                )
            self.of(parameter).grad = gradient

    def take_gradients(self) -> None:
        for _, master in self.existing():
            master.grad = None

    def mark_ahead(self) -> None:
        """Masters were (or may have been) updated: working copies are behind until published."""
        self._is_ahead = set(self._masters)

    def publish(self, layer: LayerParameters) -> None:
        """Writes the layer's masters into its working copies. No upload of them may be in flight."""
        with torch.no_grad():
            for use in layer.uses:
                if id(use.parameter) in self._is_ahead:
                    self._is_ahead.discard(id(use.parameter))
                    use.parameter.data.copy_(self._masters[id(use.parameter)])

    def follow(self, parameter: nn.Parameter, value: torch.Tensor | None = None) -> None:
        """Makes the master equal to ``value`` (default: the working copy), at the value's precision."""
        master = self._masters.get(id(parameter))
        if master is not None:
            with torch.no_grad():
                master.copy_(parameter.data if value is None else value)
            self._is_ahead.discard(id(parameter))

    def statistics(self) -> dict[str, Any]:
        return {"masters": len(self._masters), "master_bytes": sum(m.nbytes for m in self._masters.values())}
