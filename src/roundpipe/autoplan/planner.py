"""Which plan a call uses: the user's, checked, or one made from the layers' costs and the devices'
memory."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf

from torch import nn

from ..device import Device
from ..errors import PlanError
from ..params.dtypes import GradientRules
from ..params.working import ParameterStore
from ..plan.best import better_plan, plan_for, plan_peak, smallest_plan, step_ms, within_host
from ..plan.costs import Grain, LayerCosts, Workload
from ..plan.execute_plan import ModelExecutePlan, RunType
from .cutting import TOKENS_AT_ONCE, Cutting
from .measurements import ShapeMeasurements, Shortages
from .planned import InUse, PlanKey, Planned
from .problem import Problems

# An update is believed to outlast its round from so many times its length on, because a round takes
# some percent longer than its kernels and copies, which are what is predicted.
_CLEARLY_LONGER = 1.1


class Planner:
    """Makes an engine's plans and keeps them. Used by the caller's thread.

    Args:
        layers: the modules. Their modes tell calls apart, and weights of embeddings are looked up,
            not multiplied.
        rules: what gradients are summed in; default fp32.
        held_bytes: by device, what the engine holds there while it does nothing; None while it does
            something.
        input_room: how many bytes kept inputs may take on the host.
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
        input_room: Callable[[], float] = lambda: inf,
        keeps_layers: bool = True,
    ) -> None:
        self._num_layers = len(store.layers)
        self._input_room = input_room
        self._layers = layers
        self._problems = Problems(
            store, devices, layers, rules, held_bytes, keeps_layers=keeps_layers
        )
        self._cutting = Cutting(self._problems, self._num_layers)
        self._in_use: dict[PlanKey, InUse] = {}
        self._latest: PlanKey | None = None
        self._overlaps = True
        self.limit = self._problems.limit
        self.rates = self._problems.measurements.rates

    # What happens, told by the engine.

    def note_step(self, is_async: bool) -> None:
        """Tells how rounds follow each other: an async step lets the next one begin beside the
        last."""
        self._overlaps = is_async

    def note_writes(self, writes: bool) -> None:
        """Whether forwards of the latest call wrote buffers or attributes: then a microbatch needs
        the one before."""
        latest = self._latest
        if latest is not None and self._problems.note_writes(latest, writes):
            # Because plans made until now may run stages in shares.
            self._in_use = {
                plan_key: in_use
                for plan_key, in_use in self._in_use.items()
                if plan_key.forwards != latest.forwards
            }

    def writes_nothing(self, planned: Planned) -> bool:
        """Returns True once calls like it have shown that no forward writes buffers or
        attributes."""
        return self._problems.writes_nothing(planned.plan_key)

    def note_outputs(self, num_bytes: int) -> None:
        """Bytes that all outputs of the latest call took together."""
        if self._latest is not None:
            self._problems.measured(self._latest).record_output_bytes(num_bytes)

    @property
    def shortages(self) -> Shortages:
        """How often calls have found a device's memory full."""
        return self._problems.measurements.shortages

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
        tokens_at_once: int | None = 0,
        can_cut: Callable[[], bool] = lambda: False,
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
            tokens_at_once: how many row-wise modules run for; 0 for all; None where that is decided
                here, if there are any that ``can_cut``.

        Raises:
            PlanError: ``chosen``, the user's plan, does not cover the model, or without one nothing
                fits.
        """
        plan_key = self._plan_key(
            run_type,
            num_microbatches,
            chosen,
            grain,
            shapes=shapes,
            wants_gradients=wants_gradients,
            returns=returns,
            tokens_at_once=tokens_at_once or 0,
        )
        self._problems.note_inputs(plan_key, tokens, input_bytes)
        measured = self._told(plan_key, elements, caller_bytes)
        if tokens_at_once is None and self._cutting.is_needed(
            plan_key, self._in_use.get(plan_key), can_cut
        ):
            plan_key = plan_key._replace(tokens_at_once=TOKENS_AT_ONCE)
            measured = self._told(plan_key, elements, caller_bytes)
        self._latest = plan_key
        before = self._in_use.get(plan_key)
        if before is not None and (
            before.elements < measured.elements or before.shortages < measured.shortages
        ):
            self._look_again(plan_key, measured)
        in_use = self._of(plan_key)
        in_use.calls += 1
        return Planned(
            plan_key=plan_key,
            plan=in_use.plan,
            spilled=in_use.peak.spilled,
            needs=in_use.needs,
            measured=measured,
            is_timed=in_use.is_timed,
            is_sure=in_use.is_sure,
        )

    def _told(self, plan_key: PlanKey, elements: int, caller_bytes: int) -> ShapeMeasurements:
        measured = self._problems.measured(plan_key)
        measured.grow_to(elements)
        measured.record_caller_bytes(caller_bytes)
        return measured

    def next_plan(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        *,
        grain: Grain = "stage",
    ) -> ModelExecutePlan:
        """The plan that inputs like those of the latest call would get, without a call."""
        return self._of(self._plan_key(run_type, num_microbatches, chosen, grain)).plan

    def reconsider(self) -> None:
        """Looks for a better plan for the next call like the latest, if enough was learnt since.

        Called while the devices are busy with that call, so that nobody waits for it.
        """
        plan_key = self._latest
        if plan_key is None:
            return
        in_use, measured = self._in_use[plan_key], self._problems.measured(plan_key)
        if in_use.known == self._problems.known(plan_key, measured):
            return
        in_use.waited += 1
        if in_use.waited < in_use.patience:
            return
        in_use.patience *= 2
        self._look_again(plan_key, measured)

    def _look_again(self, plan_key: PlanKey, measured: ShapeMeasurements) -> None:
        """A better plan, if there is one, and in any case what it needs by what is known now."""
        in_use, known = self._in_use[plan_key], self._problems.known(plan_key, measured)
        costs, workload = self._problems.of(plan_key, measured)
        plan = in_use.plan
        if plan_key.chosen is None:
            was_short = in_use.shortages < measured.shortages
            better = better_plan(plan_key.run_type, plan, costs, workload, is_refuted=was_short)
            plan = within_host(better, plan_key.run_type, costs, workload, self._input_room())
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
        plan_key = self._plan_key(run_type, num_microbatches, grain=grain)
        return self._problems.of(plan_key, self._problems.measured(plan_key))

    def problem_of(self, planned: Planned) -> tuple[LayerCosts, Workload]:
        """What a plan for that call has to solve, by what is known now."""
        return self._problems.of(planned.plan_key, planned.measured)

    def measured(self) -> ShapeMeasurements:
        """Where workers record the costs of microbatches like those of the latest call."""
        return self._problems.measured(self._plan_key("fused", 1))

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

    def _of(self, plan_key: PlanKey) -> InUse:
        in_use, measured = self._in_use.get(plan_key), self._problems.measured(plan_key)
        if in_use is None or in_use.is_due(self._problems.known(plan_key, measured)):
            self.limit.ask()
        if in_use is None:
            in_use = self._in_use[plan_key] = self._first(plan_key, measured)
        return in_use

    def _plan_key(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None = None,
        grain: Grain = "stage",
        *,
        shapes: Hashable = None,
        wants_gradients: bool | None = None,
        returns: bool = False,
        tokens_at_once: int | None = None,
    ) -> PlanKey:
        """``shapes``, ``wants_gradients`` and ``tokens_at_once`` are the latest call's where they
        are None."""
        latest = self._latest
        if latest is not None:
            shapes = latest.shapes if shapes is None else shapes
            wants_gradients = latest.wants_gradients if wants_gradients is None else wants_gradients
            tokens_at_once = latest.tokens_at_once if tokens_at_once is None else tokens_at_once
        return PlanKey(
            run_type=run_type,
            num_microbatches=num_microbatches,
            grain=grain,
            shapes=shapes,
            wants_gradients=bool(wants_gradients),
            overlaps=self._overlaps and run_type == "fused",
            trains=self._problems.cost_model.trains(),
            modes=tuple(layer.training for layer in self._layers),
            chosen=chosen,
            returns=returns,
            tokens_at_once=tokens_at_once or 0,
        )

    def _first(self, plan_key: PlanKey, measured: ShapeMeasurements) -> InUse:
        """Leaves room for activations nobody has seen yet, and after shortages; but no call is
        refused because of a guess."""
        run_type, chosen = plan_key.run_type, plan_key.chosen
        known, workload = self._problems.of(plan_key, measured)
        costs = self._problems.guessed(plan_key, known, measured)
        if chosen is not None:
            plan = chosen.for_run(run_type)
            plan.check(run_type, self._num_layers)
        else:
            try:
                plan = plan_for(run_type, costs, workload)
            except PlanError:
                if measured.knows_graphs and not measured.shortages:
                    raise
                most = self._problems.most_allowed(plan_key, measured)
                workload = replace(workload, limit_bytes=most)
                # Raises if what is known does not fit either.
                plan_for(run_type, known, workload)
                plan = smallest_plan(run_type, self._num_layers)
            room = self._input_room()
            if plan_peak(plan, run_type, costs, workload).waiting > room:
                # What is known of the host goes before what is guessed of a device.
                costs = self._problems.guessed(plan_key, known, measured, has_room=False)
                most = self._problems.most_allowed(plan_key, measured)
                workload = replace(workload, limit_bytes=max(most, workload.limit_bytes))
                plan = within_host(plan, run_type, costs, workload, room)
        return InUse(
            plan=plan,
            peak=plan_peak(plan, run_type, costs, workload),
            allowed=workload.limit_bytes,
            known=self._problems.known(plan_key, measured),
            elements=measured.elements,
            shortages=measured.shortages,
            is_sure=measured.knows_graphs,
        )
