"""The machinery behind one engine: its layers on the devices of a worker pool, and what turns
passes into a running call."""

import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import InternalError
from ..layers.buffers import BufferCache, KnownBuffers
from ..layers.saved import Kept
from ..layers.snapshot import Writers
from ..params.gradient_memory import GradientBuffers, GradientRules
from ..params.working import ParameterStore
from ..plan.actions import Passes
from ..plan.schedule import round_robin
from ..recompute.random_streams import RandomStreams
from ..transfer.boundaries import Boundary, address_of
from .call import Call, CallSettings
from .changes import ModuleChanges
from .executor import Executor
from .layer_runner import LayerKnowledge
from .loader import StageLoader
from .replica_cache import ReplicaCache
from .worker_pool import WorkerPool


class Pipeline:
    """Runs calls of some layers.

    Used by the caller's thread. Holds no reference to the engine.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        worker_pool: WorkerPool,
        store: ParameterStore,
        rules: GradientRules,
        buffers: GradientBuffers,
        condition: threading.Condition,
        is_written_back: Callable[[int, int], bool],
    ) -> None:
        self.devices = worker_pool.devices
        self.layer_names = [str(index) for index in range(len(layers))]
        self._condition = condition
        self._worker_pool = worker_pool
        knowledge, known_buffers, writers = LayerKnowledge(), KnownBuffers(), Writers()
        self._executors = []
        for device, sender, slots, spills in zip(
            worker_pool.devices,
            worker_pool.senders,
            worker_pool.slots,
            worker_pool.spills,
            strict=True,
        ):
            loader = StageLoader(device, layers, store, sender, slots)
            copies = BufferCache(device, known_buffers)
            self._executors.append(
                Executor(
                    device,
                    loader,
                    ReplicaCache(
                        device,
                        layers,
                        rules,
                        worker_pool.compiler,
                        copies,
                        writers,
                        loader.residency,
                    ),
                    ModuleChanges(device, store, copies),
                    buffers,
                    spills,
                    self.layer_names,
                    knowledge,
                    lambda layer, version: is_written_back(store.first + layer, version),
                )
            )

    def streams(self, *, enabled: bool) -> RandomStreams:
        return RandomStreams(self.devices, enabled=enabled)

    def prepare(
        self,
        passes: Passes,
        settings: CallSettings,
        streams: RandomStreams,
        *,
        posts: dict[Any, Any],
        resident_layers: frozenset[int],
        kept: Kept | None = None,
    ) -> Call:
        """A call that is not started yet.

        Args:
            posts: what its first stage runs take from the mailbox (inputs, or gradients for a
                backward round).
            resident_layers: what stays on the devices when its stage runs are over.
            kept: what was kept by the forward round that this is the backward of.
        """
        schedule = round_robin(
            passes,
            num_devices=len(self.devices),
            num_microbatches=settings.num_microbatches,
            first_device=self._worker_pool.next_device,
            spilled=settings.spilled_layers,
        )
        self._worker_pool.next_device = schedule.next_device
        call = Call(
            settings=settings,
            schedule=schedule,
            resident_layers=resident_layers,
            streams=streams,
            condition=self._condition,
            kept=Kept() if kept is None else kept,
        )
        for key, value in posts.items():
            call.mailbox.post(key, value)
        return call

    def start(self, call: Call) -> None:
        """Hands a call to the workers and returns at once."""
        for executor in self._executors:
            # Because the caller may have queued work on its own stream that makes the inputs.
            executor.device.follow_caller()
        with self._worker_pool.handing_out:
            call.is_started = True
            for executor, worker, actions in zip(
                self._executors, self._worker_pool.workers, call.schedule.actions, strict=True
            ):
                worker.submit(partial(executor.run, call, actions))

    def close(self) -> None:
        """Has the devices freed after the calls already submitted. Returns at once."""
        for executor, worker in zip(self._executors, self._worker_pool.workers, strict=True):
            worker.submit(executor.close)


def deliver(
    boundary: Boundary, target: torch.device | None, shared: Container[int] | None
) -> Boundary:
    """A call's output on the caller's device (None: wherever it is), complete. Blocks until the
    device has made it.

    ``shared``: addresses of memory that a backward may still read, for a layer may return what was
    kept as its input; None: of any. Of that the caller, who may write to it, gets a copy.
    """
    if boundary.source is None or boundary.ready is None:
        raise InternalError("an output without a source device")
    boundary.ready.wait()
    leaves = []
    for leaf in boundary.leaves:
        if isinstance(leaf, torch.Tensor):
            boundary.source.lend_to_caller(leaf)
            # What goes to the host is no memory of the device any more, also of a device that is
            # made of the CPU.
            goes_down = target is not None and target.type == "cpu"
            is_shared = shared is None or address_of(leaf) in shared
            leaf = leaf.to(leaf.device if target is None else target, copy=goes_down or is_shared)
        leaves.append(leaf)
    return boundary._replace(leaves=tuple(leaves))
