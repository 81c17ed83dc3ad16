"""Updates that are decided but not computed yet, hidden from whoever looks.

[Note: pending updates] An optimizer of RoundPipe's own only decides in its ``step``: what to do
with which gradient and which hyper-parameters. The optimizer thread computes that after ``step_fn``
has returned, layer by layer, so that one pass over memory also writes the working copies. Nobody
can tell, because every tensor that a pending update will write changes its class until that is
done: whatever torch is asked to do with such a tensor first has the update computed (on the
optimizer thread) or waits for it (on any other). That is why

[1] an update is not deferred if its tensors' memory is reachable in another way, a view taken
    earlier for example, or if somebody else may write to its gradient;
[2] versions are raised when the update is decided, so a graph that saved the old value refuses to
    run backward.

In the same way the tensors of a master whose newest values are on a device are held until somebody
looks: then the values are fetched. See [Note: device states].
"""

import copy
import operator
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree


class Update(Protocol):
    """What is to be done to one master and its optimizer state. ``seen``: its gradient is in other
    hands too."""

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def moments(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def seen(self) -> bool: ...
    @property
    def can_move(self) -> bool:
        """Whether it can be computed on a device."""
        ...

    def moved(self, weight: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> "Update":
        """The same to other tensors, which are on a device."""
        ...


class UpdateInto(NamedTuple):
    """An update, and the working copy that the same pass is to write, if any."""

    update: Any
    working: torch.Tensor | None


class Holder(Protocol):
    """Why a tensor is held."""

    def settle(self, tensor: torch.Tensor) -> None:
        """Returns once this is not the reason any more. Called on whichever thread has touched the
        tensor."""
        ...

    def pass_on(self, decided: "Decided") -> bool:
        """Has an update hold its tensors instead, if they are just these."""
        ...


class Away(Holder, Protocol):
    """Holds a master and its moments because their newest values are on a device."""

    @property
    def place(self) -> "Place": ...
    def moved(self, update: Update) -> Update:
        """The update of the tensors on the device."""
        ...

    def take_back(self, tensors: Sequence[Any]) -> None:
        """Holds them again, when the update that it has passed them on to is computed."""
        ...


class Place(Protocol):
    """Where updates are computed for whatever is there."""

    def adopt(self, updates: Sequence[Update]) -> Sequence[Away | None]:
        """Takes the tensors of updates there, together because that takes less time; None for which
        it cannot be."""
        ...

    def work(self) -> AbstractContextManager[None]:
        """For the time in which updates of what is there are computed, and working copies there
        written."""
        ...


class Decided:
    """Holds the tensors of an update that is decided. ``away``: where their newest values are, if
    not on the host."""

    def __init__(self, pending: "PendingUpdates", update: Update) -> None:
        self.update = update
        self.away: Away | None = None
        self._pending = pending

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.update.weight, *self.update.moments

    def settle(self, tensor: torch.Tensor) -> None:
        self._pending.settle(tensor, self)

    def pass_on(self, decided: "Decided") -> bool:
        return False  # because updates of one master build on each other

    def let_go(self) -> None:
        if self.away is not None:
            self.away.take_back(self.tensors)
            return
        for tensor in self.tensors:
            free(tensor)


class PendingUpdates:
    """The updates decided in one ``step_fn``. Made, filled and computed by the optimizer thread.

    Args:
        compute: computes updates; together, because many small ones share their threads.
    """

    def __init__(self, compute: Callable[[Sequence[UpdateInto]], None]) -> None:
        self._compute = compute
        self._thread = threading.get_ident()
        self._done = threading.Condition()
        self._decided: dict[int, Decided] = {}  # by the id of the master

    def __contains__(self, master: torch.Tensor) -> bool:
        return id(master) in self._decided

    def of(self, master: torch.Tensor) -> Update:
        return self._decided[id(master)].update

    def add(self, updates: Sequence[Update]) -> None:
        """Defers those that nobody can see; computes the others now."""
        others = [update for update in updates if update.seen or not self._has_taken_over(update)]
        written = [tensor for update in others for tensor in (update.weight, *update.moments)]
        for tensor in [tensor for tensor in written if isinstance(tensor, Held)]:
            settle(tensor)
        torch.autograd.graph.increment_version(
            [t for update in updates for t in (update.weight, *update.moments)]
        )
        visible = _visible(written)
        at_once = []
        for update in others:
            own: tuple[Any, ...] = (update.weight, *update.moments)
            if update.seen or (visible and not visible.isdisjoint(map(id, own))):
                at_once.append(UpdateInto(update, None))
                continue
            self._decided[id(update.weight)] = decided = Decided(self, update)
            for tensor in own:
                hold(tensor, decided)
        if at_once:
            self._compute(at_once)

    def _has_taken_over(self, update: Update) -> bool:
        """Of tensors whose values are away nobody has a view: taking one would have fetched
        them."""
        holder = holder_of(update.weight)
        decided = Decided(self, update)
        if holder is None or not holder.pass_on(decided):
            return False
        self._decided[id(update.weight)] = decided
        return True

    def compute(
        self, wanted: Iterable[tuple[torch.Tensor, torch.Tensor | None]], place: Place | None = None
    ) -> None:
        """Computes the pending updates of some masters, each also into the working copy given with
        it.

        At ``place``, where that takes them; and in any case where their newest values are. What
        raises leaves these masters in no defined state; nobody waits for them any longer.
        """
        chosen = [(self._decided.pop(id(master)), working) for master, working in wanted]
        if not chosen:
            return
        try:
            with torch._C.DisableTorchFunctionSubclass():  # because only others have to wait
                self._compute_where(chosen, place)
        finally:
            with self._done:
                for decided, _ in chosen:
                    decided.let_go()
                self._done.notify_all()

    def _compute_where(
        self, chosen: Sequence[tuple[Decided, torch.Tensor | None]], place: Place | None
    ) -> None:
        here: list[UpdateInto] = []
        there: dict[Place, list[tuple[Away, UpdateInto]]] = defaultdict(list)
        new = [] if place is None else [decided for decided, _ in chosen if decided.away is None]
        if place is not None and new:
            for decided, away in zip(
                new, place.adopt([decided.update for decided in new]), strict=True
            ):
                decided.away = away
        for decided, working in chosen:
            update = UpdateInto(decided.update, working)
            if decided.away is None:
                here.append(update)
            else:
                there[decided.away.place].append((decided.away, update))
        jobs: list[Callable[[], None]] = [
            partial(self._compute_there, *each) for each in there.items()
        ]
        if here:
            jobs.append(partial(self._compute_here, here, place))
        do_all(jobs)

    def _compute_there(self, where: Place, updates: Sequence[tuple[Away, UpdateInto]]) -> None:
        with (
            where.work()
        ):  # also for gradients that are brought there, because their memory is freed again
            self._compute(
                [UpdateInto(away.moved(update), working) for away, (update, working) in updates]
            )

    def _compute_here(self, updates: Sequence[UpdateInto], place: Place | None) -> None:
        with (
            nullcontext() if place is None else place.work()
        ):  # because that is where working copies may be
            self._compute(updates)

    def compute_all(self) -> None:
        self.compute([(decided.update.weight, None) for decided in self._decided.values()])

    def settle(self, tensor: torch.Tensor, decided: Decided) -> None:
        """Returns once the update is computed. Called on whichever thread has touched one of its
        tensors."""
        if threading.get_ident() == self._thread:
            self.compute([(decided.update.weight, None)])
            return
        with self._done:
            self._done.wait_for(lambda: holder_of(tensor) is not decided)


def do_all(jobs: Iterable[Callable[[], None]]) -> None:
    """One that raises keeps none of the others from being done: the first error is raised when they
    are."""
    first_error: Exception | None = None
    for job in jobs:
        try:
            job()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        try:
            raise first_error
        finally:
            first_error = None  # because its traceback has this frame, which would keep it


def holder_of(tensor: Any) -> Holder | None:
    """Why the tensor is held; None if it is not."""
    # One look, because another thread may be letting go of it.
    return getattr(tensor, "_holder", None) if isinstance(tensor, Held) else None


def settle(tensor: Any) -> None:
    """Makes sure that the tensor's value is the newest and in its memory."""
    while (holder := holder_of(tensor)) is not None:
        holder.settle(tensor)


def hold(tensor: Any, holder: Holder) -> None:
    """Whoever touches the tensor has ``holder`` settle it first."""
    tensor._holder = holder
    tensor.__class__ = _HELD[type(tensor)]


def free(tensor: Any) -> None:
    """Ends that."""
    tensor.__class__ = _FREE[type(tensor)]
    del tensor._holder


# Reading these does not need the update. Compared by equality: every access makes a new wrapper.
_UNCHANGED = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "nbytes")
) | {torch.Tensor.numel}


