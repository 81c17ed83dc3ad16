"""Which plan a call uses: the user's, checked, or one made from the layers' costs and the devices' memory."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, NamedTuple

import torch
from torch import nn

from .device import Device
from .errors import PlanError
from .params.gradients import GradientRules
from .params.store import LayerParameters, ParameterStore
from .plan.actions import Passes
from .plan.costs import Grain, LayerCosts, Round, StageSums
from .plan.execute_plan import ModelExecutePlan, RunType, plan_for, plan_peak, smallest_plan, step_ms
from .plan.measure import (
    LayerSize,
    Measurements,
    Rates,
    ShapeMeasurements,
    prior_costs,
    prior_update_ms,
    with_guessed_graphs,
)
from .plan.memory import Peak, fitted_peak
from .plan.residency import resident_layers
from .plan.schedule import group_of

# A new plan has to be predicted this much faster, because measurements waver and a new plan starts cold.
_WORTH_CHANGING = 0.03
# What plans may fill of a device: temporaries inside layers take the rest. Less before graphs were measured.
_PLANNED, _PLANNED_BLINDLY = 0.9, 0.5
# A budget this large says that nothing is known of the device's memory.
_UNBOUNDED = 2.0**60
# Calls of a plan that are timed: not the first, in which things are compiled and allocated, then some, then few.
_TIMED_EARLY, _TIMED_EVERY = range(2, 5), 16


class Needs(NamedTuple):
    """Bytes: of inputs ``kept`` on all devices together, of all that is at most on one, and what may be there."""

    kept: int
    most: int
    allowed: float


class Planned(NamedTuple):
    """What a call does.

    ``spilled``: the layers whose kept inputs wait on the host. ``needs``: as predicted when the plan was looked at
    last. ``replaces``: its plan has just replaced another one. ``is_timed``: it is one of the few calls that are timed.
    ``is_sure``: needs were predicted from graphs that were measured.
    """

    plan: ModelExecutePlan
    spilled: frozenset[int]
    needs: Needs
    measured: ShapeMeasurements
    replaces: bool
    is_timed: bool
    is_sure: bool


class _Wish(NamedTuple):
    """Calls that may use one plan: what makes another plan right is another wish."""

    run_type: RunType
    num_microbatches: int
    grain: Grain
    shapes: Hashable
    overlaps: bool
    trains: tuple[bool, ...]
    modes: tuple[bool, ...]
    chosen: ModelExecutePlan | None
    returns: bool


@dataclass
class _InUse:
    """A plan in use. It is looked at again after 1, 2, 4, ... calls in which measurements changed, and for a microbatch
    that is larger than the ``elements`` it was made for."""

    plan: ModelExecutePlan
    peak: Peak
    allowed: float
    known: Hashable
    elements: int
    is_sure: bool
    patience: int = 1
    waited: int = 0
    calls: int = 0
    is_replacement: bool = False

    @property
    def is_timed(self) -> bool:
        return self.calls in _TIMED_EARLY or self.calls % _TIMED_EVERY == 0


class _Profile(NamedTuple):
    """The model as it trains now, before anything was measured."""

    sizes: list[LayerSize]
    first_trained: int
    prior: LayerCosts
    update_ms: float


class Planner:
    """Makes an engine's plans and keeps them. Used by the caller's thread.

    Args:
        layers: the modules, to tell embeddings (looked up) from weights that are multiplied.
        rules: what gradients are summed in; default fp32.
        held_bytes: by device, what the engine holds there while it does nothing; None while it does something.
    """

    def __init__(
        self,
        store: ParameterStore,
        devices: Sequence[Device],
        *,
        layers: Sequence[nn.Module] = (),
        rules: GradientRules | None = None,
        held_bytes: Callable[[], Mapping[str, int] | None] = dict,
    ) -> None:
        self._store = store
        self._devices = devices
        self._layers = layers
        self._looked_up = {id(weight) for layer in layers for weight in _embeddings(layer)}
        self._rules = rules
        self._held_bytes = held_bytes
        self._budget: float | None = None
        self._in_use: dict[_Wish, _InUse] = {}
        self._profiles: dict[tuple[bool, ...], _Profile] = {}
        self._writes: dict[Hashable, bool] = {}
        self._tokens: dict[Hashable, int] = {}
        self._input_bytes: dict[Hashable, int] = {}
        self._latest: _Wish | None = None
        self._resident: dict[Hashable, tuple[int, frozenset[int]]] = {}
        self._overlaps = True
        # Sums over shares are bitwise those of one visit nowhere; accelerators do not promise that between each other.
        self._may_share = all(device.torch_device.type != "cpu" for device in devices)
        self.measurements = Measurements()

    @property
    def num_devices(self) -> int:
        return len(self._devices)

    @property
    def layer_costs(self) -> LayerCosts:
        """Costs before anything was measured."""
        return self._profile(self._trains()).prior

    # What happens, told by the engine.

    def note_step(self, is_async: bool) -> None:
        """Tells how rounds follow each other: an async step lets the next one begin beside the last."""
        self._overlaps = is_async

    @property
    def rates(self) -> Rates:
        """Where updates are timed."""
        return self.measurements.rates

    def note_writes(self, writes: bool) -> None:
        """Whether forwards of the latest call wrote buffers or attributes: then a microbatch needs the one before."""
        if self._latest is not None:
            key = self._latest.run_type, self._latest.modes
            self._writes[key] = self._writes.get(key, False) or writes

    def note_outputs(self, num_bytes: int) -> None:
        """Bytes that all outputs of the latest call took together."""
        if self._latest is not None:
            self._measured(self._latest).record_output_bytes(num_bytes)

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
        returns: bool = False,
    ) -> Planned:
        """The plan for a call.

        Args:
            elements: of the largest microbatch, see `elements_of`.
            tokens: about how many of them are tokens, if that is known; see `tokens_of`.
            input_bytes: of the largest microbatch.
            caller_bytes: of inputs that are on devices already, or whose gradients will be.
            returns: whether outputs stay on devices until all of them are known.

        Raises:
            PlanError: ``chosen``, the user's plan, does not cover the model, or without one nothing fits.
        """
        self._latest = wish = self._wish(run_type, num_microbatches, chosen, shapes, grain, returns)
        self._input_bytes[wish.shapes] = max(input_bytes, self._input_bytes.get(wish.shapes, 0))
        self._tokens[wish.shapes] = max(tokens, self._tokens.get(wish.shapes, 0))
        measured = self._measured(wish)
        measured.grow_to(elements)
        measured.record_caller_bytes(caller_bytes)
        if wish in self._in_use and self._in_use[wish].elements < measured.elements:
            self._look_again(wish, measured)
        in_use = self._of(wish)
        in_use.calls += 1
        replaces = in_use.is_replacement and in_use.calls == 1
        needs = Needs(in_use.peak.kept, in_use.peak.bytes.total, in_use.allowed)
        return Planned(in_use.plan, in_use.peak.spilled, needs, measured, replaces, in_use.is_timed, in_use.is_sure)

    def next_plan(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        *,
        grain: Grain = "stage",
    ) -> ModelExecutePlan:
        """What ``plan`` would give for the shapes of the latest call, without there being a call."""
        return self._of(self._wish(run_type, num_microbatches, chosen, None, grain)).plan

    def reconsider(self) -> None:
        """Looks for a better plan for the next call like the latest one, if enough was learnt since.

        Called while the devices are busy with that call, so that nobody waits for it.
        """
        wish = self._latest
        if wish is None:
            return
        in_use, measured = self._in_use[wish], self._measured(wish)
        if in_use.known == self._known(wish, measured):
            return
        in_use.waited += 1
        if in_use.waited < in_use.patience:
            return
        in_use.patience *= 2
        self._look_again(wish, measured)

    def _look_again(self, wish: _Wish, measured: ShapeMeasurements) -> None:
        """A better plan, if there is one, and in any case what it needs by what is known now."""
        in_use, known = self._in_use[wish], self._known(wish, measured)
        costs, round_ = self._problem(wish, measured)
        plan = in_use.plan if wish.chosen is not None else _better(wish.run_type, in_use.plan, costs, round_)
        self._in_use[wish] = replace(
            in_use,
            peak=plan_peak(plan, wish.run_type, costs, round_),
            allowed=round_.budget_bytes,
            known=known,
            elements=measured.elements,
            is_sure=measured.knows_graphs,
            waited=0,
        )
        if plan != in_use.plan:
            self._in_use[wish] = replace(self._in_use[wish], plan=plan, calls=0, is_replacement=True)

    def problem(
        self,
        run_type: RunType,
        num_microbatches: int,
        shapes: Hashable = None,
        grain: Grain = "stage",
        *,
        returns: bool = False,
    ) -> tuple[LayerCosts, Round]:
        """What a plan has to solve; by default with the shapes of the latest call."""
        wish = self._wish(run_type, num_microbatches, None, shapes, grain, returns)
        if self._budget is None:
            self._ask_budget()
        return self._problem(wish, self._measured(wish))

    def measured(self, shapes: Hashable = None) -> ShapeMeasurements:
        """Where workers record the costs of microbatches with these shapes; by default those of the latest call."""
        return self._measured(self._wish("fused", 1, None, shapes, "stage"))

    def resident_layers(
        self,
        rounds: Sequence[Passes],
        num_microbatches: int,
        *,
        shapes: Hashable = None,
        grain: Grain = "stage",
        taken_bytes: int = 0,
    ) -> frozenset[int]:
        """The layers that stay on devices between the visits of ``rounds`` (a call's, or its forward's and backward's),
        and for the next call. ``taken_bytes``: so much of what plans leave free is in use already."""
        measured = self.measured(shapes)
        shapes = shapes if shapes is not None or self._latest is None else self._latest.shapes
        key = (tuple(map(tuple, rounds)), num_microbatches, grain, shapes, self._trains(), taken_bytes)
        version, layers = self._resident.get(key, (None, frozenset()))
        if version != measured.version:
            costs, whole = self.problem("fused", num_microbatches, shapes, grain, returns=True)
            totals, (_, rounds, round_) = StageSums(costs), group_of(rounds, whole)
            fullest = max(fitted_peak(passes, totals, round_).bytes.total for passes in rounds)
            spare = round_.budget_bytes - fullest - taken_bytes if round_.budget_bytes < _UNBOUNDED else 0
            weights = [layer.num_bytes for layer in self._store.layers]
            # What is not frozen, so that the gaps between parameters do not count as worth keeping.
            frozen = [
                sum(use.parameter.nbytes for use in layer.uses if not use.parameter.requires_grad)
                for layer in self._store.layers
            ]
            trained = [whole - kept for whole, kept in zip(weights, frozen, strict=True)]
            layers = resident_layers(rounds, weights, trained, spare)
            self._resident[key] = (measured.version, layers)
        return layers

    def hides_update(self, planned: Planned) -> bool:
        """Whether updates on the host take no longer than the rounds beside which they run, as far as is known."""
        wish = self._latest
        if wish is None or not wish.overlaps or not planned.is_sure:
            return False
        costs, round_ = self._problem(wish, planned.measured)
        update_ms = round_.optimizer_ms
        alone = step_ms(planned.plan, wish.run_type, costs, replace(round_, optimizer_ms=0.0))
        return not self.rates.knows_update or update_ms < alone

    def spare_bytes(self, planned: Planned) -> float:
        """What a call leaves of a device, frozen weights staying there; 0 where nothing is known of its memory."""
        if planned.needs.allowed >= _UNBOUNDED / 2:
            return 0.0
        frozen = [layer for layer in self._store.layers if len(layer.trainable) < len(layer.uses)]
        kept = sum(layer.num_bytes for layer in frozen)
        return max(planned.needs.allowed - planned.needs.most - kept, 0.0)

    def _of(self, wish: _Wish) -> _InUse:
        in_use, measured = self._in_use.get(wish), self._measured(wish)
        if in_use is None or self._is_due(in_use, wish, measured):
            self._ask_budget()
        if in_use is None:
            in_use = self._in_use[wish] = self._first(wish, measured)
        return in_use

    def _wish(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        shapes: Hashable,
        grain: Grain,
        returns: bool = False,
    ) -> _Wish:
        if shapes is None and self._latest is not None:
            shapes = self._latest.shapes
        modes = tuple(layer.training for layer in self._layers)
        overlaps = self._overlaps and run_type == "fused"
        return _Wish(run_type, num_microbatches, grain, shapes, overlaps, self._trains(), modes, chosen, returns)

    def _trains(self) -> tuple[bool, ...]:
        return tuple(use.parameter.requires_grad for layer in self._store.layers for use in layer.uses)

    def _measured(self, wish: _Wish) -> ShapeMeasurements:
        # What trains decides what a backward does, so times measured otherwise say nothing.
        return self.measurements.of((wish.shapes, wish.trains), self._profile(wish.trains).prior)

    def _profile(self, trains: tuple[bool, ...]) -> _Profile:
        if trains not in self._profiles:
            sizes = [self._size(layer) for layer in self._store.layers]
            first_trained = self._store.first_trainable_layer()
            self._profiles[trains] = _Profile(
                sizes, first_trained, prior_costs(sizes, first_trained), prior_update_ms(sizes)
            )
        return self._profiles[trains]

    def _problem(self, wish: _Wish, measured: ShapeMeasurements) -> tuple[LayerCosts, Round]:
        profile, costs = self._profile(wish.trains), measured.costs()
        share = _PLANNED if measured.knows_graphs else _PLANNED_BLINDLY
        return costs.by_layer() if wish.grain == "layer" else costs, Round(
            num_devices=self.num_devices,
            num_microbatches=wish.num_microbatches,
            overlaps=wish.overlaps,
            grain=wish.grain,
            first_trained=profile.first_trained,
            budget_bytes=self._allowed(share, wish, measured),
            may_share=self._shares(wish),
            optimizer_ms=measured.rates.update_ms(profile.update_ms),
        )

    def _allowed(self, share: float, wish: _Wish, measured: ShapeMeasurements) -> float:
        """Bytes that a plan may fill: the rest is the caller's inputs and outputs, and temporaries inside layers."""
        assert self._budget is not None
        outputs = measured.output_bytes if wish.returns else 0
        return max(self._budget * share - measured.caller_bytes - outputs, 0.0)

    def _first(self, wish: _Wish, measured: ShapeMeasurements) -> _InUse:
        """Leaves room for activations nobody has seen yet; but no call is refused because of a guess."""
        costs, round_ = self._problem(wish, measured)
        if not measured.knows_graphs:
            costs = with_guessed_graphs(costs, self._profile(wish.trains).sizes, self._tokens.get(wish.shapes, 0))
            given = self._input_bytes.get(wish.shapes, 0)
            costs = replace(costs, input_bytes=(given or costs.input_bytes[0], *costs.input_bytes[1:]))
        if wish.chosen is not None:
            plan = wish.chosen.for_run(wish.run_type)
            plan.check(wish.run_type, len(self._store.layers))
        else:
            try:
                plan = plan_for(wish.run_type, costs, round_)
            except PlanError:
                if measured.knows_graphs:
                    raise
                round_ = replace(round_, budget_bytes=self._allowed(_PLANNED, wish, measured))
                plan_for(wish.run_type, measured.costs(), round_)  # raises if what is known does not fit either
                plan = smallest_plan(wish.run_type, len(self._store.layers))
        peak = plan_peak(plan, wish.run_type, costs, round_)
        return _InUse(
            plan, peak, round_.budget_bytes, self._known(wish, measured), measured.elements, measured.knows_graphs
        )

    def _shares(self, wish: _Wish) -> bool:
        """Only once a call has shown that no forward writes anything, because shares do not see each other's writes."""
        return self._may_share and self._writes.get((wish.run_type, wish.modes)) is False

    def _known(self, wish: _Wish, measured: ShapeMeasurements) -> Hashable:
        return measured.version, self._shares(wish)

    def _is_due(self, in_use: _InUse, wish: _Wish, measured: ShapeMeasurements) -> bool:
        return in_use.known != self._known(wish, measured) and in_use.waited + 1 >= in_use.patience

    def _ask_budget(self) -> None:
        """Of the smallest device, as it is now; while the engine does something, its own use cannot be told apart."""
        held = self._held_bytes()
        if self._budget is None or held is not None:
            self._budget = min(device.budget_bytes((held or {}).get(device.name, 0)) for device in self._devices)

    def _size(self, layer: LayerParameters) -> LayerSize:
        multiplied = [use.parameter for use in layer.uses if id(use.parameter) not in self._looked_up]
        trained = [use.parameter for use in layer.trainable]
        return LayerSize(
            weight_bytes=layer.num_bytes,
            gradient_bytes=sum(parameter.numel() * self._dtypes(parameter)[0].itemsize for parameter in trained),
            landed_bytes=sum(parameter.numel() * self._dtypes(parameter)[1].itemsize for parameter in trained),
            matmul_elements=sum(parameter.numel() for parameter in multiplied),
            trained_elements=sum(parameter.numel() for parameter in trained),
        )

    def _dtypes(self, parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
        if self._rules is None:
            return torch.promote_types(parameter.dtype, torch.float32), parameter.dtype
        return self._rules.dtypes(parameter)


def size_class(microbatches: Iterable[Sequence[Any]]) -> int:
    """What ``shapes`` may be: a number for the largest microbatch's elements, the same within a quarter of an octave.

    Takes the leaves of each microbatch's inputs. Coarse, so that batches of any length need few plans.
    """
    return round(4 * log2(max(elements_of(microbatches), 1)))


def elements_of(microbatches: Iterable[Sequence[Any]]) -> int:
    """Of all tensors of the largest microbatch; takes the leaves of each one's inputs."""
    tensors = ([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in microbatches)
    return max((sum(tensor.numel() for tensor in leaves) for leaves in tensors), default=0)


def tokens_of(microbatches: Iterable[Sequence[Any]]) -> int:
    """The largest tensor of whole numbers among the leaves of each microbatch's inputs: token ids, where there are."""
    tensors = (leaf for leaves in microbatches for leaf in leaves if isinstance(leaf, torch.Tensor))
    return max((tensor.numel() for tensor in tensors if tensor.dtype in (torch.int64, torch.int32)), default=0)


def _better(run_type: RunType, plan: ModelExecutePlan, costs: LayerCosts, round_: Round) -> ModelExecutePlan:
    """``plan``, or a new one that is clearly faster or needed because ``plan`` does not fit any more."""
    try:
        new = plan_for(run_type, costs, round_)
    except PlanError:
        return plan  # It has run; that the prediction says it cannot is no reason to stop.
    does_fit = plan_peak(plan, run_type, costs, round_).bytes.total <= round_.budget_bytes
    old_ms, new_ms = (step_ms(one, run_type, costs, round_) for one in (plan, new))
    return plan if does_fit and new_ms >= old_ms * (1 - _WORTH_CHANGING) else new


def _embeddings(layer: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in layer.modules() if isinstance(module, nn.Embedding)]
