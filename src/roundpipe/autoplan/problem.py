"""What a plan has to solve, by what is known of the model, the machine and the calls until now."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..device import Device
from ..params.dtypes import GradientRules
from ..params.working import ParameterStore
from ..plan.costs import LayerCosts, Workload
from .cost_model import CostEstimate, CostModel, with_guessed_graphs
from .measurements import Measurements, ShapeMeasurements
from .memory_limit import MemoryLimit
from .planned import PlanKey

# What of that plans may fill after so many times that memory did not suffice, because what layers
# need inside is not known. With nothing left it is one layer at a time.
_AFTER_SHORTAGES = (1.0, 0.8, 0.5, 0.25, 0.0)
MOST_SHORTAGES = len(_AFTER_SHORTAGES) - 1


class Problems:
    """Everything that an engine knows and plans are made from. Used by the caller's thread; the
    measurements are recorded by workers.

    Args: as of the `Planner`.
    """

    def __init__(
        self,
        store: ParameterStore,
        devices: Sequence[Device],
        layers: Sequence[nn.Module],
        rules: GradientRules | None,
        held_bytes: Callable[[], Mapping[str, int] | None],
        *,
        keeps_layers: bool,
    ) -> None:
        self._num_devices = len(devices)
        self.cost_model = CostModel(store, layers, rules or GradientRules(torch.float32, None))
        self.measurements = Measurements()
        self._writes: dict[Hashable, bool] = {}
        self._tokens: dict[Hashable, int] = {}
        self._input_bytes: dict[Hashable, int] = {}
        # Sums over shares are bitwise those of one stage run nowhere; accelerators do not promise
        # that between each other.
        self._may_share = all(device.torch_device.type != "cpu" for device in devices)
        self._keeps_layers = keeps_layers
        self.limit = MemoryLimit(devices, held_bytes)

    def note_inputs(self, plan_key: PlanKey, tokens: int, input_bytes: int) -> None:
        """A call comes whose largest microbatch has so many tokens and bytes."""
        for known, now in ((self._tokens, tokens), (self._input_bytes, input_bytes)):
            known[plan_key.shapes] = max(now, known.get(plan_key.shapes, 0))

    def note_writes(self, plan_key: PlanKey, writes: bool) -> bool:
        """Tells whether forwards of such calls write buffers or attributes. Returns True if they do
        although they had not until now."""
        before = self._writes.get(plan_key.forwards)
        self._writes[plan_key.forwards] = bool(before) or writes
        return writes and before is False

    def writes_nothing(self, plan_key: PlanKey) -> bool:
        """Returns True once calls like it have shown that no forward writes buffers or
        attributes."""
        return self._writes.get(plan_key.forwards) is False

    def measured(self, plan_key: PlanKey) -> ShapeMeasurements:
        """Where workers record the costs of such calls."""
        estimate = self._estimate(plan_key)
        # What trains decides what a backward does, so times measured otherwise say nothing.
        return self.measurements.of(
            (plan_key.shapes, plan_key.trains, estimate.first_trained, plan_key.tokens_at_once),
            estimate.costs,
        )

    def of(self, plan_key: PlanKey, measured: ShapeMeasurements) -> tuple[LayerCosts, Workload]:
        """What a plan for such a call has to solve, by what is known now."""
        estimate, costs = self._estimate(plan_key), measured.costs()
        return costs.by_layer() if plan_key.grain == "layer" else costs, Workload(
            num_devices=self._num_devices,
            num_microbatches=plan_key.num_microbatches,
            overlaps=plan_key.overlaps,
            grain=plan_key.grain,
            first_trained=estimate.first_trained,
            limit_bytes=self._allowed(plan_key, measured),
            may_share=self._shares(plan_key),
            optimizer_ms=measured.rates.update_ms(estimate.update_ms),
            keeps_layers=self._keeps_layers and self.limit.is_known,
        )

    def guessed(
        self,
        plan_key: PlanKey,
        costs: LayerCosts,
        measured: ShapeMeasurements,
        *,
        has_room: bool = True,
    ) -> LayerCosts:
        """``costs`` with guesses in place of activations that nobody has seen yet. ``has_room``:
        inputs may wait on the host."""
        if measured.knows_graphs:
            return costs
        sizes, tokens = self._estimate(plan_key).sizes, self.tokens(plan_key)
        is_cut = plan_key.tokens_at_once > 0
        costs = with_guessed_graphs(costs, sizes, tokens, is_cut=is_cut, has_room=has_room)
        given = self._input_bytes.get(plan_key.shapes, 0) or costs.input_bytes[0]
        return replace(costs, input_bytes=(given, *costs.input_bytes[1:]))

    def tokens(self, plan_key: PlanKey) -> int:
        """The largest microbatch's; 0 where that is not known."""
        return self._tokens.get(plan_key.shapes, 0)

    def most_allowed(
        self, plan_key: PlanKey, measured: ShapeMeasurements, *, blindly: bool = False
    ) -> float:
        """Bytes that a plan may fill beside the caller's inputs and outputs."""
        outputs = measured.output_bytes if plan_key.returns else 0
        return self.limit.for_plans(measured.caller_bytes + outputs, blindly=blindly)

    def known(self, plan_key: PlanKey, measured: ShapeMeasurements) -> Hashable:
        """Changes with everything that could make another plan right."""
        return measured.version, self._shares(plan_key)

    def _allowed(self, plan_key: PlanKey, measured: ShapeMeasurements) -> float:
        """Bytes that a plan may fill, as careful as guesses and shortages ask for."""
        left = _AFTER_SHORTAGES[min(measured.shortages, MOST_SHORTAGES)]
        return self.most_allowed(plan_key, measured, blindly=not measured.knows_graphs) * left

    def _shares(self, plan_key: PlanKey) -> bool:
        """Only once a call has shown that no forward writes anything, because shares do not see
        each other's writes."""
        return self._may_share and self.writes_nothing(plan_key)

    def _estimate(self, plan_key: PlanKey) -> CostEstimate:
        return self.cost_model.of(plan_key.trains, wants_gradients=plan_key.wants_gradients)
