"""Which pages of optimizer state on a disk are in memory while the optimizer passes over it: read
ahead of it and written behind it. docs/internals/state-on-disk.md says by what reasoning.

[Note: pages of state] Everything here is for the optimizer thread, or the caller's while that is
idle. It waits for the disk, never for the threads that it has given work to, but for the writer
where too much is left to be written. That one is the optimizer thread's helper, so it is there for
as long as there are jobs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..memory.state_file import LEAST_BYTES, Span, StateFile
from ..params.placement.held import Held, reachable_otherwise
from ..params.window import Master
from ..system.host_memory import free_host_bytes
from ..threads.worker import Worker
from .context import parameters_of

AHEAD_BYTES = 256 << 20
BEHIND_BYTES = 256 << 20
TOGETHER_BYTES = 64 << 20  # of state that is updated in one call
_CHUNK_BYTES = 16 << 20
KEPT_OF_FREE = 1 / 2
NUM_READERS = 3


class _Piece:
    """A master with the rest of its state, as far as it is in the file."""

    def __init__(self, tensors: Sequence[torch.Tensor], file: StateFile) -> None:
        self.key = id(tensors[0])
        self.spans: list[Span] = []
        self.num_bytes = 0
        self.is_kept = self.is_over = False
        for span in map(file.span_of, tensors):
            if span is not None:
                self.add(span)

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self.num_bytes += span.num_bytes


class StatePages:
    """Passes over state, of which one begins with `begin` and ends with `end`.

    Args:
        file: where the state is.
    """

    def __init__(self, file: StateFile) -> None:
        self.file = file
        helper: Worker | None = None
        readers = []
        for number in range(NUM_READERS):
            helper = Worker(f"roundpipe-state-{number}", helper)
            readers.append(helper)
        self._readers = cycle(readers)
        self.writer = Worker("roundpipe-state-writes", helper)
        self._written = threading.Condition()
        self._unwritten = 0
        self._error: Exception | None = None
        self._begin_pass([], for_writing=False)

    def _begin_pass(self, pieces: list[_Piece], *, for_writing: bool) -> None:
        self._pieces = pieces
        self._places = {piece.key: place for place, piece in enumerate(pieces)}
        self._for_writing = for_writing
        self._left = self._asked = 0  # pieces before these have been let go, and asked for

    def begin(self, order: Iterable[Sequence[torch.Tensor]], *, for_writing: bool) -> None:
        """What follows passes over this state, master by master, each with the moments that are
        passed with it. What was passed before is over."""
        self.end()
        pieces = [_Piece(tensors, self.file) for tensors in order]
        self._begin_pass([piece for piece in pieces if piece.spans], for_writing=for_writing)
        if not self._pieces:
            return
        total = sum(piece.num_bytes for piece in self._pieces)
        room, credit = min(int(free_host_bytes() * KEPT_OF_FREE), total), 0
        for piece in self._pieces:
            credit += piece.num_bytes * room
            piece.is_kept = credit >= piece.num_bytes * total
            credit -= piece.num_bytes * total * piece.is_kept

    def reach(self, masters: Sequence[torch.Tensor]) -> None:
        """These are passed now: returns when their state is in memory. What was before them is
        over.

        Raises:
            OSError: some state could not be written to the disk (or what else failed there).
        """
        if self._error is not None:
            raise self._error
        places = [self._places[id(master)] for master in masters if id(master) in self._places]
        if not places:
            return
        self._leave(min(places))
        self._ask(max(places))
        for piece in map(self._pieces.__getitem__, places):
            for read in self._reads(piece):
                read()

    def end(self) -> None:
        """The pass is over."""
        self._leave(min(self._asked, len(self._pieces)))
        self._begin_pass([], for_writing=False)

    def in_calls(self, updates: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Cuts pairs of a master and something into what is to be computed in one call, with its
        state in memory."""
        some, num_bytes = list[Any](), 0
        for update in updates:
            place = self._places.get(id(update[0]))
            own = 0 if place is None else self._pieces[place].num_bytes
            if some and num_bytes + own > TOGETHER_BYTES:
                self.reach([master for master, *_ in some])
                yield some
                some, num_bytes = [], 0
            some.append(update)
            num_bytes += own
        if some:
            self.reach([master for master, *_ in some])
            yield some

    def _ask(self, place: int) -> None:
        num_bytes = 0
        for ahead in range(place, len(self._pieces)):
            if ahead >= self._asked:
                self._asked = ahead + 1
                for read in self._reads(self._pieces[ahead]):
                    next(self._readers).submit(read)
            num_bytes += self._pieces[ahead].num_bytes if ahead > place else 0
            if num_bytes >= AHEAD_BYTES:
                return

    def _reads(self, piece: _Piece) -> Iterator[Callable[[], None]]:
        for span in piece.spans:
            for offset in range(0, span.num_bytes, _CHUNK_BYTES):
                yield partial(self._read, piece, span, offset, self._for_writing)

    def _read(self, piece: _Piece, span: Span, offset: int, for_writing: bool) -> None:
        was_over = piece.is_over  # a reader may be late
        if was_over:
            return
        self.file.read(span, offset, _CHUNK_BYTES, for_writing=for_writing)
        if piece.is_over and not piece.is_kept:  # it was, perhaps behind the writer
            self._let_go([span])

    def _leave(self, place: int) -> None:
        for piece in self._pieces[self._left : place]:
            piece.is_over = True
            if not piece.is_kept:
                with self._written:
                    self._written.wait_for(lambda: self._unwritten <= BEHIND_BYTES)
                    self._unwritten += piece.num_bytes
                self.writer.submit(partial(self._write, piece))
        self._left = max(self._left, place)

    def _write(self, piece: _Piece) -> None:
        self._let_go(piece.spans)
        with self._written:
            self._unwritten -= piece.num_bytes
            self._written.notify_all()

    def _let_go(self, spans: Iterable[Span]) -> None:
        try:
            for span in spans:
                self.file.let_go(span)
        except Exception as error:  # of any kind, because the optimizer thread waits for the writer
            self._error = error

    # Optimizers that update where they are stepped, and make state as torch does.

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves state that was made elsewhere into the file, and awaits that masters are updated
        in order."""
        order = []
        for master in parameters_of(optimizer):
            if isinstance(master, Master) and master.memory is self.file:
                state = optimizer.state.get(master, {}).values()
                tensors = [value for value in state if isinstance(value, torch.Tensor)]
                for tensor in tensors:
                    self._adopt(tensor)
                order.append((master, *tensors))
        self.begin(order, for_writing=True)

    def zeros_like(self, master: Master, dtype: torch.dtype) -> torch.Tensor:
        """Makes state of a master, which is passed with it from here on."""
        made = self.file.zeros(master.shape, dtype)
        place, span = self._places.get(id(master)), self.file.span_of(made)
        if place is not None and span is not None:
            self._pieces[place].add(span)
        return made

    def _adopt(self, tensor: torch.Tensor) -> None:
        if (
            not isinstance(tensor, Held)
            and tensor.nbytes >= LEAST_BYTES
            and tensor.is_cpu
            and tensor.is_contiguous()
            and self.file.span_of(tensor) is None
            and not reachable_otherwise([tensor])
        ):
            tensor.data = self.file.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def watching(self) -> TorchFunctionMode:
        """A context in which in-place operations on masters say how far the pass is, and
        ``zeros_like`` of one lies in the file."""
        return _Watching(self)


class _Watching(TorchFunctionMode):
    def __init__(self, pages: StatePages) -> None:
        super().__init__()
        self._pages = pages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, Master) and first.memory is self._pages.file:
            settings = kwargs or {}
            if func is torch.zeros_like and settings.keys() <= {"dtype", "memory_format"}:
                return self._pages.zeros_like(first, settings.get("dtype") or first.dtype)
            name = getattr(func, "__name__", "")
            if name.endswith("_") and not name.endswith("__") and not isinstance(first, Held):
                self._pages.reach([first])
        return func(*args, **(kwargs or {}))
