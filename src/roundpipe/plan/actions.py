"""The vocabulary of a schedule: visits and the actions they are made of, with a short repr for drawings."""

from dataclasses import dataclass
from enum import Enum


class Pass(Enum):
    """What a visit does with its stage."""

    FORWARD = "F"
    FUSED = "X"
    BACKWARD = "B"


Passes = list[tuple[Pass, range]]
"""The visits of a round in order, before they have devices. A stage that stands there n times in a row is visited n
times, each time for a share of the microbatches."""


class Op(Enum):
    """One kind of action. Drawn by its letter; compute is drawn by the letter of its pass."""

    UPLOAD = "U"  # the stage's weights go up into slots
    FETCH = "G"  # an input that waits on the host for one microbatch's recompute comes back
    COMPUTE = "C"  # one microbatch: its boundary tensors arrive, it runs, its results are handed on
    LAND = "L"  # the stage's gradients go down to the host
    RELEASE = "R"  # the slots go back behind the last compute


@dataclass(frozen=True, slots=True)
class Visit:
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
    visit: Visit
    microbatch: int = -1

    def __repr__(self) -> str:
        letter = self.visit.pass_.value if self.op is Op.COMPUTE else f"{self.op.value}{self.visit.pass_.value}"
        part = f".{self.microbatch}" if self.microbatch >= 0 else ""
        return f"{letter}{self.visit.stage}{part}@{self.visit.device}"
