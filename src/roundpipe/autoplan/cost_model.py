"""A model in numbers before anything was measured: what planning begins with."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..params.dtypes import GradientRules
from ..params.working import LayerParameters, ParameterStore
from ..plan.costs import LayerCosts
from .measurements import LayerSize, estimate_costs, estimate_update_ms


def first_trained(store: ParameterStore, *, wants_gradients: bool) -> int:
    """The shallowest layer that needs a backward: the first of all if inputs want gradients."""
    return 0 if wants_gradients else store.first_trainable_layer()


class CostEstimate(NamedTuple):
    """The model as it trains now. ``first_trained``: nothing below that layer needs a backward."""

    sizes: list[LayerSize]
    first_trained: int
    costs: LayerCosts
    update_ms: float


class CostModel:
    """One for each choice of what trains, with and without a backward that goes on to the inputs.

    Args:
        layers: the modules, to tell embeddings (looked up) from weights that are multiplied.
        rules: what gradients are summed in.
    """

    def __init__(
        self, store: ParameterStore, layers: Sequence[nn.Module], rules: GradientRules
    ) -> None:
        self._store = store
        self._looked_up = {id(weight) for layer in layers for weight in _embeddings(layer)}
        self._rules = rules
        self._made: dict[tuple[tuple[bool, ...], bool], CostEstimate] = {}

    def trains(self) -> tuple[bool, ...]:
        """What does, now."""
        return tuple(
            use.parameter.requires_grad for layer in self._store.layers for use in layer.uses
        )

    def of(self, trains: tuple[bool, ...], *, wants_gradients: bool) -> CostEstimate:
        """When asked for the first time, that has to be what trains now."""
        key = trains, wants_gradients
        if key not in self._made:
            sizes = [self._size(layer) for layer in self._store.layers]
            first = first_trained(self._store, wants_gradients=wants_gradients)
            self._made[key] = CostEstimate(
                sizes, first, estimate_costs(sizes, first), estimate_update_ms(sizes)
            )
        return self._made[key]

    def _size(self, layer: LayerParameters) -> LayerSize:
        multiplied = [
            use.parameter for use in layer.uses if id(use.parameter) not in self._looked_up
        ]
        trained = [use.parameter for use in layer.trainable]
        dtypes = [(parameter.numel(), self._rules.dtypes(parameter)) for parameter in trained]
        return LayerSize(
            weight_bytes=layer.num_bytes,
            upload_bytes=layer.image_bytes,
            gradient_bytes=sum(count * summed.itemsize for count, (summed, _) in dtypes),
            offloaded_bytes=sum(count * offloaded.itemsize for count, (_, offloaded) in dtypes),
            matmul_elements=sum(parameter.numel() for parameter in multiplied),
            trained_elements=sum(parameter.numel() for parameter in trained),
        )


def _embeddings(layer: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in layer.modules() if isinstance(module, nn.Embedding)]
