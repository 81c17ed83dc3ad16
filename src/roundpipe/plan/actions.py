"""The vocabulary of a schedule: stage runs and the actions they are made of, with a short repr for
drawings."""

from dataclasses import dataclass
from enum import Enum


class Pass(Enum):
    """What a stage run does with its stage."""

    FORWARD = "F"
    FUSED = "X"
    BACKWARD = "B"


Passes = list[tuple[Pass, range]]
"""The stage runs of a round in order, before they have devices. A stage that stands there
n times in a row is run n times, each time for a share of the microbatches."""


class Op(Enum):
    """One kind of action. Drawn by its letter; compute is drawn by the letter of its pass."""

    UPLOAD = "U"  # the stage's weights go up into slots
    FETCH = "G"  # an input that waits on the host for one microbatch's recompute comes back
    COMPUTE = "C"  # one microbatch: its boundary tensors arrive, it runs, its results are handed on
    OFFLOAD = "L"  # the stage's gradients go down to the host
    RELEASE = "R"  # the slots go back behind the last compute


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage in one pass on one device, its microbatches, or a share of them, in a row."""

    pass_: Pass
    stage: int
    layers: range
    device: int
    microbatches: range


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a worker does. ``F3.1@0`` is: forward, stage 3, microbatch 1, device 0."""

    op: Op
    stage_run: StageRun
    microbatch: int = -1

    def __repr__(self) -> str:
        letter = (
            self.stage_run.pass_.value
            if self.op is Op.COMPUTE
            else f"{self.op.value}{self.stage_run.pass_.value}"
        )
        part = f".{self.microbatch}" if self.microbatch >= 0 else ""
        return f"{letter}{self.stage_run.stage}{part}@{self.stage_run.device}"
