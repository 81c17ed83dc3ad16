"""The devices of one model and what its pipelines share there: a worker thread each, the way up,
slots, and compiled forwards."""

import threading
from collections.abc import Sequence

from ..device import Device
from ..layers.compiler import BlockCompiler
from ..memory.blocks import HostBlocks
from ..memory.pinning import HostMemory
from ..memory.slots import SlotPool
from ..params.working import ParameterStore
from ..threads.worker import Worker
from ..transfer.sender import make_sender
from ..transfer.spill import Spills


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
    ) -> None:
        self.devices = list(devices)
        self.compiler = compiler  # one, because like layers may be in many parts
        self.next_device = 0
        # Held while a call is handed out. Calls of two threads, in another order on each device,
        # would wait for each other.
        self.handing_out = threading.Lock()
        self.slots = [SlotPool(device) for device in devices]
        self.blocks = HostBlocks(memory)
        self.spills = [Spills(device, self.blocks) for device in devices]
        self.senders = [make_sender(device, store, memory) for device in devices]
        self.workers = [
            Worker(f"roundpipe-worker-{device.name}", helper=sender.helper)
            for device, sender in zip(devices, self.senders, strict=True)
        ]
        for worker, device in zip(self.workers, devices, strict=True):
            worker.submit(device.enter_thread)

    def close(self) -> None:
        """Ends the workers after the jobs already submitted, among them the ends of all pipelines,
        and waits for it."""
        for worker, sender in zip(self.workers, self.senders, strict=True):
            worker.submit(sender.close)
            worker.stop()
        for worker in self.workers:
            worker.join()
        self.blocks.clear()

    def statistics(self) -> dict[str, int]:
        """Bytes in slots by device."""
        return {
            device.name: slots.num_bytes
            for device, slots in zip(self.devices, self.slots, strict=True)
        }
