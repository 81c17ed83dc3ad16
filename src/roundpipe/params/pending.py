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

    def add(self, update: Update) -> None:
        """Defers the update if nobody can see that; else computes it now."""
        tensors = _written(update)
        for tensor in tensors:
            settle(tensor)  # because updates of one master build on each other
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
        if update.seen or not all(type(tensor) in HELD and _is_alone(tensor) for tensor in tensors):
            self._compute([UpdateInto(update, None)])
            return
        self._updates[id(update.weight)] = update
        for tensor in tensors:
            _hold(tensor, self, update)

    def compute(self, wanted: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Computes the pending updates of some masters, each also into the working copy given with it.

        What raises leaves these masters in no defined state; nobody waits for them any longer.
        """
        chosen = [UpdateInto(self._updates[id(master)], working) for master, working in wanted]
        try:
            with torch._C.DisableTorchFunctionSubclass():  # because only others have to wait
                self._compute(chosen)
        finally:
            with self._done:
                for update, _ in chosen:
                    del self._updates[id(update.weight)]
                    for tensor in _written(update):
                        _let_go(tensor)
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
    if isinstance(tensor, Held):
        tensor._settle()


# Reading these does not need the update. Compared by equality: every access makes a new wrapper.
_UNCHANGED = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "nbytes")
) | {torch.Tensor.numel}


class Held:
    """A tensor that an update is going to write."""

    _pending: tuple[PendingUpdates, Update]

    def _settle(self) -> None:
        pending, update = self._pending
        pending.settle(self, update)  # type: ignore[arg-type]

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
        self._settle()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._settle()
        return self.__reduce_ex__(protocol)


class HeldTensor(Held, torch.Tensor):
    """A tensor of optimizer state, held."""


HELD: dict[type, type] = {torch.Tensor: HeldTensor}  # what a tensor's class becomes; the held class comes first


def _hold(tensor: Any, pending: PendingUpdates, update: Update) -> None:
    tensor._pending = pending, update
    tensor.__class__ = HELD[type(tensor)]


def _let_go(tensor: Any) -> None:
    tensor.__class__ = type(tensor).__mro__[2]  # HeldTensor, Held, Tensor
    del tensor._pending


def _written(update: Update) -> tuple[torch.Tensor, ...]:
    return update.weight, *update.moments


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether the tensor is the only way to its memory: views, arrays and storages in others' hands are others."""
    return _references(tensor) == _REFERENCES_ALONE


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_REFERENCES_ALONE = _references(torch.empty(1))
