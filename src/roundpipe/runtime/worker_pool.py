"""The devices of one model and what its pipelines share there: a worker thread each, the way up,
slots, and compiled forwards."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from ..device import Device
from ..layers.buffers import BufferCache, KnownBuffers
from ..layers.compiler import BlockCompiler
from ..layers.snapshot import Writers
from ..memory.blocks import HostBlocks
from ..memory.pinning import HostMemory
from ..memory.slots import SlotPool
from ..params.dtypes import GradientRules
from ..params.gradient_buffers import GradientBuffers
from ..params.working import ParameterStore
from ..threads.worker import Worker
from ..transfer.read_ahead import ReadAhead
from ..transfer.sender import make_sender
from ..transfer.spill import Spills
from .call import Call
from .capture.layers import CapturedLayers
from .changes import ModuleChanges
from .executor import Executor
from .layer_runner import LayerKnowledge
from .loader import StageLoader
from .replica_cache import ReplicaCache


class WorkerPool:
    """One worker per device, in the order of ``devices``, and the round-robin position that carries
    on from call to call.

    Used by the caller's thread; slots, senders and the compiler belong to the workers. Holds no
    reference to an engine.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        store: ParameterStore,
        memory: HostMemory,
        compiler: BlockCompiler,
        read_ahead: ReadAhead | None = None,
        *,
        captures: bool | None = None,
    ) -> None:
        self.devices = list(devices)
        self.compiler = compiler  # one, because like layers may be in many parts
        self._captures = captures
        self.next_device = 0
        # Held while a call is handed out. Calls of two threads, in another order on each device,
        # would wait for each other.
        self._handing_out = threading.Lock()
        self.slots = [SlotPool(device) for device in devices]
        self.blocks = HostBlocks(memory)
        self.spills = [Spills(device, self.blocks) for device in devices]
        self.read_ahead = read_ahead
        self.senders = [make_sender(device, store, memory, self.read_ahead) for device in devices]
        self.workers = [
            Worker(f"roundpipe-worker-{device.name}", helper=sender.helper)
            for device, sender in zip(devices, self.senders, strict=True)
        ]
        self._buffers: list[KnownBuffers] = []
        for worker, device in zip(self.workers, devices, strict=True):
            worker.submit(device.enter_thread)

    def executors(
        self,
        layers: Sequence[nn.Module],
        store: ParameterStore,
        rules: GradientRules,
        buffers: GradientBuffers,
        is_written_back: Callable[[int, int], bool],
        layer_names: Sequence[str],
    ) -> list[Executor]:
        """For ``layers``, one per device."""
        knowledge, known_buffers, writers = LayerKnowledge(), KnownBuffers(), Writers()
        self._buffers.append(known_buffers)
        executors = []
        for device, sender, slots, spills in zip(
            self.devices, self.senders, self.slots, self.spills, strict=True
        ):
            loader = StageLoader(device, layers, store, sender, slots, self.read_ahead)
            copies = BufferCache(device, known_buffers)
            replicas = ReplicaCache(
                device, layers, rules, self.compiler, copies, writers, loader.keeps
            )
            executors.append(
                Executor(
                    device,
                    loader,
                    replicas,
                    ModuleChanges(device, store, copies),
                    buffers,
                    spills,
                    layer_names,
                    knowledge,
                    CapturedLayers(device, layers, slots, self._captures),
                    lambda layer, version: is_written_back(store.first + layer, version),
                )
            )
        return executors

    def start(self, call: Call, executors: Sequence[Executor]) -> None:
        """Hands a call to the workers and returns at once."""
        for device in self.devices:
            # Because the caller may have queued work on its own stream that makes the inputs.
            device.follow_caller()
        with self._handing_out:
            call.is_started = True
            for executor, worker, actions in zip(
                executors, self.workers, call.schedule.actions, strict=True
            ):
                worker.submit(partial(executor.run, call, actions))

    def forget_buffers(self) -> None:
        """The user's modules may have other buffers than the devices have seen."""
        for known in self._buffers:
            known.forget_values()

    def free(self, executors: Sequence[Executor]) -> None:
        """Has what these hold on devices freed after the calls already submitted. Returns at
        once."""
        for executor, worker in zip(executors, self.workers, strict=True):
            worker.submit(executor.close)

    def wait(self) -> None:
        """Blocks until the workers have done what was submitted."""
        for worker in self.workers:
            done = threading.Event()
            worker.submit(done.set)
            done.wait()

    def close(self) -> None:
        """Ends the workers after the jobs already submitted, among them the ends of all pipelines,
        and waits for it."""
        for worker, sender in zip(self.workers, self.senders, strict=True):
            worker.submit(sender.close)
            worker.stop()
        for worker in self.workers:
            worker.join()
        if self.read_ahead is not None:
            self.read_ahead.stop()
            for worker in self.read_ahead.workers:
                worker.join()
        self.blocks.clear()

    def statistics(self) -> dict[str, int]:
        """Bytes in slots by device."""
        return {
            device.name: slots.num_bytes
            for device, slots in zip(self.devices, self.slots, strict=True)
        }
