"""Adapters of single parameters (PEFT's ``target_parameters``, those of stacked experts), without
ever making the weight that they add up to.

PEFT folds the adapter into the whole stack of experts, by a parametrization. Its sum is as large as
the weight, is kept until the backward, and waits in a cache that all threads share. Here the
parameter's place is taken by an `AdaptedWeight` while the layer runs, whatever the layer does with
it: ``x (W + L R)`` is ``x W + (x L) R``, for each group of tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from .product import grouped_product

_OF_NUMBERS = (torch.int64, torch.int32)  # of bool and uint8 are masks
_ALIGNMENT = 16  # bytes; kernels of grouped products want rows that are a multiple of it


class Factors(NamedTuple):
    """What an adapter adds to a weight, (..., rows, columns): ``scaling * left @ right``."""

    left: torch.Tensor  # (..., rows, rank)
    right: torch.Tensor  # (..., rank, columns)
    scaling: float

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Factors":
        return Factors(change(self.left), change(self.right), self.scaling)

    def transposed(self) -> "Factors":
        return Factors(self.right.transpose(-2, -1), self.left.transpose(-2, -1), self.scaling)


class AdaptedWeight:
    """Stands for ``weight`` with ``factors`` added, (..., rows, columns), where torch is given it.

    Products with it are made of products with its parts. Its size, dtype and the like are the
    weight's. Whatever else is done with it is done with the sum.
    """

    def __init__(self, weight: torch.Tensor, factors: Sequence[Factors]) -> None:
        self._weight = weight
        self._factors = factors

    def __getattr__(self, name: str) -> Any:
        shares = name in ("shape", "size", "dim", "ndim", "dtype", "device", "data_ptr", "is_cuda")
        return getattr(self._weight if shares else self.summed(), name)

    def __getitem__(self, index: Any) -> Any:
        """An expert, or those of a tensor of numbers; anything else is taken of the sum."""
        has_numbers = isinstance(index, int) or getattr(index, "dtype", None) in _OF_NUMBERS
        if not has_numbers or self._weight.ndim != 3:
            return self.summed()[index]
        made = [factors.each(lambda part: part[index]) for factors in self._factors]
        return AdaptedWeight(self._weight[index], made)

    def transpose(self, dim0: int, dim1: int) -> Any:
        if {dim0 % self._weight.ndim, dim1 % self._weight.ndim} != {
            self._weight.ndim - 2,
            self._weight.ndim - 1,
        }:
            return self.summed().transpose(dim0, dim1)
        made = [factors.transposed() for factors in self._factors]
        return AdaptedWeight(self._weight.transpose(dim0, dim1), made)

    def summed(self) -> torch.Tensor:
        """The weight that there never has to be."""
        made = self._weight
        for left, right, scaling in self._factors:
            made = made + scaling * (left @ right)
        return made

    def product(self, multiply: Callable[..., torch.Tensor], input: torch.Tensor) -> torch.Tensor:
        """What ``multiply(input, weight)`` gives, where that is linear in both."""
        made = multiply(input, self._weight)
        for left, right, scaling in self._factors:
            inner = multiply(input, left)
            made.add_(multiply(inner if scaling == 1 else inner * scaling, right))
        return made

    def grouped_product(self, input: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns the product with ``input`` (rows, width), each row with the matrix of its group.
        ``ends`` (groups,) says where each group's rows end."""
        first, *others = self._factors
        if others:  # as one adapter with the ranks of all
            lefts = [factors.left * factors.scaling for factors in self._factors]
            left = torch.cat(lefts, -1)
            right = torch.cat([factors.right for factors in self._factors], -2)
            first = Factors(left, right, 1.0)
        left, right = _aligned(first.left, -1), _aligned(first.right, -2)
        return grouped_product(input, self._weight, ends, (left, right), first.scaling)

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _applied(func, args, kwargs or {})


_MATMUL = (
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
)


def _of_sum(name: str) -> Callable[..., Any]:
    """Makes the operator of that name. Python looks for those in the class alone."""
    return lambda self, *others: getattr(self.summed(), name)(*others)


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
    *("neg", "abs", "len", "eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(AdaptedWeight, f"__{_name}__", _of_sum(f"__{_name}__"))


def _applied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stands = [] if kwargs else [isinstance(value, AdaptedWeight) for value in args]
    if func in _MATMUL and stands == [False, True] and args[0].ndim > 1:
        return args[1].product(func, args[0])
    if func is torch.nn.functional.linear:
        return _linear(*args, **kwargs)
    if func is torch.bmm and stands == [True, False]:  # (n, r, c) @ (n, c, 1)
        turned = args[0].transpose(-2, -1).product(torch.bmm, args[1].transpose(-2, -1))
        return turned.transpose(-2, -1)
    args, kwargs = pytree.tree_map(_plain, (args, kwargs))
    return func(*args, **kwargs)


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, AdaptedWeight):
        return torch.nn.functional.linear(_plain(input), weight, _plain(bias))
    made: torch.Tensor = weight.transpose(-2, -1).product(torch.matmul, input)
    return made if bias is None else made + bias


