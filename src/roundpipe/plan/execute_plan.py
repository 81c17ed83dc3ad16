"""The plan a user can read, write and check: which consecutive layers form a stage in each direction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..errors import PlanError
from .actions import Pass, Passes
from .costs import LayerCosts, Round
from .one_way import plan_one_way
from .schedule import backward_passes, forward_passes, fused_passes
from .search import plan_fused
from .together import Part, plan_together

if TYPE_CHECKING:
    from ..model import RoundPipe

RunType = Literal["infer", "train", "fused"]


@dataclass(frozen=True)
class ModelExecutePlan:
    """Stages as ``range``s of layer indices.

    Args:
        fwd_plan: forward stages, ascending. Complete for "infer" and "train"; for "fused" they end where the first
            backward stage begins.
        bwd_plan: backward stages, descending and complete; empty for "infer". For "fused" the first one runs forward,
            loss and backward together and is never recomputed.

    Example:
        >>> ModelExecutePlan(fwd_plan=[range(0, 4), range(4, 6)], bwd_plan=[range(6, 8), range(3, 6), range(0, 3)])
        ModelExecutePlan(F 0-3 | F 4-5 | X 6-7 | B 3-5 | B 0-2)
    """

    fwd_plan: Sequence[range]
    bwd_plan: Sequence[range] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fwd_plan", tuple(self.fwd_plan))
        object.__setattr__(self, "bwd_plan", tuple(self.bwd_plan))

    def __repr__(self) -> str:
        return f"ModelExecutePlan({' | '.join(f'{pass_.value} {_span(stage)}' for pass_, stage in self._visits())})"

    def __str__(self) -> str:
        rows = [(str(n), pass_.name.lower(), _span(stage)) for n, (pass_, stage) in enumerate(self._visits())]
        return "\n".join(f"{n:>5}  {name:8}  {layers}" for n, name, layers in [("visit", "pass", "layers"), *rows])

    def _visits(self) -> Passes:
        """In order. The first backward stage is fused if the forward stages end where it begins."""
        fused = bool(self.bwd_plan) and not (self.fwd_plan and self.fwd_plan[-1].stop >= self.bwd_plan[0].stop)
        backward = [Pass.FUSED if fused else Pass.BACKWARD, *[Pass.BACKWARD] * len(self.bwd_plan)]
        return [*forward_passes(self.fwd_plan), *zip(backward, self.bwd_plan, strict=False)]

    def check(self, run_type: RunType, num_layers: int) -> None:
        """Raises PlanError, naming the layer, unless this plan is valid for ``run_type`` on ``num_layers`` layers."""
        if run_type != "infer" and not self.bwd_plan:
            raise PlanError(
                f"a {run_type!r} plan needs bwd_plan; layers {_span(range(num_layers))} have no backward stage"
            )
        forward_end = self.bwd_plan[0].start if run_type == "fused" else num_layers
        _check_cover("fwd_plan", list(self.fwd_plan), forward_end)
        if run_type != "infer":
            _check_cover("bwd_plan (read from its end)", list(reversed(self.bwd_plan)), num_layers)

    def for_run(self, run_type: RunType) -> "ModelExecutePlan":
        """This plan turned into one of ``run_type``: a fused first backward stage is also the last forward stage."""
        if not self.bwd_plan:
            return self
        fused_start = self.bwd_plan[0].start
        forward = [range(s.start, min(s.stop, fused_start)) for s in self.fwd_plan if s.start < fused_start]
        if run_type == "fused":
            is_complete = bool(self.fwd_plan) and self.fwd_plan[-1].stop == self.bwd_plan[0].stop
            return ModelExecutePlan(forward, self.bwd_plan) if is_complete else self
        complete = self.fwd_plan if len(forward) < len(self.fwd_plan) else [*forward, self.bwd_plan[0]]
        return ModelExecutePlan(complete, self.bwd_plan if run_type == "train" else ())

    def rounds(self, run_type: RunType, first_trained: int = 0) -> list[Passes]:
        """The visits of each round that ``run_type`` takes: two for "train", with the user's own graph between them."""
        if run_type == "fused":
            return [fused_passes(self, first_trained)]
        forward = forward_passes(self.fwd_plan)
        return [forward] if run_type == "infer" else [forward, backward_passes(self.bwd_plan, first_trained)]

    @classmethod
    def auto(
        cls,
        run_type: RunType,
        *models: "RoundPipe",
        min_stages: int = 1,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> "ModelExecutePlan | list[ModelExecutePlan]":
        """A plan for one model, or a list of plans for several that run one after another.

        Args:
            run_type: "infer"; "train" for ``forward`` and ``backward``; "fused" for ``forward_backward``.
            models: the engines to plan for. Costs are measured while they run; before that they are estimated.
            min_stages: at least so many stages (of all models together), while there are layers for them.
            upper_threshold: several models share one target for their slowest stage; how far above it a stage may go
                before it is cut once more.
            model_memory_limit: bytes that weights, activations and gradients may take on one device; default what the
                engine may use of it.

        Raises:
            PlanError: no plan fits into the limit.
        """
        parts = []
        for model in models:
            costs, round_ = model.planner.problem(run_type, model.default_num_microbatch)
            budget = round_.budget_bytes if model_memory_limit is None else model_memory_limit
            parts.append((costs, replace(round_, budget_bytes=budget, min_stages=min_stages)))
        if len(parts) == 1:
            return plan_for(run_type, *parts[0])
        return plans_for(run_type, parts, min_stages=min_stages, upper_threshold=upper_threshold)


def plan_for(run_type: RunType, costs: LayerCosts, round_: Round) -> ModelExecutePlan:
    """The plan with the shortest predicted rounds that fits into memory.

    Raises:
        PlanError: nothing fits; says what the smallest plan needs.
    """
    if run_type == "fused":
        stages = plan_fused(costs, round_)
        return ModelExecutePlan(stages.forward, stages.backward)
    forward = plan_one_way(Pass.FORWARD, costs, round_)
    if run_type == "infer":
        return ModelExecutePlan(forward)
    backward = plan_one_way(Pass.BACKWARD, costs, round_, before=forward_passes(forward))
    return ModelExecutePlan(forward, _complete(backward))


def plans_for(
    run_type: RunType, parts: Sequence[tuple[LayerCosts, Round]], *, min_stages: int, upper_threshold: float
) -> list[ModelExecutePlan]:
    """Plans for models that run one after another, see ``plan_together``."""
    together = plan_together(
        [Part(costs, round_, run_type != "infer", run_type == "fused") for costs, round_ in parts],
        min_stages=min_stages,
        upper_threshold=upper_threshold,
    )
    plans = []
    for passes in together:
        forward = [layers for pass_, layers in passes if pass_ is Pass.FORWARD]
        backward = [layers for pass_, layers in passes if pass_ is not Pass.FORWARD]
        plans.append(ModelExecutePlan(forward, _complete(backward)))
    return plans


def _complete(backward: Sequence[range]) -> list[range]:
    """Frozen layers at the bottom, which are never visited backward, belong to the last stage that is not fused."""
    if not backward or backward[-1].start == 0:
        return list(backward)
    if len(backward) == 1:
        return [*backward, range(backward[0].start)]
    return [*backward[:-1], range(backward[-1].stop)]


def _span(stage: range) -> str:
    return f"{stage.start}-{stage.stop - 1}"


def _check_cover(name: str, stages: Sequence[range], end: int) -> None:
    expected = 0
    for stage in stages:
        if stage.step != 1 or len(stage) == 0:
            raise PlanError(f"{name}: {stage!r} is not a range of consecutive layers")
        if stage.start != expected:
            fault = "is in no stage" if stage.start > expected else "is in two stages or out of order"
            raise PlanError(f"{name}: layer {min(stage.start, expected)} {fault}; {stage!r} should begin at {expected}")
        expected = stage.stop
    if expected < end:
        raise PlanError(
            f"{name}: layer {expected} is in no stage; the stages end at {expected}, they should end at {end}"
        )
    if expected > end:
        raise PlanError(f"{name}: layer {end} is one too many; the stages end at {expected}, they should end at {end}")
