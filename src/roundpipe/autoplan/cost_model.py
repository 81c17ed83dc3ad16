"""A model in numbers before anything was measured: what planning begins with."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import torch
from torch import nn

from ..params.dtypes import GradientRules
from ..params.working import LayerParameters, ParameterStore
from ..plan.costs import LayerCosts

# Guesses that only have to be right relative to each other: tokens in a microbatch, matmul rate,
# copy rate, what any layer costs, and the host's memory bandwidth. 16-bit weights then take as long
# to go up over PCIe gen4 as to run.
TOKENS_GUESSED = 8192
_FLOPS, _BYTES_PER_MS, _LEAST_MS, _HOST_BYTES_PER_MS = 2e14, 25e6, 0.01, 50e6
# An update reads a 16-bit gradient and writes 16-bit weights, and reads and writes fp32 masters and
# two moments.
_UPDATE_BYTES = 28


class LayerSize(NamedTuple):
    """Says what is known of a layer before it runs. ``matmul_elements``: its weights that every
    token is multiplied by; ``itemsize``: bytes of an element of the largest of these."""

    weight_bytes: int
    upload_bytes: int
    gradient_bytes: int
    offloaded_bytes: int
    matmul_elements: int
    trained_elements: int
    itemsize: int = 2


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
            itemsize=max(multiplied, key=torch.Tensor.numel).itemsize if multiplied else 2,
        )


def _embeddings(layer: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in layer.modules() if isinstance(module, nn.Embedding)]


def estimate_costs(layers: Sequence[LayerSize], first_trained: int) -> LayerCosts:
    """Costs from sizes: 2 operations per weight and token forward, as many again for each gradient
    of the backward."""
    forward = [
        _LEAST_MS + 2e3 * TOKENS_GUESSED * layer.matmul_elements / _FLOPS for layer in layers
    ]
    gradients = [
        (index >= first_trained) * (1 + (layer.trained_elements > 0))
        for index, layer in enumerate(layers)
    ]
    return LayerCosts(
        forward=tuple(forward),
        backward=tuple(ms * count for ms, count in zip(forward, gradients, strict=True)),
        weight_bytes=tuple(layer.weight_bytes for layer in layers),
        upload_bytes=tuple(layer.upload_bytes for layer in layers),
        gradient_bytes=tuple(layer.gradient_bytes for layer in layers),
        offloaded_bytes=tuple(layer.offloaded_bytes for layer in layers),
        up_ms_per_byte=1 / _BYTES_PER_MS,
        down_ms_per_byte=1 / _BYTES_PER_MS,
    )


def estimate_update_ms(layers: Sequence[LayerSize]) -> float:
    """An update, from its bytes."""
    return sum(layer.trained_elements for layer in layers) * _UPDATE_BYTES / _HOST_BYTES_PER_MS


def with_guessed_graphs(
    costs: LayerCosts,
    layers: Sequence[LayerSize],
    tokens: int = 0,
    *,
    is_cut: bool = False,
    has_room: bool = True,
) -> LayerCosts:
    """Activations of each layer of which nothing was measured, as if it were a transformer block
    with as many weights; for a first call to be careful.

    34 bytes per token and unit of width, as counted by Korthikanti et al. 2022 (without attention
    scores, which fused kernels do not keep); 12 weights per unit of width squared. As much more as
    that was too little for those measured. Of a block that ``is_cut``, whose MLP and norms run for
    some tokens at a time, 11 bytes inside of attention and the inputs of four modules.

    Args:
        tokens: of the largest microbatch, 0 if that is not known; a guess that is too small is
            worse than one that is too large.
        has_room: inputs may wait on the host. If not, they are guessed closely.
    """
    widths = [sqrt(layer.matmul_elements / 12) for layer in layers]
    token_widths = [max(tokens, TOKENS_GUESSED) * width for width in widths]
    inputs = [2 * each for each in token_widths]
    if tokens and not has_room:
        inputs = [
            layer.itemsize * tokens * width for layer, width in zip(layers, widths, strict=True)
        ]

    def filled(measured: Sequence[int], wanted: Sequence[float]) -> tuple[int, ...]:
        guesses = list(map(int, wanted))
        both = [
            (num_bytes, guess)
            for num_bytes, guess in zip(measured, guesses, strict=True)
            if num_bytes and guess
        ]
        scale = max((num_bytes / guess for num_bytes, guess in both), default=1.0)
        return tuple(
            num_bytes or int(scale * guess)
            for num_bytes, guess in zip(measured, guesses, strict=True)
        )

    return replace(
        costs,
        saved_bytes=filled(costs.saved_bytes, [(19 if is_cut else 34) * w for w in token_widths]),
        passing_bytes=filled(costs.passing_bytes, [(2 if is_cut else 8) * w for w in token_widths]),
        input_bytes=filled(costs.input_bytes, inputs),
    )
