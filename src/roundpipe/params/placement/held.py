"""Tensors whose newest value is not in their memory: whoever touches one has it put there first.

While a tensor is held its class is another one, of which torch asks ``__torch_function__`` first.
That is not enough for memory that can be reached in another way: see `reachable_otherwise`.
"""

import copy
import operator
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Holder(Protocol):
    """Why a tensor is held."""

    def settle(self, tensor: torch.Tensor) -> None:
        """Returns once this is not the reason any more. Called on whichever thread has touched the
        tensor."""
        ...


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
    """A tensor while it is held."""

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
    """A tensor of optimizer state while it is held."""


_HELD: dict[type, type] = {}  # what a tensor's class becomes
_FREE: dict[type, type] = {}


def hold_as(plain: type, held: type[Held]) -> None:
    """Tensors of class ``plain`` are of class ``held`` while they are held."""
    _HELD[plain], _FREE[held] = held, plain


hold_as(torch.Tensor, HeldTensor)


def reachable_otherwise(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those whose memory others have a view, an array or the storage of, or whose class
    is one of their own."""
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
