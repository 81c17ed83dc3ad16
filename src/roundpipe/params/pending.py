"""Updates that are decided but not computed yet, hidden from whoever looks.

[Note: pending updates] An optimizer of RoundPipe's own only decides in its ``step``: what to do with which gradient and
which hyper-parameters. The optimizer thread computes that after ``step_fn`` has returned, layer by layer, so that one
pass over memory also writes the working copies. Nobody can tell, because every tensor that a pending update will write
changes its class until that is done: whatever torch is asked to do with such a tensor first has the update computed (on
the optimizer thread) or waits for it (on any other). That is why

[1] an update is not deferred if its tensors' memory is reachable in another way, a view taken earlier for example, or
    if somebody else may write to its gradient;
[2] versions are raised when the update is decided, so a graph that saved the old value refuses to run backward.
"""

import copy
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree


class Update(Protocol):
    """What is to be done to one master and its optimizer state. ``seen``: its gradient is in other hands too."""

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def moments(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def seen(self) -> bool: ...


class UpdateInto(NamedTuple):
    """An update, and the working copy that the same pass is to write, if any."""

    update: Update
    working: torch.Tensor | None


class PendingUpdates:
    """The updates decided in one ``step_fn``. Made, filled and computed by the optimizer thread.

    Args:
        compute: computes updates; together, because many small ones share their threads.
    """

    def __init__(self, compute: Callable[[Sequence[UpdateInto]], None]) -> None:
        self._compute = compute
        self._thread = threading.get_ident()
        self._done = threading.Condition()
        self._updates: dict[int, Update] = {}  # by the id of the master

    def __contains__(self, master: torch.Tensor) -> bool:
        return id(master) in self._updates

    def add(self, updates: Sequence[Update]) -> None:
        """Defers those that nobody can see; computes the others now."""
        written = [tensor for update in updates for tensor in (update.weight, *update.moments)]
        for tensor in [tensor for tensor in written if isinstance(tensor, Held)]:
            settle(tensor)  # because updates of one master build on each other
        torch.autograd.graph.increment_version(written)
        visible = _visible(written)
        at_once = []
        for update in updates:
            own: tuple[Any, ...] = (update.weight, *update.moments)  # their classes change
            if update.seen or (visible and not visible.isdisjoint(map(id, own))):
                at_once.append(UpdateInto(update, None))
                continue
            self._updates[id(update.weight)] = update
            held_by = self, update
            for tensor in own:
                tensor._pending = held_by
                tensor.__class__ = _HELD[type(tensor)]
        if at_once:
            self._compute(at_once)

    def compute(self, wanted: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Computes the pending updates of some masters, each also into the working copy given with it.

        What raises leaves these masters in no defined state; nobody waits for them any longer.
        """
        chosen = [UpdateInto(self._updates.pop(id(master)), working) for master, working in wanted]
        if not chosen:
            return
        written: list[Any] = [tensor for update, _ in chosen for tensor in (update.weight, *update.moments)]
        try:
            with torch._C.DisableTorchFunctionSubclass():  # because only others have to wait
                self._compute(chosen)
        finally:
            with self._done:
                for tensor in written:
                    tensor.__class__ = _FREE[type(tensor)]
                    del tensor._pending
                self._done.notify_all()

    def compute_all(self) -> None:
        self.compute([(update.weight, None) for update in self._updates.values()])

    def settle(self, tensor: torch.Tensor, update: Update) -> None:
        """Returns once the update is computed. Called on whichever thread has touched one of its tensors."""
        if threading.get_ident() == self._thread:
            self.compute([(update.weight, None)])
            return
        with self._done:
            self._done.wait_for(lambda: not isinstance(tensor, Held))


def settle(tensor: Any) -> None:
    """Makes sure that no update of the tensor is pending."""
    # One look, because the optimizer thread may be letting go of it.
    held_by = getattr(tensor, "_pending", None) if isinstance(tensor, Held) else None
    if held_by is not None:
        pending, update = held_by
        pending.settle(tensor, update)


# Reading these does not need the update. Compared by equality: every access makes a new wrapper.
_UNCHANGED = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "nbytes")
) | {torch.Tensor.numel}


class Held:
    """A tensor that an update is going to write."""

    _pending: tuple[PendingUpdates, Update]

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


def hold_as(free: type, held: type[Held]) -> None:
    """Tensors of class ``free`` are of class ``held`` while an update is going to write them."""
    _HELD[free], _FREE[held] = held, free


hold_as(torch.Tensor, HeldTensor)


def _visible(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those whose memory can be reached in another way, or whose class is one of its own.

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
