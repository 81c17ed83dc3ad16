"""The plan a user can read, write and check: which consecutive layers form a stage in each
direction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, Protocol

from ..errors import PlanError
from ..system.sizes import bytes_of
from .actions import Pass, Passes
from .costs import LayerCosts, Workload
from .schedule import backward_passes, forward_passes, fused_passes

RunType = Literal["infer", "train", "fused"]


class Plannable(Protocol):
    """An engine, as far as a plan for it needs to know one."""

    @property
    def default_num_microbatch(self) -> int:
        """Microbatches of a call where nothing is set."""

    def planning_problem(self, run_type: RunType) -> tuple[LayerCosts, Workload]:
        """Costs of the layers, and of a round of ``default_num_microbatch`` microbatches."""


@dataclass(unsafe_hash=True)
class ModelExecutePlan:
    """Stages as ``range``s of layer indices.

    Both lists may be assigned later, which is checked as at construction; an engine reads them at
    each call. They are kept as tuples.

    A stage that is listed n times in a row is run n times, by n devices in turn, each time for
    a share of the microbatches. Gradients are then summed share by share: the sum is not to the bit
    that of a single stage run.

    Args:
        fwd_plan: forward stages, ascending. Complete for "infer" and "train"; for "fused" they end
            where the first backward stage begins.
        bwd_plan: backward stages, descending and complete; empty for "infer". For "fused" the first
            one runs forward, loss and backward together and is never recomputed.

    Raises:
        PlanError: a stage is no ``range`` of consecutive layers.

    Example:
        >>> ModelExecutePlan(
        ...     fwd_plan=[range(0, 4), range(4, 6)],
        ...     bwd_plan=[range(6, 8), range(3, 6), range(0, 3)],
        ... )
        ModelExecutePlan(F 0-3 | F 4-5 | X 6-7 | B 3-5 | B 0-2)
    """

    fwd_plan: Sequence[range] = ()
    bwd_plan: Sequence[range] = ()

    def __setattr__(self, name: str, value: Sequence[range]) -> None:
        if name not in ("fwd_plan", "bwd_plan"):
            raise AttributeError(
                f"ModelExecutePlan has no {name!r}; its stages are fwd_plan and bwd_plan"
            )
        stages = tuple(value)
        for stage in stages:
            if not isinstance(stage, range) or stage.step != 1 or len(stage) == 0:
                raise PlanError(f"{name}: {stage!r} is not a range of consecutive layers")
        super().__setattr__(name, stages)

    def __repr__(self) -> str:
        stages = [
            (pass_.value, _span(stage), len(list(same)))
            for (pass_, stage), same in groupby(self._stage_runs())
        ]
        drawn = (f"{p} {s} x{n}" if n > 1 else f"{p} {s}" for p, s, n in stages)
        return f"ModelExecutePlan({' | '.join(drawn)})"

    def __str__(self) -> str:
        is_shared = any(one == other for one, other in pairwise(self._stage_runs()))
        rows = [("stage run", "pass", "layers", "share" if is_shared else "")]
        for (pass_, stage), same in groupby(self._stage_runs()):
            num_shares = len(list(same))
            for share in range(num_shares):
                of_many = f"{share + 1}/{num_shares}" if num_shares > 1 else ""
                rows.append((str(len(rows) - 1), pass_.name.lower(), _span(stage), of_many))
        width = max(len(layers) for _, _, layers, _ in rows)
        return "\n".join(
            f"{n:>5}  {name:8}  {layers:{width}}  {share}".rstrip()
            for n, name, layers, share in rows
        )

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    def _stage_runs(self) -> Passes:
        """In order. The first backward stage is fused if the forward stages end where it begins."""
        fused = bool(self.bwd_plan) and not (
            self.fwd_plan and self.fwd_plan[-1].stop >= self.bwd_plan[0].stop
        )
        if fused:
            return fused_passes(self, 0)
        return [
            *forward_passes(self.fwd_plan),
            *((Pass.BACKWARD, stage) for stage in self.bwd_plan),
        ]

    def check(self, run_type: RunType, num_layers: int) -> None:
        """Raises PlanError, naming the layer, unless this plan is valid for ``run_type`` on
        ``num_layers`` layers."""
        _check_run_type(run_type)
        if run_type != "infer" and not self.bwd_plan:
            raise PlanError(
                f"a {run_type!r} plan needs bwd_plan; layers {_span(range(num_layers))} have no "
                "backward stage"
            )
        forward_end = self.bwd_plan[0].start if run_type == "fused" else num_layers
        _check_cover("fwd_plan", list(self.fwd_plan), forward_end)
        if run_type != "infer":
            _check_cover("bwd_plan (read from its end)", list(reversed(self.bwd_plan)), num_layers)

    def for_run(self, run_type: RunType) -> "ModelExecutePlan":
        """Turns this plan into one of ``run_type``, as in `auto`: a fused first backward stage is
        also the last forward stage."""
        if not self.bwd_plan:
            return self
        fused_start = self.bwd_plan[0].start
        forward = [
            range(s.start, min(s.stop, fused_start)) for s in self.fwd_plan if s.start < fused_start
        ]
        if run_type == "fused":
            is_complete = bool(self.fwd_plan) and self.fwd_plan[-1].stop == self.bwd_plan[0].stop
            return ModelExecutePlan(forward, self.bwd_plan) if is_complete else self
        fused = [stage for stage in self.bwd_plan if stage == self.bwd_plan[0]]
        complete = self.fwd_plan if len(forward) < len(self.fwd_plan) else [*forward, *fused]
        return ModelExecutePlan(complete, self.bwd_plan if run_type == "train" else ())

    def shared(self, num_shares: int) -> "ModelExecutePlan":
        """Repeats every stage run ``num_shares`` times, each for its share of the microbatches."""
        return ModelExecutePlan(
            [stage for stage in self.fwd_plan for _ in range(num_shares)],
            [stage for stage in self.bwd_plan for _ in range(num_shares)],
        )

    def rounds(self, run_type: RunType, first_trained: int = 0) -> list[Passes]:
        """Lists the stage runs of each round that ``run_type`` takes: two for "train", with the
        user's own graph between them.

        ``first_trained`` is the index of the first layer that needs a gradient; those below it are
        not run backward.
        """
        if run_type == "fused":
            return [fused_passes(self, first_trained)]
        forward = forward_passes(self.fwd_plan)
        return (
            [forward]
            if run_type == "infer"
            else [forward, backward_passes(self.bwd_plan, first_trained)]
        )

    @classmethod
    def auto(
        cls,
        run_type: RunType,
        *models: "Plannable",
        min_stages: int = 1,
        upper_threshold: float = 1.1,
        model_memory_limit: str | float | None = None,
    ) -> "ModelExecutePlan | list[ModelExecutePlan]":
        """Makes a plan for one model, or a list of plans for several that run one after another.

        The plan is the one with the shortest predicted step that fits into memory. Stages are found
        by a search over contiguous partitions of the layers' measured costs.

        Args:
            run_type: "infer"; "train" for ``forward`` and ``backward``; "fused" for
                ``forward_backward``.
            models: the engines to plan for. Costs are measured while they run; before that they are
                estimated.
            min_stages: at least so many stages (of all models together), while there are layers for
                them.
            upper_threshold: several models share one target for their slowest stage; how far above
                it a stage may go before it is cut once more.
            model_memory_limit: what weights, activations and gradients may take on one device, as
                ``"24GB"`` or in GB; default what the engine may use of it.

        Raises:
            PlanError: no plan fits into the limit, or an argument makes no sense.
            ConfigError: ``model_memory_limit`` is no size.

        Example:
            >>> plan = ModelExecutePlan.auto("fused", engine, model_memory_limit="12GB")
            >>> config = RoundPipeRunConfig(execute_plan=plan)
        """
        _check_run_type(run_type)
        _check_request(len(models), min_stages, upper_threshold)
        given = None
        if model_memory_limit is not None:
            given = float(bytes_of(model_memory_limit, "model_memory_limit"))
        parts = []
        for model in models:
            costs, workload = model.planning_problem(run_type)
            limit = workload.limit_bytes if given is None else given
            parts.append((costs, replace(workload, limit_bytes=limit, min_stages=min_stages)))
        from .best import plan_for, plans_for  # here, because those make plans of this class

        if len(parts) == 1:
            return plan_for(run_type, *parts[0])
        return plans_for(run_type, parts, min_stages=min_stages, upper_threshold=upper_threshold)


def plan_of(passes: Passes) -> ModelExecutePlan:
    """The plan whose stage runs these are, each stage once."""
    forward = [layers for pass_, layers in passes if pass_ is Pass.FORWARD]
    return ModelExecutePlan(
        forward, completed([layers for pass_, layers in passes if pass_ is not Pass.FORWARD])
    )


def completed(backward: Sequence[range]) -> list[range]:
    """Frozen layers at the bottom, which are never visited backward, belong to the last stage that
    is not fused."""
    if not backward or backward[-1].start == 0:
        return list(backward)
    if len(backward) == 1:
        return [*backward, range(backward[0].start)]
    return [*backward[:-1], range(backward[-1].stop)]


def _span(stage: range) -> str:
    return f"{stage.start}-{stage.stop - 1}"


def _check_run_type(run_type: str) -> None:
    if run_type not in ("infer", "train", "fused"):
        raise PlanError(f"run_type is {run_type!r}; use 'infer', 'train' or 'fused'")


def _check_request(num_models: int, min_stages: int, upper_threshold: float) -> None:
    if num_models == 0:
        raise PlanError("ModelExecutePlan.auto was given no model; pass the engines to plan for")
    if min_stages < 1:
        raise PlanError(f"min_stages is {min_stages}; it must be at least 1")
    if upper_threshold < 1:
        raise PlanError(
            f"upper_threshold is {upper_threshold}; it must be at least 1: a stage may reach the "
            "target"
        )


def _check_cover(name: str, stages: Sequence[range], end: int) -> None:
    expected, before = 0, None
    for stage in stages:
        if stage == before:
            continue  # another share of the same stage
        before = stage
        if stage.start != expected:
            fault = (
                "is in no stage" if stage.start > expected else "is in two stages or out of order"
            )
            raise PlanError(
                f"{name}: layer {min(stage.start, expected)} {fault}; {stage!r} should begin at "
                f"{expected}"
            )
        expected = stage.stop
    if expected < end:
        raise PlanError(
            f"{name}: layer {expected} is in no stage; the stages end at {expected}, they should "
            f"end at {end}"
        )
    if expected > end:
        raise PlanError(
            f"{name}: layer {end} is one too many; the stages end at {expected}, they should end "
            f"at {end}"
        )
