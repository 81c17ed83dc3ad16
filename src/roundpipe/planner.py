"""Which plan a call uses: the user's, checked, or one made from the layers' costs and the devices' memory."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import nn

from .device import Device
from .errors import PlanError
from .params.gradients import GradientRules
from .params.store import LayerParameters, ParameterStore
from .plan.costs import Grain, LayerCosts, Round, StageSums
from .plan.execute_plan import ModelExecutePlan, RunType, plan_for
from .plan.measure import LayerSize, Measurements, ShapeMeasurements, prior_costs, with_guessed_graphs
from .plan.memory import predicted_peak
from .plan.search import predicted_ms

# A new plan has to be predicted this much faster, because measurements waver and a new plan starts cold.
_WORTH_CHANGING = 0.03
# What plans may fill of a device: temporaries inside layers take the rest. Less before graphs were measured.
_PLANNED, _PLANNED_BLINDLY = 0.9, 0.5


@dataclass
class _Kept:
    """A plan in use. It is looked at again after 1, 2, 4, ... calls in which measurements changed."""

    plan: ModelExecutePlan
    version: int
    patience: int = 1
    waited: int = 0


class Planner:
    """Makes an engine's plans and keeps them. Used by the caller's thread.

    Args:
        layers: the modules, to tell embeddings (looked up) from weights that are multiplied.
        rules: what gradients are summed in; default fp32.
    """

    def __init__(
        self,
        store: ParameterStore,
        devices: Sequence[Device],
        *,
        layers: Sequence[nn.Module] = (),
        rules: GradientRules | None = None,
    ) -> None:
        self._store = store
        self._devices = devices
        self._looked_up = {id(weight) for layer in layers for weight in _embeddings(layer)}
        self._rules = rules
        self._budget: float | None = None
        self._kept: dict[Hashable, _Kept] = {}
        self._latest: Hashable = None
        self.measurements = Measurements()
        self._overlaps = True

    @property
    def num_devices(self) -> int:
        return len(self._devices)

    @property
    def layer_costs(self) -> LayerCosts:
        """Costs before anything was measured."""
        return prior_costs([self._size(layer) for layer in self._store.layers], self._store.first_trainable_layer())

    def note_step(self, is_async: bool) -> None:
        """Tells how rounds follow each other: an async step lets the next one begin beside the last."""
        self._overlaps = is_async

    def measured(self, shapes: Hashable = None) -> ShapeMeasurements:
        """Where workers record the costs of microbatches with these shapes; by default those of the latest call."""
        self._latest = shapes = self._latest if shapes is None else shapes
        prior = self.layer_costs
        # What trains decides what a backward does, so times measured otherwise say nothing.
        return self.measurements.of((shapes, prior.backward), prior)

    def problem(
        self, run_type: RunType, num_microbatches: int, shapes: Hashable = None, grain: Grain = "stage"
    ) -> tuple[LayerCosts, Round]:
        """What a plan has to solve."""
        measured = self.measured(shapes)
        share = _PLANNED if measured.knows_graphs else _PLANNED_BLINDLY
        return measured.costs(), Round(
            num_devices=self.num_devices,
            num_microbatches=num_microbatches,
            overlaps=self._overlaps and run_type == "fused",
            grain=grain,
            first_trained=self._store.first_trainable_layer(),
            budget_bytes=self._budget_bytes() * share,
        )

    def plan(
        self,
        run_type: RunType,
        num_microbatches: int,
        chosen: ModelExecutePlan | None,
        *,
        shapes: Hashable = None,
        grain: Grain = "stage",
    ) -> ModelExecutePlan:
        """The plan for a call.

        Raises:
            PlanError: ``chosen``, the user's plan, does not cover the model, or without one nothing fits.
        """
        if chosen is not None:
            plan = chosen.for_run(run_type)
            plan.check(run_type, len(self._store.layers))
            return plan
        measured = self.measured(shapes)
        key = (run_type, num_microbatches, grain, self._latest, self._overlaps, self._store.first_trainable_layer())
        kept = self._kept.get(key)
        if kept is None:
            plan = self._first_plan(run_type, *self.problem(run_type, num_microbatches, shapes, grain), measured)
            kept = self._kept[key] = _Kept(plan, measured.version)
        elif kept.version != measured.version:
            kept.waited += 1
            if kept.waited >= kept.patience:
                problem = self.problem(run_type, num_microbatches, shapes, grain)
                plan = _better(run_type, kept.plan, *problem)
                self._kept[key] = _Kept(plan, measured.version, 2 * kept.patience)
        return self._kept[key].plan

    def _first_plan(
        self, run_type: RunType, costs: LayerCosts, round_: Round, measured: ShapeMeasurements
    ) -> ModelExecutePlan:
        """Leaves room for activations nobody has seen yet; but no call is refused because of a guess."""
        if not measured.knows_graphs:
            try:
                sizes = [self._size(layer) for layer in self._store.layers]
                return plan_for(run_type, with_guessed_graphs(costs, sizes), round_)
            except PlanError:
                pass
        return plan_for(run_type, costs, round_)

    def _budget_bytes(self) -> float:
        """Of the smallest device. Asked for once, because later the engine's own use would count against it."""
        if self._budget is None:
            self._budget = min(device.budget_bytes() for device in self._devices)
        return self._budget

    def _size(self, layer: LayerParameters) -> LayerSize:
        summed = [(use.parameter, self._summed_bytes(use.parameter)) for use in layer.trainable]
        multiplied = [use.parameter for use in layer.uses if id(use.parameter) not in self._looked_up]
        return LayerSize(
            weight_bytes=layer.num_bytes,
            gradient_bytes=sum(parameter.numel() * num_bytes for parameter, num_bytes in summed),
            matmul_elements=sum(parameter.numel() for parameter in multiplied),
            trains=bool(layer.trainable),
        )

    def _summed_bytes(self, parameter: nn.Parameter) -> int:
        return max(4, parameter.itemsize) if self._rules is None else self._rules.dtypes(parameter).summed.itemsize


def size_class(microbatches: Iterable[Sequence[Any]]) -> int:
    """What ``shapes`` may be: a number for the largest microbatch's elements, the same within a quarter of an octave.

    Takes the leaves of each microbatch's inputs. Coarse, so that batches of any length need few plans.
    """
    tensors = ([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in microbatches)
    largest = max((sum(tensor.numel() for tensor in leaves) for leaves in tensors), default=0)
    return round(4 * log2(max(largest, 1)))


def _better(run_type: RunType, plan: ModelExecutePlan, costs: LayerCosts, round_: Round) -> ModelExecutePlan:
    """``plan``, or a new one that is clearly faster or needed because ``plan`` does not fit any more."""
    totals = StageSums(costs)
    try:
        new = plan_for(run_type, costs, round_)
    except PlanError:
        return plan  # It has run; that the prediction says it cannot is no reason to stop.
    old_rounds, new_rounds = plan.rounds(run_type, round_.first_trained), new.rounds(run_type, round_.first_trained)
    held = predicted_peak([visit for passes in old_rounds for visit in passes], totals, round_)
    old_ms, new_ms = (
        sum(predicted_ms(passes, totals, round_) for passes in rounds) for rounds in (old_rounds, new_rounds)
    )
    if held.total > round_.budget_bytes or new_ms < old_ms * (1 - _WORTH_CHANGING):
        return new
    return plan


def _embeddings(layer: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in layer.modules() if isinstance(module, nn.Embedding)]
