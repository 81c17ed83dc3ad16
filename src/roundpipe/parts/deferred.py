"""An output that stays in microbatches, on the devices that made it, unless somebody looks at it.

Between elements of a module list the model's own code usually just hands an output on. If it does anything else, it
finds the merged tensor it would have got from the plain module.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..microbatch import merge
from ..packed import RoundPipePackedData


class Deferred:
    """A tensor to all code but ``isinstance``; ``packed`` to the next engine."""

    def __init__(self, packed: RoundPipePackedData) -> None:
        self.packed = packed
        self._whole: torch.Tensor | None = None

    def merged(self) -> torch.Tensor:
        """On the CPU, rows in the order of the batch; part of the same graph."""
        if self._whole is None:
            self._whole = torch.cat([value.to("cpu") for value in self.packed])
        return self._whole

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = merge_deferred((args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.merged(), name)

    def __repr__(self) -> str:
        return f"<Deferred: {self.packed!r}>"


def _forward_operator(name: str) -> None:
    def operator(self: Deferred, *args: Any) -> Any:
        return getattr(self.merged(), name)(*merge_deferred(args))

    setattr(Deferred, name, operator)


for _name in (
    *(
        f"__{kind}{name}__"
        for kind in ("", "r")
        for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul")
    ),
    *("__neg__", "__abs__", "__invert__", "__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__float__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
):
    _forward_operator(_name)


def defer(packed: RoundPipePackedData) -> Any:
    """The merged form of what an engine left in microbatches, its row-wise tensors deferred, all else merged now."""
    packed.synchronize()
    leaves, spec = pytree.tree_flatten(packed[0])
    columns = [leaves, *(pytree.tree_leaves(value) for value in packed[1:])]
    if any(len(column) != len(leaves) for column in columns):
        return merge(list(packed), packed.rows)  # which says what differs
    joined = [_join([column[index] for column in columns], packed.rows) for index in range(len(leaves))]
    return pytree.tree_unflatten(joined, spec)


def _join(values: Sequence[Any], rows: tuple[int, ...]) -> Any:
    if all(
        isinstance(value, torch.Tensor) and value.shape[:1] == (count,)
        for value, count in zip(values, rows, strict=True)
    ):
        return Deferred(RoundPipePackedData(values, rows))
    return merge([value.to("cpu") if isinstance(value, torch.Tensor) else value for value in values], rows)


def packed_again(value: Any) -> Any:
    """For an engine: every deferred output in ``value`` as the microbatches it is."""
    return pytree.tree_map_only(Deferred, lambda deferred: deferred.packed, value)


def merge_deferred(value: Any) -> Any:
    """For anybody else: every deferred output in ``value`` merged."""
    return pytree.tree_map_only(Deferred, Deferred.merged, value)
