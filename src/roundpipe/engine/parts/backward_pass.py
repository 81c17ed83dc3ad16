"""One backward pass of the caller through several engines and its own operations: its gradients
count all or none."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import nn

from ...device.virtual import Reached
from ...params.gradients import OffloadedLayer, norms_of
from ...params.working import LayerParameters, ParameterStore
from ...runtime.autograd import when_pass_ends
from ...runtime.call import Call
from ..state import Host


class BackwardPass:
    """Holds what one pass has made so far; `params.gradients.Backward`.

    Filled on the caller's thread, which runs the backward of everything that is on the CPU.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Call, ParameterStore]] = []
        self._sums: dict[int, torch.Tensor] = {}
        self._on_host: list[OffloadedLayer] = []

    def add_call(self, call: Call, store: ParameterStore) -> None:
        """A part's round; ``store`` is the part's, which numbers layers for itself."""
        self._calls.append((call, store))

    def add(self, layer: LayerParameters, gradient: torch.Tensor, summed: torch.dtype) -> None:
        """One parameter that the caller has computed with; it may come from several forwards."""
        if layer.layer in self._sums:
            self._sums[layer.layer].add_(gradient)
        else:
            self._sums[layer.layer] = gradient.to(summed)

    def offload(self, host: Host) -> None:
        """The pass is over: what was summed on the CPU is rounded once, into memory for offloaded
        gradients."""
        for index, gradient in self._sums.items():
            layer = host.store.layers[index]
            buffer = host.buffers.take(layer, layer.uses)
            offloaded = buffer.tensors[0].copy_(gradient)
            buffer.norms.copy_(norms_of(offloaded))
            self._on_host.append(
                OffloadedLayer(layer, buffer, {0: offloaded}, {0: buffer.norms}, Reached())
            )
        self._sums.clear()

    @property
    def offloaded(self) -> list[OffloadedLayer]:
        from_parts = (
            _in_whole(one, store) for call, store in self._calls for one in call.offloaded
        )
        return [*self._on_host, *from_parts]

    def wait_finished(self) -> None:
        for call, _ in self._calls:
            call.wait_finished()


class BackwardPasses:
    """The passes that run now: usually one. Used by the caller's thread. Holds no reference to an
    engine."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # Held by autograd, which drops a pass that fails.
        self._running: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()

    def current(self) -> BackwardPass:
        """The pass that autograd runs on this thread. Its gradients are committed when it ends,
        unless it fails."""
        task = torch._C._current_graph_task_id()
        running = self._running.get(task)
        if running is None:
            running = self._running[task] = BackwardPass()
            when_pass_ends(partial(self._end, running))
        return running

    def resident(self, layer: LayerParameters) -> nn.Parameter:
        """A parameter for one forward on the CPU: the working copy's memory, its gradient taken as
        soon as autograd has finished it."""
        parameter = layer.uses[0].parameter
        resident = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            resident.register_post_accumulate_grad_hook(self._taker(layer))
        return resident

    def _taker(self, layer: LayerParameters) -> Callable[[torch.Tensor], None]:
        steps, made_at = self._host.steps, self._host.steps.weights
        summed = self._host.rules.dtypes(layer.uses[0].parameter).summed

        def take(resident: torch.Tensor) -> None:
            gradient, resident.grad = resident.grad, None
            steps.refuse_other_than(made_at)
            if gradient is not None:
                self.current().add(
                    layer, gradient.to_dense() if gradient.is_sparse else gradient, summed
                )

        return take

    def _end(self, finished: BackwardPass) -> None:
        finished.offload(self._host)
        self._host.steps.commit(finished)


def _in_whole(offloaded: OffloadedLayer, store: ParameterStore) -> OffloadedLayer:
    return offloaded._replace(
        layer=replace(offloaded.layer, layer=store.first + offloaded.layer.layer)
    )
