"""Which plan a call uses: the user's, checked, or one made from the layers' costs and the devices'
memory."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from ..device import Device
from ..errors import PlanError
from ..params.dtypes import GradientRules
from ..params.working import ParameterStore
from ..plan.costs import Grain, LayerCosts, Workload
from ..plan.execute_plan import (
    ModelExecutePlan,
    RunType,
    plan_for,
    plan_peak,
    smallest_plan,
    step_ms,
)
from ..plan.memory import Peak
from .cost_model import CostEstimate, CostModel
from .measurements import Measurements, Rates, ShapeMeasurements, with_guessed_graphs
from .memory_limit import MemoryLimit

# A new plan has to be predicted this much faster, because measurements waver and a new plan starts
# cold.
_WORTH_CHANGING = 0.03
# An update is believed to outlast its round from so many times its length on, because a round takes
# some percent longer than its kernels and copies, which are what is predicted.
_CLEARLY_LONGER = 1.1
# What of that plans may fill after so many times that memory did not suffice, because what layers
# need inside is not known. With nothing left it is one layer at a time.
_AFTER_SHORTAGES = (1.0, 0.8, 0.5, 0.25, 0.0)
MOST_SHORTAGES = len(_AFTER_SHORTAGES) - 1
# Calls of a plan that are timed: not the first, in which things are compiled and allocated, then
# some, then few.
_TIMED_EARLY, _TIMED_EVERY = range(2, 5), 16


class Needs(NamedTuple):
    """Bytes: of inputs ``kept`` on all devices together, of all that is at most on one, of
    ``slots`` and the ``graph`` among that, and what may be there."""

    kept: int
    most: int
    slots: int
    graph: int
    allowed: float


class PlanKey(NamedTuple):
    """Calls that may use one plan: what makes another plan right is another key."""

    run_type: RunType
    num_microbatches: int
    grain: Grain
    shapes: Hashable
    wants_gradients: bool
    overlaps: bool
    trains: tuple[bool, ...]
    modes: tuple[bool, ...]
    chosen: ModelExecutePlan | None
    returns: bool


class Planned(NamedTuple):
    """What a call that was to be as in ``plan_key`` does.

    ``spilled``: the layers whose kept inputs wait on the host. ``needs``: as predicted when the
    plan was looked at last. ``is_timed``: it is one of the few calls that are timed. ``is_sure``:
    needs were predicted from graphs that were measured.
    """

    plan_key: PlanKey
    plan: ModelExecutePlan
    spilled: frozenset[int]
    needs: Needs
    measured: ShapeMeasurements
    is_timed: bool
    is_sure: bool


@dataclass
class _InUse:
    """A plan in use. It is looked at again after 1, 2, 4, ... calls in which measurements changed,
    for a microbatch that is larger than the ``elements`` it was made for, and after a shortage that
    it did not know of.

    ``round_ms``: of a round without its update, as predicted at that version of the measurements.
    """

    plan: ModelExecutePlan
    peak: Peak
    allowed: float
    known: Hashable
    elements: int
    shortages: int
    is_sure: bool
    patience: int = 1
    waited: int = 0
    calls: int = 0
    round_ms: tuple[int, float] | None = None

    @property
    def is_timed(self) -> bool:
        return self.calls in _TIMED_EARLY or self.calls % _TIMED_EVERY == 0


class Planner:
    """Makes an engine's plans and keeps them. Used by the caller's thread.

    Args:
        layers: the modules. Their modes tell calls apart, and weights of embeddings are looked up,
            not multiplied.
        rules: what gradients are summed in; default fp32.
        held_bytes: by device, what the engine holds there while it does nothing; None while it does
            something.
        keeps_layers: whether layers may stay on devices between stage runs: not where other engines
            plan with that memory.
    """

    def __init__(
        self,
        store: ParameterStore,
        devices: Sequence[Device],
        *,
        layers: Sequence[nn.Module] = (),
        rules: GradientRules | None = None,
        held_bytes: Callable[[], Mapping[str, int] | None] = dict,
        keeps_layers: bool = True,
    ) -> None:
        self._store = store
        self._num_devices = len(devices)
        self._layers = layers
        self._cost_model = CostModel(store, layers, rules or GradientRules(torch.float32, None))
        self._measurements = Measurements()
        self._in_use: dict[PlanKey, _InUse] = {}
        self._writes: dict[Hashable, bool] = {}
        self._tokens: dict[Hashable, int] = {}
        self._input_bytes: dict[Hashable, int] = {}
        self._latest: PlanKey | None = None
        self._overlaps = True
        # Sums over shares are bitwise those of one stage run nowhere; accelerators do not promise
        # that between each other.
        self._may_share = all(device.torch_device.type != "cpu" for device in devices)
        self._keeps_layers = keeps_layers
        self.limit = MemoryLimit(devices, held_bytes)

    # What happens, told by the engine.

    def note_step(self, is_async: bool) -> None:
        """Tells how rounds follow each other: an async step lets the next one begin beside the
        last."""
        self._overlaps = is_async

    @property
    def rates(self) -> Rates:
        """Where updates are timed."""
        return self._measurements.rates

    def note_writes(self, writes: bool) -> None:
        """Whether forwards of the latest call wrote buffers or attributes: then a microbatch needs
        the one before."""
        if self._latest is not None:
            key = self._latest.run_type, self._latest.modes
            if writes and self._writes.get(key) is False:
                # Because plans made until now may run stages in shares.
                self._in_use = {
                    plan_key: in_use
                    for plan_key, in_use in self._in_use.items()
                    if (plan_key.run_type, plan_key.modes) != key
                }
            self._writes[key] = self._writes.get(key, False) or writes

    def writes_nothing(self, planned: Planned) -> bool:
        """Returns True once calls like it have shown that no forward writes buffers or
        attributes."""
        key = planned.plan_key
        return self._writes.get((key.run_type, key.modes)) is False

    def note_outputs(self, num_bytes: int) -> None:
        """Bytes that all outputs of the latest call took together."""
        if self._latest is not None:
            self._measured(self._latest).record_output_bytes(num_bytes)

    @property
    def shortages(self) -> int:
        """How often calls have found a device's memory full."""
        return self._measurements.shortages

    # Plans.

    def plan(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        *,
        shapes: Hashable = None,
        grain: Grain = "stage",
        elements: int = 0,
        tokens: int = 0,
        input_bytes: int = 0,
        caller_bytes: int = 0,
        wants_gradients: bool = False,
        returns: bool = False,
    ) -> Planned:
        """The plan for a call.

        Args:
            shapes: what tells calls apart whose microbatches are planned for by themselves; default
                the latest call's.
            elements: of the largest microbatch.
            tokens: about how many of them are tokens, if that is known.
            input_bytes: of the largest microbatch.
            caller_bytes: of inputs that are on devices already, or whose gradients will be.
            wants_gradients: whether the backward goes on to the inputs, whatever trains.
            returns: whether outputs stay on devices until all of them are known.

        Raises:
            PlanError: ``chosen``, the user's plan, does not cover the model, or without one nothing
                fits.
        """
        self._latest = plan_key = self._plan_key(
            run_type,
            num_microbatches,
            chosen,
            grain,
            shapes=shapes,
            wants_gradients=wants_gradients,
            returns=returns,
        )
        self._input_bytes[plan_key.shapes] = max(
            input_bytes, self._input_bytes.get(plan_key.shapes, 0)
        )
        self._tokens[plan_key.shapes] = max(tokens, self._tokens.get(plan_key.shapes, 0))
        measured = self._measured(plan_key)
        measured.grow_to(elements)
        measured.record_caller_bytes(caller_bytes)
        before = self._in_use.get(plan_key)
        if before is not None and (
            before.elements < measured.elements or before.shortages < measured.shortages
        ):
            self._look_again(plan_key, measured)
        in_use = self._of(plan_key)
        in_use.calls += 1
        peak = in_use.peak
        needs = Needs(
            peak.kept, peak.bytes.total, peak.bytes.slots, peak.bytes.graph, in_use.allowed
        )
        return Planned(
            plan_key, in_use.plan, peak.spilled, needs, measured, in_use.is_timed, in_use.is_sure
        )

    def next_plan(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        *,
        grain: Grain = "stage",
    ) -> ModelExecutePlan:
        """What ``plan`` would give for inputs like those of the latest call, without there being a
        call."""
        return self._of(self._plan_key_like_latest(run_type, num_microbatches, chosen, grain)).plan

    def reconsider(self) -> None:
        """Looks for a better plan for the next call like the latest one, if enough was learnt
        since.

        Called while the devices are busy with that call, so that nobody waits for it.
        """
        plan_key = self._latest
        if plan_key is None:
            return
        in_use, measured = self._in_use[plan_key], self._measured(plan_key)
        if in_use.known == self._known(plan_key, measured):
            return
        in_use.waited += 1
        if in_use.waited < in_use.patience:
            return
        in_use.patience *= 2
        self._look_again(plan_key, measured)

    def _look_again(self, plan_key: PlanKey, measured: ShapeMeasurements) -> None:
        """A better plan, if there is one, and in any case what it needs by what is known now."""
        in_use, known = self._in_use[plan_key], self._known(plan_key, measured)
        costs, workload = self._problem(plan_key, measured)
        plan = in_use.plan
        if plan_key.chosen is None:
            was_short = in_use.shortages < measured.shortages
            plan = _better(plan_key.run_type, plan, costs, workload, is_refuted=was_short)
        self._in_use[plan_key] = replace(
            in_use,
            plan=plan,
            peak=plan_peak(plan, plan_key.run_type, costs, workload),
            allowed=workload.limit_bytes,
            known=known,
            elements=measured.elements,
            shortages=measured.shortages,
            is_sure=measured.knows_graphs,
            waited=0,
            calls=in_use.calls if plan == in_use.plan else 0,
            round_ms=None,
        )

    def problem(
        self, run_type: RunType, num_microbatches: int, *, grain: Grain = "stage"
    ) -> tuple[LayerCosts, Workload]:
        """What a plan has to solve, with inputs like those of the latest call."""
        plan_key = self._plan_key_like_latest(run_type, num_microbatches, None, grain)
        return self._problem(plan_key, self._measured(plan_key))

    def problem_of(self, planned: Planned) -> tuple[LayerCosts, Workload]:
        """What a plan for that call has to solve, by what is known now."""
        return self._problem(planned.plan_key, planned.measured)

    def measured(self) -> ShapeMeasurements:
        """Where workers record the costs of microbatches like those of the latest call."""
        return self._measured(self._plan_key_like_latest("fused", 1, None, "stage"))

    def hides_update(self, planned: Planned) -> bool:
        """Whether updates on the host take no longer than the rounds beside which they run, as far
        as is known.

        Device states that are taken once are kept, at twice the memory, so no hiccup of the machine
        may decide this: the shortest of some updates has to be clearly longer than a round.
        """
        plan_key = planned.plan_key
        if not plan_key.overlaps or not planned.is_sure:
            return False
        if not self.rates.knows_update:
            return True
        in_use, version = self._in_use[plan_key], planned.measured.version
        if in_use.round_ms is None or in_use.round_ms[0] != version:
            costs, workload = self.problem_of(planned)
            ms = step_ms(
                planned.plan, plan_key.run_type, costs, replace(workload, optimizer_ms=0.0)
            )
            in_use.round_ms = version, ms
        return self.rates.least_update_ms < _CLEARLY_LONGER * in_use.round_ms[1]

    def _of(self, plan_key: PlanKey) -> _InUse:
        in_use, measured = self._in_use.get(plan_key), self._measured(plan_key)
        if in_use is None or self._is_due(in_use, plan_key, measured):
            self.limit.ask()
        if in_use is None:
            in_use = self._in_use[plan_key] = self._first(plan_key, measured)
        return in_use

    def _plan_key(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        grain: Grain,
        *,
        shapes: Hashable = None,
        wants_gradients: bool = False,
        returns: bool = False,
    ) -> PlanKey:
        if shapes is None and self._latest is not None:
            shapes = self._latest.shapes
        return PlanKey(
            run_type=run_type,
            num_microbatches=num_microbatches,
            grain=grain,
            shapes=shapes,
            wants_gradients=wants_gradients,
            overlaps=self._overlaps and run_type == "fused",
            trains=self._cost_model.trains(),
            modes=tuple(layer.training for layer in self._layers),
            chosen=chosen,
            returns=returns,
        )

    def _plan_key_like_latest(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        grain: Grain,
    ) -> PlanKey:
        wants_gradients = self._latest is not None and self._latest.wants_gradients
        return self._plan_key(
            run_type, num_microbatches, chosen, grain, wants_gradients=wants_gradients
        )

    def _estimate(self, plan_key: PlanKey) -> CostEstimate:
        return self._cost_model.of(plan_key.trains, wants_gradients=plan_key.wants_gradients)

    def _measured(self, plan_key: PlanKey) -> ShapeMeasurements:
        estimate = self._estimate(plan_key)
        # What trains decides what a backward does, so times measured otherwise say nothing.
        return self._measurements.of(
            (plan_key.shapes, plan_key.trains, estimate.first_trained), estimate.costs
        )

    def _problem(
        self, plan_key: PlanKey, measured: ShapeMeasurements
    ) -> tuple[LayerCosts, Workload]:
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

    def _allowed(self, plan_key: PlanKey, measured: ShapeMeasurements) -> float:
        """Bytes that a plan may fill, as careful as guesses and shortages ask for."""
        left = _AFTER_SHORTAGES[min(measured.shortages, len(_AFTER_SHORTAGES) - 1)]
        return self._most_allowed(plan_key, measured, blindly=not measured.knows_graphs) * left

    def _most_allowed(
        self, plan_key: PlanKey, measured: ShapeMeasurements, *, blindly: bool = False
    ) -> float:
        """Beside the caller's inputs and outputs."""
        outputs = measured.output_bytes if plan_key.returns else 0
        return self.limit.for_plans(measured.caller_bytes + outputs, blindly=blindly)

    def _first(self, plan_key: PlanKey, measured: ShapeMeasurements) -> _InUse:
        """Leaves room for activations nobody has seen yet, and after shortages; but no call is
        refused because of a guess."""
        costs, workload = self._problem(plan_key, measured)
        known = costs
        if not measured.knows_graphs:
            costs = with_guessed_graphs(
                costs, self._estimate(plan_key).sizes, self._tokens.get(plan_key.shapes, 0)
            )
            given = self._input_bytes.get(plan_key.shapes, 0)
            costs = replace(
                costs, input_bytes=(given or costs.input_bytes[0], *costs.input_bytes[1:])
            )
        if plan_key.chosen is not None:
            plan = plan_key.chosen.for_run(plan_key.run_type)
            plan.check(plan_key.run_type, len(self._store.layers))
        else:
            try:
                plan = plan_for(plan_key.run_type, costs, workload)
            except PlanError:
                if measured.knows_graphs and not measured.shortages:
                    raise
                workload = replace(workload, limit_bytes=self._most_allowed(plan_key, measured))
                plan_for(
                    plan_key.run_type, known, workload
                )  # raises if what is known does not fit either
                plan = smallest_plan(plan_key.run_type, len(self._store.layers))
        peak = plan_peak(plan, plan_key.run_type, costs, workload)
        return _InUse(
            plan=plan,
            peak=peak,
            allowed=workload.limit_bytes,
            known=self._known(plan_key, measured),
            elements=measured.elements,
            shortages=measured.shortages,
            is_sure=measured.knows_graphs,
        )

    def _shares(self, plan_key: PlanKey) -> bool:
        """Only once a call has shown that no forward writes anything, because shares do not see
        each other's writes."""
        return self._may_share and self._writes.get((plan_key.run_type, plan_key.modes)) is False

    def _known(self, plan_key: PlanKey, measured: ShapeMeasurements) -> Hashable:
        return measured.version, self._shares(plan_key)

    def _is_due(self, in_use: _InUse, plan_key: PlanKey, measured: ShapeMeasurements) -> bool:
        return (
            in_use.known != self._known(plan_key, measured) and in_use.waited + 1 >= in_use.patience
        )


def _better(
    run_type: RunType,
    plan: ModelExecutePlan,
    costs: LayerCosts,
    workload: Workload,
    *,
    is_refuted: bool,
) -> ModelExecutePlan:
    """``plan``, or a new one that is clearly faster or needed because ``plan`` does not fit any
    more.

    Args:
        is_refuted: ``plan`` has run out of memory.
    """
    try:
        new = plan_for(run_type, costs, workload)
    except PlanError:
        # One that has run is no reason to stop, whatever the prediction says.
        return smallest_plan(run_type, costs.num_layers) if is_refuted else plan
    does_fit = plan_peak(plan, run_type, costs, workload).bytes.total <= workload.limit_bytes
    old_ms, new_ms = (step_ms(one, run_type, costs, workload) for one in (plan, new))
    return plan if does_fit and new_ms >= old_ms * (1 - _WORTH_CHANGING) else new
