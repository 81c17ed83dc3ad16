"""The sums of all ranks' gradients: each rank gets those of what it owns.

[Note: sums over ranks] Once in a step all ranks send gradients to their owners, deep layers first:
while the backward still runs of a call that is said to be the step's last one, else in the step's
job. What was sent early counts only if, at the step, each rank's window holds just what it sent.
Else all send once more, from their windows, which keep their memory until that is known. So a call
that fails, or was not the last, takes time and changes nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from ..trace import spans
from .dtypes import GradientRules
from .gradients import OffloadedLayer
from .ranks import Ranks
from .window import GradientWindow, Offloaded
from .working import LayerParameters, ParameterStore


class Arriving(Protocol):
    """A call whose gradients come down layer by layer."""

    def wait_offloaded(self, layer: int) -> Sequence[OffloadedLayer]:
        """Blocks until all gradients of the layer are on the host; raises what keeps them away."""
        ...


class RankSums:
    """Those of one engine. Used by the optimizer thread, on all ranks in the same order."""

    def __init__(self, ranks: Ranks, store: ParameterStore, rules: GradientRules) -> None:
        self._ranks = ranks
        self._store = store
        self._rules = rules
        self._totals: dict[int, Offloaded] | None = None  # of the step to come, once made
        self._is_settled = False  # no rank has sent early, so nobody's can have changed
        self._sent: tuple[GradientWindow, int] | None = None  # what this rank's were made of
        # By the layer whose sending ends their own.
        self._ends: dict[int, list[LayerParameters]] = defaultdict(list)
        for layer in store.layers:
            uses = [store.uses[id(use.parameter)][0].layer for use in layer.uses]
            self._ends[min(uses, default=layer.layer)].append(layer)

    def send_early(self, step: int, window: GradientWindow, call: Arriving) -> bool:
        """Adds up the window and the call, which is still under way and not in it, unless this was
        done for the step already; then returns False. A failure of the call is not raised."""
        if self._ranks.count == 1 or self._totals is not None:
            return False
        self._make(step, window, call)
        return True

    def confirm(self, window: GradientWindow) -> None:
        """The window holds what was sent early, and nothing else."""
        self._sent = window, window.num_changes

    def send(self, step: int, window: GradientWindow) -> None:
        """Adds up the window, to which nothing is added any more, unless something was sent for the
        step already."""
        if self._ranks.count > 1 and self._totals is None:
            self._make(step, window, None)

    def take(self, step: int, window: GradientWindow) -> dict[int, Offloaded] | None:
        """The sums of what this rank owns, by the parameter's id. Gives the window's memory back.
        None for a process that trains alone. With all ranks in the step."""
        if self._ranks.count == 1:
            return None
        if not self._is_settled:
            has_changed = self._sent is None or (
                self._sent[0] is not window or self._sent[1] != window.num_changes
            )
            (again,) = self._ranks.combined([float(has_changed)], torch.maximum, _where(step))
            if again:
                self._make(step, window, None)
            window.release_layers(self._store.layers)
        totals, self._totals, self._sent = self._totals, None, None
        return totals

    def _make(self, step: int, window: GradientWindow, call: Arriving | None) -> None:
        """One that only some have counts as zero in the others."""
        (is_settled,) = self._ranks.combined([float(call is None)], torch.minimum, _where(step))
        self._is_settled = bool(is_settled)
        self._sent = (window, window.num_changes) if call is None else None
        totals = self._totals = {}
        coming: dict[int, Sequence[OffloadedLayer]] = {}
        with self._ranks.exchanging(), spans.span("sum_ranks", step=step):
            for layer in reversed(self._store.layers):
                if call is not None:
                    coming[layer.layer] = _come(call, layer.layer)
                # With the shallowest layer that uses it, when all of its gradient is there.
                parameters = [
                    use.parameter
                    for use in layer.uses
                    if self._store.uses[id(use.parameter)][0] == use
                ]
                own = {id(one): window.offloaded(one, coming) for one in parameters}
                totals |= self._of_layer(parameters, own)
                if self._is_settled:
                    window.release_layers(self._ends[layer.layer])

    def _of_layer(
        self, parameters: Sequence[nn.Parameter], own: Mapping[int, Offloaded | None]
    ) -> Iterator[tuple[int, Offloaded]]:
        dtypes = {
            parameter: torch.promote_types(self._rules.dtypes(parameter).summed, torch.float32)
            for parameter in self._somewhere(parameters, own)
        }
        for flats in self._ranks.flats(dtypes):
            for flat in flats:
                for parameter, part in flat.parts:
                    offloaded = own[id(parameter)]
                    if offloaded is not None:
                        part.copy_(offloaded.total())
            mine = flats[self._ranks.rank]
            heard = {peer: torch.empty_like(mine.tensor) for peer in self._ranks.others}
            self._ranks.exchange({peer: flats[peer].tensor for peer in heard}, heard)
            for one in heard.values():
                mine.tensor.add_(one)
            for parameter, part in mine.parts:
                yield id(parameter), Offloaded((part,), None, part.dtype)

    def _somewhere(
        self, parameters: Sequence[nn.Parameter], own: Mapping[int, Offloaded | None]
    ) -> list[nn.Parameter]:
        """Those of which some rank has a gradient."""
        here = torch.tensor([own[id(one)] is not None for one in parameters], dtype=torch.bool)
        heard = {peer: torch.empty_like(here) for peer in self._ranks.others}
        self._ranks.exchange(dict.fromkeys(heard, here), heard)
        for there in heard.values():
            here = here | there
        return [one for one, is_there in zip(parameters, here.tolist(), strict=True) if is_there]


def _where(step: int) -> str:
    return f"before step {step}, adding up"


def _come(call: Arriving, layer: int) -> Sequence[OffloadedLayer]:
    """Nothing if the call has failed: the others wait for this rank all the same, and hear of it at
    the step."""
    try:
        return call.wait_offloaded(layer)
    except BaseException:  # whoever commits the call raises it
        return ()
