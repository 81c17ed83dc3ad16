"""An output that stays in microbatches, on the devices that made it, unless somebody looks at it.

Between elements of a module list the model's own code usually just hands an output on. If it does
anything else, it finds the merged tensor it would have got from the plain module.

[Note: a deferred tensor] It is a tensor without memory of its own, so everything written for
tensors takes it for one: ``isinstance``, C++ operators, autograd functions, hooks. What is computed
with it arrives below autograd, in ``__torch_dispatch__``, and works on the merged values, which are
made then. In the graph it is one node above the microbatches. The next engine takes the
microbatches themselves and so bypasses that node, unless somebody has written to the tensor or
waits for its gradient there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...microbatch import merge
from ...microbatch.packed import RoundPipePackedData


class Deferred(torch.Tensor):
    """The rows of ``packed``, one after the other, on the CPU."""

    packed: RoundPipePackedData
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls: type["Deferred"], packed: RoundPipePackedData) -> "Deferred":
        like = _empty(packed, "meta")
        made: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.packed = packed
        made._whole = None
        return made

    # Operations come by __torch_dispatch__ and return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stub leaves the defaults out
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls._merged, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _merged(self) -> torch.Tensor:
        if self._whole is None:
            parts = [value.detach().to("cpu") for value in self.packed]
            self._whole = torch.cat(parts, out=_empty(self.packed, "cpu"))
        return self._whole

    def plain(self) -> torch.Tensor:
        """The merged tensor itself, part of the same graph."""
        return self.view_as(self)

    def is_as_made(self) -> bool:
        """Whether the microbatches still are all there is to it: nobody wrote to it, detached it,
        hung a hook on it."""
        is_in_graph = self.requires_grad == any(value.requires_grad for value in self.packed)
        return (
            is_in_graph
            and self._version == 0
            and not self._backward_hooks
            and not self.retains_grad
        )

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<Deferred: {self.packed!r}>"


def _empty(values: Sequence[torch.Tensor], device: str) -> torch.Tensor:
    """What `torch.cat` makes of ``values``, without the values: its strides are theirs if these all
    are alike."""
    formats = (torch.channels_last, torch.channels_last_3d) if not values[0].is_contiguous() else ()
    alike = (f for f in formats if all(value.is_contiguous(memory_format=f) for value in values))
    shape = (sum(len(value) for value in values), *values[0].shape[1:])
    made = next(alike, torch.contiguous_format)
    return torch.empty(shape, dtype=values[0].dtype, device=device, memory_format=made)


class _Join(torch.autograd.Function):
    """From microbatches to the deferred tensor."""

    @staticmethod
    def forward(ctx: Any, packed: RoundPipePackedData, *values: torch.Tensor) -> Deferred:
        ctx.rows, ctx.devices = packed.rows, [value.device for value in values]
        return Deferred(packed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = zip(gradient.split(ctx.rows), ctx.devices, strict=True)
        return None, *(part.to(device) for part, device in parts)


def defer(packed: RoundPipePackedData) -> Any:
    """The merged form of what an engine left in microbatches, its row-wise tensors deferred, all
    else merged now."""
    packed.synchronize()
    leaves, spec = pytree.tree_flatten(packed[0])
    columns = [leaves, *(pytree.tree_leaves(value) for value in packed[1:])]
    if any(len(column) != len(leaves) for column in columns):
        return merge(list(packed), packed.rows)  # which says what differs
    joined = [
        _join([column[index] for column in columns], packed.rows) for index in range(len(leaves))
    ]
    return pytree.tree_unflatten(joined, spec)


def _join(values: Sequence[Any], rows: tuple[int, ...]) -> Any:
    if all(
        isinstance(value, torch.Tensor) and value.shape[:1] == (count,)
        for value, count in zip(values, rows, strict=True)
    ):
        return _Join.apply(RoundPipePackedData(values, rows), *values)
    return merge(
        [value.to("cpu") if isinstance(value, torch.Tensor) else value for value in values], rows
    )


def packed_again(value: Any) -> Any:
    """For an engine: every deferred output in ``value`` as the microbatches it is, if they all are
    cut alike."""
    deferred = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Deferred)]
    whole = [leaf for leaf in deferred if leaf.is_as_made()]

    def given(leaf: Deferred) -> Any:
        return (
            leaf.packed
            if leaf.is_as_made() and leaf.packed.rows == whole[0].packed.rows
            else leaf.plain()
        )

    return pytree.tree_map_only(Deferred, given, value)


def merge_deferred(value: Any) -> Any:
    """For anybody else: every deferred output in ``value`` merged."""
    return pytree.tree_map_only(Deferred, Deferred.plain, value)
