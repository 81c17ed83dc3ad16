"""Frozen weights in mapped files: read ahead of the senders, and let go behind them where they do
not all fit into memory. docs/internals/mapped-weights.md says by what reasoning.

[Note: one decider] All state belongs to one thread, whose jobs the devices' workers and senders
submit; readers get chunks from it. Nobody ever waits for these threads, so they may be late, wrong
or gone: then weights are read by whoever copies them.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, zip_longest

from ..errors import ConfigError
from ..memory.mmap import FileMappings, refuse_cut
from ..memory.page_cache import PageCache, Stretch
from ..memory.pinning import HostMemory
from ..params.working import LayerParameters, ParameterStore
from ..threads.weak_registry import WeakRegistry
from ..threads.worker import Worker

NUM_READERS = 4
CHUNK_BYTES = 16 * 2**20
_LEAST_AHEAD = 256 * 2**20
KEPT_OF_FREE = 7 / 8  # of available memory, for weights from files
_MOST_ORDERS = 64

Order = tuple[int, ...]  # layers as one device needs them, numbered as in the whole store


class ReadAhead:
    """Everything may be called by any thread and returns at once.

    Args:
        mappings: made after the weights were mapped.
        cache: the system, or who stands for it in a test.

    Raises:
        ConfigError: a file is shorter than what is mapped of it.
    """

    def __init__(
        self, store: ParameterStore, mappings: FileMappings, cache: PageCache | None = None
    ) -> None:
        self._store = store
        self._mappings = mappings
        self._cache = cache or PageCache()
        self._stretches = self._found(refuses_cut=True)
        self._everything = frozenset(chain(*self._stretches))
        self.num_bytes = _bytes_in(self._everything)
        self._damaged: str | None = None
        self._is_resting = False
        # The decider's, all of the below.
        self._now: dict[str, deque[int]] = {}
        self._expected: dict[str, Order] = {}
        self._orders: dict[str, Order] = {}
        self._following: dict[tuple[str, Order], Order] = {}
        self._room = 0
        self._kept: Collection[Stretch] = ()
        self._cached: set[Stretch] = set()  # kept, and read since
        self._window: dict[Stretch, None] = {}
        self.workers: list[Worker] = []
        if self.num_bytes:
            names = ["pages", *(f"pages-{number}" for number in range(NUM_READERS))]
            self.workers = [Worker(f"roundpipe-{name}") for name in names]
            self._readers = cycle(self.workers[1:])
            _everyone.add(self)

    def __repr__(self) -> str:
        kept = sum(stretch.num_bytes for stretch in self._kept)
        return (
            f"<ReadAhead: {self.num_bytes / 2**20:.1f} MiB mapped, {kept / 2**20:.1f} kept, "
            f"{len(self._window)} tensors in the window>"
        )

    def begin(self, device: str, layers: Sequence[LayerParameters]) -> None:
        """A call begins in which ``device`` needs these layers, in this order."""
        if self.workers:
            order = tuple(layer.uses[0].layer for layer in layers if layer.uses)
            self.workers[0].submit(partial(self._begin, device, order))

    def passed(self, device: str, layer: LayerParameters) -> None:
        """The layer's weights have been copied."""
        if self.workers and layer.uses and not self._is_resting:
            self.workers[0].submit(partial(self._passed, device, layer.uses[0].layer))

    def drop(self, device: str) -> None:
        """Nobody knows what ``device`` will need."""
        if self.workers and not self._is_resting:
            self.workers[0].submit(partial(self._drop, device))

    def check(self) -> None:
        """Raises ConfigError if a file has turned out to be shorter than what is mapped of it."""
        if self._damaged is not None:
            raise ConfigError(
                f"{self._damaged} was cut or cannot be read any more while weights are mapped from "
                "it; restore it and load the model again"
            )

    def stop(self) -> None:
        """Ends the threads. Whoever wants to know that they are gone joins ``workers``."""
        for worker in self.workers[:1]:
            worker.submit(self._end)
        for worker in self.workers:
            worker.stop()

    # What the decider does.

    def _begin(self, device: str, order: Order) -> None:
        before = self._orders.get(device)
        if before is not None:
            if len(self._following) >= _MOST_ORDERS:
                self._following.clear()
            self._following[device, before] = order
        self._orders[device] = order
        available = int(self._cache.room() * KEPT_OF_FREE)
        if sum(other.num_bytes for other in _everyone) <= available:
            new = () if self._cached >= self._everything else order
            self._now[device] = deque(i for i in new if not self._cached >= set(self._of(i)))
            self._expected[device] = ()
            self._room = available
            self._kept = self._everything
        else:
            self._stretches = self._found()
            self._everything = frozenset(chain(*self._stretches))
            self.num_bytes = _bytes_in(self._everything)
            self._now[device] = deque(order)
            self._expected[device] = self._following.get((device, order), order)
            everything = sum(other.num_bytes for other in _everyone)
            self._room = available * self.num_bytes // max(everything, 1)
            self._kept = kept_of(self._stretches, self._visits(), self._room - self._passing())
        self._go_on()

    def _passed(self, device: str, layer: int) -> None:
        now = self._now.get(device, deque())
        if layer not in now:
            return  # because only adapters of a layer that stays on the device went up
        while now.popleft() != layer:
            pass
        for stretch in self._of(layer):
            if stretch in self._kept:
                self._cached.add(stretch)
            else:
                self._cached.discard(stretch)
        self._go_on()

    def _drop(self, device: str) -> None:
        self._now[device], self._expected[device] = deque(), ()
        self._go_on()

    def _end(self) -> None:
        self._window, self.num_bytes = {}, 0  # chunks that wait are not read any more

    def _go_on(self) -> None:
        """Reads what comes into the window and lets go what leaves it."""
        window = dict.fromkeys(self._coming())
        gone = [stretch for stretch in self._window if stretch not in window]
        new = [stretch for stretch in window if stretch not in self._window]
        self._window = window
        for stretch in new:
            for offset in range(0, stretch.num_bytes, CHUNK_BYTES):
                next(self._readers).submit(partial(self._read, stretch, offset))
        for stretch in gone:
            if stretch not in self._kept:
                self._cache.let_go(stretch)
        self._is_resting = not window

    def _coming(self) -> Iterator[Stretch]:
        """From what the senders copy now to as far as is read ahead."""
        num_bytes, most = 0, self._ahead()
        seen = set[Stretch]()
        coming = (chain(self._now[device], self._expected[device]) for device in self._now)
        for layer in chain.from_iterable(zip_longest(*coming)):
            for stretch in () if layer is None else self._of(layer):
                if stretch not in seen:
                    seen.add(stretch)
                    num_bytes += 0 if stretch in self._cached else stretch.num_bytes
                    yield stretch
            if num_bytes >= most:
                return

    def _ahead(self) -> int:
        largest = max(map(_bytes_in, self._stretches))
        return min(max(2 * largest * max(len(self._now), 1), _LEAST_AHEAD), self._room // 4)

    def _passing(self) -> int:
        """The most that is in memory of what is not kept."""
        return self._ahead() + max(map(_bytes_in, self._stretches))

    def _visits(self) -> Counter[Stretch]:
        visits = Counter[Stretch]()
        for order in self._orders.values():
            for layer in order:
                visits.update(self._of(layer))
        return visits

    def _of(self, layer: int) -> Sequence[Stretch]:
        return self._stretches[layer]

    def _found(self, *, refuses_cut: bool = False) -> list[list[Stretch]]:
        """What of each layer's frozen weights lies in files. Weights may have been replaced since
        the last time."""
        found: list[list[Stretch]] = []
        for layer in self._store.layers:
            found.append([])
            frozen = (use for use in layer.uses if not use.parameter.requires_grad)
            for use in frozen if layer.num_bytes else ():
                for _, source in use.sources:
                    mapping = self._mappings.mapping_of(source)
                    # What lies in /dev is memory by a name: there is nothing to read.
                    if mapping is not None and not mapping.path.startswith("/dev/"):
                        if refuses_cut:
                            refuse_cut(mapping, source)
                        found[-1].append(Stretch.of(source, mapping))
        return found

    # What readers do.

    def _read(self, stretch: Stretch, offset: int) -> None:
        if stretch in self._window:
            size = min(CHUNK_BYTES, stretch.num_bytes - offset)
            if not self._cache.read(stretch.start + offset, size):
                self._damaged = stretch.path


_everyone = WeakRegistry[ReadAhead]()


def make_read_ahead(store: ParameterStore, memory: HostMemory) -> ReadAhead | None:
    """None where weights do not stay where they are, or none lies in a file."""
    if not memory.leaves_weights:
        return None
    made = ReadAhead(store, FileMappings.now())
    return made if made.num_bytes else None


def kept_of(
    layers: Sequence[Sequence[Stretch]], visits: Mapping[Stretch, int], room: int
) -> frozenset[Stretch]:
    """What stays in memory from call to call: what is visited most, at most ``room`` bytes. Of
    what is visited equally often and does not fit, an even share of every part of the model."""
    kept, room = set[Stretch](), max(room, 0)
    everything = dict.fromkeys(chain(*layers))
    for count in sorted({visits[stretch] for stretch in everything} - {0}, reverse=True):
        alike = [stretch for stretch in everything if visits[stretch] == count]
        total, credit = _bytes_in(alike), 0
        for stretch in alike:
            credit += stretch.num_bytes * min(room, total)
            if credit >= stretch.num_bytes * total:
                credit -= stretch.num_bytes * total
                kept.add(stretch)
        room = max(0, room - total)
    return frozenset(kept)


def _bytes_in(stretches: Collection[Stretch]) -> int:
    return sum(stretch.num_bytes for stretch in stretches)
