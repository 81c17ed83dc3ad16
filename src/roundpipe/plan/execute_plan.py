"""The plan a user can read, write and check: which consecutive layers form a stage in each direction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import PlanError
from .partition import LayerCosts, partition_layers, plan_fused

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
        return f"ModelExecutePlan({' | '.join(self._describe())})"

    def __str__(self) -> str:
        rows = (f"{kind:>4}  {layers}" for kind, layers in (row.split(" ") for row in self._describe()))
        return "\n".join(["pass  layers", *rows])

    def _describe(self) -> list[str]:
        fused = bool(self.bwd_plan) and not (self.fwd_plan and self.fwd_plan[-1].stop >= self.bwd_plan[0].stop)
        rows = [f"F {_span(stage)}" for stage in self.fwd_plan]
        for position, stage in enumerate(self.bwd_plan):
            rows.append(f"{'X' if fused and position == 0 else 'B'} {_span(stage)}")
        return rows

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

    @classmethod
    def auto(
        cls,
        run_type: RunType,
        *models: "RoundPipe",
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> "ModelExecutePlan | list[ModelExecutePlan]":
        """A plan for one model, or a list of plans for several.

        Args:
            run_type: what the plan is for.
            models: the engines to plan for.
            min_stages: at least so many stages; default the number of devices.
            upper_threshold: how far above the balanced stage cost a stage may go before it is cut once more.
            model_memory_limit: largest weight bytes of one stage; default a quarter of a device's budget.
        """
        plans = []
        for model in models:
            limit = model_memory_limit if model_memory_limit is not None else model.stage_byte_limit
            plans.append(
                plan_for(
                    run_type,
                    model.layer_costs,
                    num_devices=len(model.devices),
                    num_microbatches=model.default_num_microbatch,
                    min_stages=min_stages,
                    max_stage_bytes=limit * upper_threshold if model_memory_limit is None else limit,
                )
            )
        return plans[0] if len(plans) == 1 else plans


def plan_for(
    run_type: RunType,
    costs: LayerCosts,
    *,
    num_devices: int,
    num_microbatches: int,
    min_stages: int | None,
    max_stage_bytes: float,
) -> ModelExecutePlan:
    """The best plan for ``run_type`` under a limit on the weight bytes of one stage."""
    wanted = num_devices if min_stages is None else min_stages
    if run_type == "infer":
        by_bytes = -(-sum(costs.weight_bytes) // max(1, int(max_stage_bytes)))
        return ModelExecutePlan(partition_layers(costs.forward, max(wanted, by_bytes)))
    stages = plan_fused(
        costs,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        min_stages=wanted,
        max_stage_bytes=max_stage_bytes,
    )
    return ModelExecutePlan(stages.forward, stages.backward).for_run(run_type)


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
