"""Joins a pipelined forward to the caller's autograd graph: its backward is one more round through
the pipeline.

[Note: the round's node]

    inputs that want a gradient ---+
    anchor ------------------------+--[1]--> round --+--[2]--> outputs on the CPU
                                                     +--[3]--> token, lift --> outputs on a device

[1] The anchor is a leaf of ours. Without inputs that want a gradient nothing would be recorded; and
    only a backward that reaches all leaves, as `loss.backward()` does, reaches it.
[2] What comes out of the round lies on the CPU, because then its backward runs on the caller's
    thread: it waits for the devices' own backwards, which run on the threads that autograd keeps
    for them.
[3] So a tensor on a device is lifted into the graph by a node of its own, and between that node and
    the round an empty token stands for it. Its gradient goes by hand, without a detour over the
    host.

What rounds have made counts when the pass through all of the graph has ended: if a part of it
fails, nothing does.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..threads.interrupts import deferred
from ..transfer.boundaries import Boundary

Commit = Callable[[], None]
Gradients = Sequence[torch.Tensor | None]
RunBackward = Callable[[list[Gradients]], Gradients]


class _Round(torch.autograd.Function):
    """Inputs: the anchor, and the caller's tensors that want a gradient. Outputs: the leaves that
    carry one, or their tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Gradients], Gradients],
        made: list[torch.Tensor],
        anchor: Any,
        *_: torch.Tensor,
    ) -> Any:
        ctx.run = run
        ctx.anchor = torch.autograd.graph.get_gradient_edge(anchor).node
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipelined forward cannot be differentiated twice (create_graph=True); its "
                "gradients have no graph"
            )
        # The one thing that tells: autograd says which nodes it is going to run. See [1].
        if not torch._C._will_engine_execute_node(ctx.anchor):
            raise ConfigError(
                "torch.autograd.grad() or backward(inputs=...) through a RoundPipe would also add "
                "to the gradients of its weights, which it was not asked for; use loss.backward() "
                "and read .grad of the inputs"
            )
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError(
                "backward was called twice through one pipelined forward; call the model again"
            )
        return None, None, None, *run(gradients)


class _Lift(torch.autograd.Function):
    """From a token to the tensor on a device that it stands for."""

    @staticmethod
    def forward(ctx: Any, lifted: "_Lifted", tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.lifted = lifted
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.lifted.receive(gradient)
        return None, None, torch.empty(0, device="cpu")


class _Lifted:
    """Stands for a tensor on a device, without holding it; later has its gradient."""

    def __init__(self) -> None:
        self._gradient: torch.Tensor | None = None
        self._ready: torch.Event | None = None

    def receive(self, gradient: torch.Tensor) -> None:
        """Called on a thread of autograd's, which is on the stream that the forward was on."""
        self._gradient = gradient
        self._ready = torch.accelerator.current_stream(gradient.device).record_event()

    def take(self) -> torch.Tensor | None:
        """The gradient, in the order of the calling thread's stream. None if none came."""
        gradient, self._gradient = self._gradient, None
        if gradient is not None and self._ready is not None:
            stream = torch.accelerator.current_stream(gradient.device)
            stream.wait_event(self._ready)
            gradient.record_stream(stream)
        return gradient


class _Here(threading.local):
    """``held``: where the commits of passes that the thread runs go instead of being made."""

    held: list[Commit] | None = None


class _Pass:
    """One backward pass, and what makes its gradients count. Held by autograd, which drops it if
    the pass fails."""

    def __init__(self, held: list[Commit] | None) -> None:
        self.commits: list[Commit] = []
        self._held = held

    def end(self) -> None:
        """Called by whichever thread of autograd's has done the last node; the caller still waits
        for it."""
        if self._held is not None:
            self._held.extend(self.commits)
            return
        with deferred():
            for commit in self.commits:
                commit()


_here = _Here()
_passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()


def when_pass_ends(commit: Commit) -> None:
    """``commit`` is called at the end of the pass that autograd runs on this thread, with all
    others of it or not at all."""
    task = torch._C._current_graph_task_id()
    running = _passes.get(task)
    if running is None:
        running = _passes[task] = _Pass(_here.held)
        # What torch's own data parallel modules end a backward with; after an error it is not
        # called.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(running.end)
    running.commits.append(commit)


@contextmanager
def commits_held() -> Iterator[list[Commit]]:
    """Passes that end in the block do not count yet: the caller gets, and is to call, what makes
    them."""
    _here.held, before = [], _here.held
    try:
        yield _here.held
    finally:
        _here.held = before


def attach(
    outputs: list[Boundary], inputs: Sequence[torch.Tensor], run_backward: RunBackward
) -> list[Any]:
    """The outputs of each microbatch as parts of the caller's graph. See [Note: the round's node].

    Args:
        outputs: per microbatch, its tensors detached and where the caller wants them.
        inputs: the caller's tensors that want a gradient, in the order ``run_backward`` returns
            their gradients.
        run_backward: takes, per microbatch, gradients for the carrying leaves; returns gradients
            for ``inputs``.
    """
    made = [leaf for boundary in outputs for leaf in _carrying(boundary)]
    if not made:
        return [boundary.value for boundary in outputs]
    counts = [len(_carrying(boundary)) for boundary in outputs]
    lifted = {index: _Lifted() for index, tensor in enumerate(made) if tensor.device.type != "cpu"}

    def run(gradients: Gradients) -> Gradients:
        taken = (
            lifted[i].take() if i in lifted else gradient for i, gradient in enumerate(gradients)
        )
        return run_backward([[next(taken) for _ in range(count)] for count in counts])

    anchor = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        given = [
            torch.empty(0, device="cpu") if index in lifted else tensor
            for index, tensor in enumerate(made)
        ]
        joined = [
            _Lift.apply(lifted[index], made[index], tensor) if index in lifted else tensor
            for index, tensor in enumerate(_Round.apply(run, given, anchor, *inputs))
        ]
    remaining = iter(joined)
    attached = []
    for boundary in outputs:
        leaves = [
            next(remaining) if c else leaf
            for leaf, c in zip(boundary.leaves, boundary.carries, strict=True)
        ]
        attached.append(pytree.tree_unflatten(leaves, boundary.spec))
    return attached


def _carrying(boundary: Boundary) -> list[torch.Tensor]:
    return [
        leaf for leaf, carries in zip(boundary.leaves, boundary.carries, strict=True) if carries
    ]
