"""What plans leave of a device: slots that layers stay in between stage runs, and device states for
their optimizer state."""

from collections.abc import Callable, Hashable, Sequence
from itertools import chain

from ..params.placement.device_state import DeviceStates
from ..params.working import ParameterStore
from ..plan.actions import Passes
from ..plan.costs import StageSums
from ..plan.kept_layers import resident_layers
from ..plan.memory import predicted_peak
from ..plan.schedule import group_of
from .planner import Planned, Planner


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
        frozen = [layer for layer in self._store.layers if len(layer.trainable) < len(layer.uses)]
        kept = sum(layer.num_bytes for layer in frozen)
        return max(planned.needs.allowed - planned.needs.most - kept, 0.0)

    def slot_limit(self, planned: Planned) -> float:
        """What slots may take of a device, a call's own among them; 0 where nothing is known of its
        memory."""
        if not self._planner.limit.is_known:
            return 0.0
        needs = planned.needs
        return needs.allowed - needs.most + needs.slots - self._device_states.num_bytes

    def resident_layers(self, planned: Planned, rounds: Sequence[Passes]) -> frozenset[int]:
        """The layers that stay on devices between the stage runs of ``rounds`` (a call's, or its
        forward's and backward's), and for the next call, beside the device states there are."""
        taken = self._device_states.num_bytes
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
        stage_runs = list(
            chain.from_iterable(rounds)
        )  # together, because a backward finds inputs that its forward kept

        def fits(kept: frozenset[int]) -> bool:
            return (
                predicted_peak(stage_runs, totals, workload, planned.spilled, kept).total + taken
                <= workload.limit_bytes
            )

        return fits
