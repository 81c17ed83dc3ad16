"""The machinery behind one engine: devices with their workers, and what turns passes into a running call."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..device import Device
from ..errors import InternalError
from ..params.gradients import GradientBuffers, GradientRules
from ..params.store import ParameterStore
from ..plan.schedule import Passes, round_robin
from .call import Call, CallSettings, SavedInputs
from .executor import Executor, LayerKnowledge
from .recompute import RandomStreams
from .stage import BlockCompiler, SilentWrites, StageLoader
from .transfer import Boundary
from .worker import Worker


class Pipeline:
    """Devices, one worker thread each, and the round-robin position that carries on from call to call.

    Used by the caller's thread. Holds no reference to the engine.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        store: ParameterStore,
        rules: GradientRules,
        buffers: GradientBuffers,
        condition: threading.Condition,
        is_published: Callable[[int, int], bool],
        *,
        compile: bool,
    ) -> None:
        self.devices = list(devices)
        self.layer_names = [str(index) for index in range(len(layers))]
        self._condition = condition
        self._next_device = 0
        knowledge, silent = LayerKnowledge(), SilentWrites()
        compiler = BlockCompiler(layers) if compile else None
        self._executors = [
            Executor(
                device,
                StageLoader(device, layers, store, rules, compiler, silent),
                buffers,
                self.layer_names,
                knowledge,
                is_published,
            )
            for device in devices
        ]
        self.workers = [Worker(f"roundpipe-worker-{device.name}") for device in devices]

    def streams(self, *, enabled: bool) -> RandomStreams:
        return RandomStreams(self.devices, enabled=enabled)

    def submit(
        self,
        passes: Passes,
        settings: CallSettings,
        streams: RandomStreams,
        *,
        posts: dict[Any, Any],
        saved: SavedInputs | None = None,
    ) -> Call:
        """Starts a call and returns at once.

        Args:
            posts: what its first visits take from the board (inputs, or gradients for a backward round).
            saved: the saved inputs of the forward round this is the backward of.
        """
        schedule = round_robin(
            passes,
            num_devices=len(self.devices),
            num_microbatches=settings.num_microbatches,
            first_device=self._next_device,
        )
        self._next_device = schedule.next_device
        call = Call(
            settings=settings,
            schedule=schedule,
            streams=streams,
            condition=self._condition,
            saved={} if saved is None else saved,
        )
        for key, value in posts.items():
            call.board.post(key, value)
        for executor, worker, actions in zip(self._executors, self.workers, schedule.actions, strict=True):
            # Because the caller may have queued work on its own stream that makes the inputs.
            executor.device.follow_caller()
            worker.submit(lambda executor=executor, actions=actions: executor.run(call, actions))  # type: ignore[misc]
        return call

    def close(self) -> None:
        """Frees the devices and joins the workers, after the calls already submitted."""
        for executor, worker in zip(self._executors, self.workers, strict=True):
            worker.submit(executor.close)
            worker.stop()
        for worker in self.workers:
            worker.join()

    def statistics(self) -> dict[str, int]:
        return {executor.device.name: executor.slot_bytes for executor in self._executors}


def deliver(boundary: Boundary, target: torch.device, *, is_shared: bool) -> Boundary:
    """A call's output on the caller's device, complete. Blocks until the device has made it.

    ``is_shared``: a backward still under way may read it, so that the caller, who may write to it, gets a copy.
    """
    if boundary.source is None or boundary.ready is None:
        raise InternalError("an output without a source device")
    boundary.ready.wait()
    leaves = []
    for leaf in boundary.leaves:
        if isinstance(leaf, torch.Tensor):
            boundary.source.lend_to_caller(leaf)
            leaf = leaf.to(target, copy=is_shared)
        leaves.append(leaf)
    return boundary._replace(leaves=tuple(leaves))