def _plain(value: Any) -> Any:
    return value.summed() if isinstance(value, AdaptedWeight) else value


def _aligned(factor: torch.Tensor, dim: int) -> torch.Tensor:
    """With zeros added to the rank, which is its ``dim``, so that a grouped product takes it. It is
    the factor itself where there is nothing to add, because `pad` would copy it all the same, and
    where its rows or its columns lie in a row, as those of a weight do."""
    missing = -factor.shape[dim] % (_ALIGNMENT // factor.element_size())
    if missing:
        factor = pad(factor, (0, missing) if dim == -1 else (0, 0, 0, missing))
    lies_in_columns = factor.mT.is_contiguous() and missing == 0 and _fits(factor.shape[-2], factor)
    return factor if lies_in_columns else factor.contiguous()


def _fits(length: int, factor: torch.Tensor) -> bool:
    """Says whether so many numbers in a row end where a grouped product wants the next to begin."""
    return length * factor.element_size() % _ALIGNMENT == 0


def refuse_other_layouts(layers: Iterable[nn.Module]) -> None:
    """Looks whether adapters of single parameters are for these.

    Raises:
        ConfigError: one is for experts of another number or layout.
    """
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if _is_adapter(module):
                _refuse_other_layout(f"layer {index}, {name}.{module.parameter_name}", module)


def refuse_to_unmerge(replica: nn.Module) -> None:
    """Looks whether PEFT's forward would take merged adapters out of the weights again.

    It would do so with the device's copy of the weights, but note it in a list that replicas share
    with the user's modules, whose weights would have the adapters still.

    Raises:
        ConfigError: adapters are merged and switched off.
    """
    for name, module in replica.named_modules():
        merged = getattr(module, "merged_adapters", None)
        if merged and getattr(module, "disable_adapters", False):
            raise ConfigError(
                f"{name}: the adapters {merged} are merged into the weights and switched off, and "
                "PEFT would take them out in the forward, which has a copy of the weights; call "
                "unmerge_adapter() before they are switched off"
            )


def adapt_without_sums(replica: nn.Module) -> None:
    """Has a replica's adapters of single parameters compute without the sum of both. The class of
    the replica's module is another, so nobody else's module is touched."""
    for module in replica.modules():
        if _is_adapter(module):
            kind: Any = type(module)
            module.__class__ = _without_sums(kind)


def _is_adapter(module: nn.Module) -> bool:
    return type(module).__name__ == "ParamWrapper"


def _refuse_other_layout(where: str, wrapper: Any) -> None:
    shape = tuple(wrapper.get_param().shape)
    for name in wrapper.lora_A:
        left, right, _ = _factors_of(wrapper, name)
        made = (*left.shape[:-1], right.shape[-1])
        if made != shape:
            raise ConfigError(
                f"{where}: the adapter {name!r} is for experts of shape {made}, and the parameter "
                f"has {shape}; it was made for another model or another layout of this one"
            )


@cache
def _without_sums(kind: Any) -> Any:
    """Makes a class of such adapters, of ``kind``, PEFT's."""
    return type(
        kind.__name__, (kind,), {"_activate_lora": _activate_lora, "__module__": kind.__module__}
    )


@contextmanager
def _activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Puts an `AdaptedWeight` in the parameter's place, where PEFT puts the sum."""
    factors = [_factors_of(self, name) for name in active_adapters if name in self.lora_A]
    if not factors:
        yield
        return
    base, name = self.get_base_layer(), self.parameter_name
    own = base._parameters[name]
    base._parameters[name] = AdaptedWeight(self.get_param(), factors)
    try:
        yield
    finally:
        base._parameters[name] = own


def _factors_of(wrapper: Any, name: str) -> Factors:
    if wrapper.get_param().ndim == 2:
        left, right = wrapper.lora_B[name].weight, wrapper.lora_A[name].weight
        dtype = wrapper.get_param().dtype
        return Factors(left.to(dtype), right.to(dtype), wrapper.scaling[name])
    return Factors(*wrapper.get_delta_factors(name))
