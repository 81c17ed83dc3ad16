"""The backward of a ``forward()``: a round of its own, made when the caller's backward comes to
it."""

from collections.abc import Callable
from dataclasses import dataclass

from ..params.placement.device_state import DeviceStates
from ..plan.actions import Passes
from ..runtime.autograd import Gradients
from ..runtime.call import Call
from ..runtime.pipeline import Pipeline
from ..runtime.results import Destinations, input_gradients
from ..step.thread import StepThread
from ..transfer.boundaries import BoundaryGradient


@dataclass(frozen=True, kw_only=True)
class BackwardCall:
    """Takes the place of ``run_backward`` in `runtime.autograd.attach`. Called by the caller's
    thread, at most once.

    Holds neither what ``forward`` was given nor what it returned, because that is memory of the
    devices.

    Args:
        begin: the checks at the door of every engine call.
        commit: takes the finished round, with its gradients.
        targets: where gradients for what ``forward`` was given go; they are the result.
        carries: of what ``forward`` returned, per microbatch.
        made_at: which weights ``forward`` has used.
    """

    begin: Callable[[str], None]
    commit: Callable[[Call], None]
    steps: StepThread
    device_states: DeviceStates
    pipeline: Pipeline
    forward: Call
    passes: Passes
    targets: Destinations
    carries: list[tuple[bool, ...]]
    made_at: tuple[int, int, int]

    def __call__(self, gradients: list[Gradients]) -> Gradients:
        """Empties ``gradients``, because a stage run lets go of each as soon as it is through with
        it."""
        self.begin("backward()")
        self.steps.refuse_other_than(self.made_at)
        forward = self.forward
        forward.streams.take_over()
        call = self.pipeline.prepare(
            self.passes,
            forward.settings,
            forward.streams,
            posts={
                ("g", forward.settings.num_layers, m): _of_all_leaves(given, self.carries[m])
                for m, given in enumerate(gradients)
            },
            resident_layers=forward.resident_layers,
            kept=forward.kept,
        )
        gradients.clear()
        with (
            self.device_states.noting_failures(),
            call.awaited(
                lambda: self.pipeline.start(call), lambda: self.commit(call), advance=False
            ),
        ):
            call.wait_finished()
        return input_gradients(call, self.targets)


def _of_all_leaves(given: Gradients, carries: tuple[bool, ...]) -> BoundaryGradient:
    remaining = iter(given)
    return BoundaryGradient(
        tuple(next(remaining) if carried else None for carried in carries), None, None
    )