class Held:
    """A tensor that an update is going to write, or whose value is on a device."""

    _holder: Holder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNCHANGED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs)):
            settle(leaf)
        return func(*args, **(kwargs or {}))

    # Parameters do these without asking __torch_function__.

    def __deepcopy__(self, memo: Any) -> Any:
        settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle(self)
        return self.__reduce_ex__(protocol)


class HeldTensor(Held, torch.Tensor):
    """A tensor of optimizer state, held."""


_HELD: dict[type, type] = {}  # what a tensor's class becomes
_FREE: dict[type, type] = {}


def hold_as(plain: type, held: type[Held]) -> None:
    """Tensors of class ``plain`` are of class ``held`` while they are held."""
    _HELD[plain], _FREE[held] = held, plain


hold_as(torch.Tensor, HeldTensor)


def _visible(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those whose memory can be reached in another way, or whose class is one of its
    own.

    Views, arrays and storages in others' hands are others' ways.
    """
    references = _references(tensors)
    if set(references) <= {_REFERENCES_ALONE} and set(map(type, tensors)) <= _HELD.keys():
        return set()
    return {
        id(tensor)
        for tensor, counts in zip(tensors, references, strict=True)
        if counts != _REFERENCES_ALONE or type(tensor) not in _HELD
    }


def _references(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """How often each one's storage is referred to, from Python and in all."""
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    uses = map(torch._C._storage_Use_Count, map(operator.attrgetter("_cdata"), storages))
    return list(zip(map(sys.getrefcount, storages), uses, strict=True))


[_REFERENCES_ALONE] = _references([torch.empty(1)])
