"""What plans leave of a device: slots that layers stay in between stage runs, and device states for
their optimizer state."""

from collections.abc import Callable, Hashable, Sequence
from itertools import chain

from ..params.placement.device_states import DeviceStates
from ..params.working import ParameterStore
from ..plan.actions import Passes
from ..plan.costs import LayerCosts, StageSums
from ..plan.kept_layers import graphs_kept_from, resident_layers
from ..plan.memory import predicted_peak
from ..plan.schedule import group_of
from .planned import Planned
from .planner import Planner

# Of free memory, what kept graphs may fill: allocators lose some of it between many tensors.
_OF_FREE = 0.9


class FreeMemory:
    """Of one engine, which has the devices for itself. Used by the caller's thread."""

    def __init__(
        self, planner: Planner, store: ParameterStore, device_states: DeviceStates
    ) -> None:
        self._planner = planner
        self._store = store
        self._device_states = device_states
        self._resident: dict[Hashable, tuple[Hashable, frozenset[int]]] = {}

    def let_device_states(self, planned: Planned) -> None:
        """A call comes. Some device states may have to be given up for it."""
        self._device_states.let(
            self.left_bytes(planned),
            is_sure=planned.is_sure,
            is_worth_it=self._device_states.num_bytes > 0
            or not self._planner.hides_update(planned),
        )

    def left_bytes(self, planned: Planned) -> float:
        """What a call leaves of a device, frozen weights staying there; 0 where nothing is known of
        its memory."""
        if not self._planner.limit.is_known:
            return 0.0
        needs = planned.needs
        # Beside the call, or what the caller does between a forward and its backward.
        taken = max(needs.most, needs.kept + needs.slots + planned.measured.between_bytes)
        return max(needs.allowed - taken - self._frozen_bytes(), 0.0)

    def graphs_kept_from(self, planned: Planned, backward: Passes) -> tuple[int, int]:
        """The first layer whose graphs stay from a forward to its backward, and the bytes that this
        takes of a device. See [Note: kept graphs].

        Device states come first, with the first updates, because they save more time for a byte.
        Before forwards have shown that they write nothing no graph stays either: it may have kept
        what the next microbatch writes to.
        """
        costs, workload = self._planner.problem_of(planned)
        may_grow = self._device_states.can_be and not self._planner.rates.is_warm
        if may_grow or not self._planner.writes_nothing(planned) or workload.grain == "layer":
            return costs.num_layers, 0
        # Weights with a device state are there anyway, and room is left for frozen ones.
        weights = [
            0 if layer.layer in self._store.device_states or layer.has_frozen else layer.num_bytes
            for layer in self._store.layers
        ]
        stages = [layers for _, layers in backward]
        free_bytes = self._free_for_graphs(planned, costs)
        return graphs_kept_from(stages, costs, workload, weights, free_bytes)

    def _free_for_graphs(self, planned: Planned, costs: LayerCosts) -> float:
        """Bytes of each device; 0 where nothing is known of its memory."""
        if not self._planner.limit.is_known or not planned.is_sure:
            return 0.0
        needs, frozen = planned.needs, self._frozen_bytes()
        # The plan's own graphs are made when those that were kept are gone.
        in_backward = needs.most - needs.slots - needs.graph + max(costs.passing_bytes)
        between = needs.kept + planned.measured.between_bytes
        # Where every layer stays, its slot is the one that stage runs use.
        all_stay = all(layer.has_frozen or not layer.uses for layer in self._store.layers)
        weights = max(needs.slots, frozen) if all_stay else needs.slots + frozen
        left = needs.allowed - weights - max(in_backward, between) - self._device_states.num_bytes
        return _OF_FREE * max(left, 0.0)

    def _frozen_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self._store.layers if layer.has_frozen)

    def slot_limit(self, planned: Planned) -> float:
        """What slots may take of a device, a call's own among them; 0 where nothing is known of its
        memory."""
        if not self._planner.limit.is_known:
            return 0.0
        needs = planned.needs
        return needs.allowed - needs.most + needs.slots - self._device_states.num_bytes

    def resident_layers(
        self, planned: Planned, rounds: Sequence[Passes], graph_bytes: int = 0
    ) -> frozenset[int]:
        """The layers that stay on devices between the stage runs of ``rounds`` (a call's, or its
        forward's and backward's), and for the next call, beside the device states there are and
        ``graph_bytes`` of kept graphs."""
        taken = self._device_states.num_bytes + graph_bytes
        key = planned.plan_key, tuple(map(tuple, rounds)), taken
        # The last two change after a shortage.
        known = planned.measured.version, planned.needs.allowed, planned.spilled
        before, layers = self._resident.get(key, (None, frozenset()))
        if before != known:
            layers = self._find_resident(planned, rounds, taken)
            self._resident[key] = (known, layers)
        return layers

    def _find_resident(
        self, planned: Planned, rounds: Sequence[Passes], taken: int
    ) -> frozenset[int]:
        weights = [layer.num_bytes for layer in self._store.layers]
        frozen = [
            sum(use.parameter.nbytes for use in layer.uses if not use.parameter.requires_grad)
            for layer in self._store.layers
        ]
        # What is not frozen, so that the gaps between parameters do not count as worth keeping.
        trained = [all_ - kept for all_, kept in zip(weights, frozen, strict=True)]
        return resident_layers(rounds, weights, trained, self._fits(planned, rounds, taken))

    def _fits(
        self, planned: Planned, rounds: Sequence[Passes], taken: int
    ) -> Callable[[frozenset[int]], bool]:
        """Whether there is room for resident layers beside a plan and what is ``taken``."""
        if not self._planner.limit.is_known:
            return lambda _: False
        if not planned.is_sure:  # by the guesses that its plan was made from
            left = planned.needs.allowed - planned.needs.most - taken
            return lambda kept: sum(self._store.layers[layer].num_bytes for layer in kept) <= left
        costs, whole = self._planner.problem_of(planned)
        totals, (_, rounds, workload) = StageSums(costs), group_of(rounds, whole)
        # Together, because a backward finds inputs that its forward kept.
        stage_runs = list(chain.from_iterable(rounds))

        def fits(kept: frozenset[int]) -> bool:
            return (
                predicted_peak(stage_runs, totals, workload, planned.spilled, kept).total + taken
                <= workload.limit_bytes
            )

        return fits
