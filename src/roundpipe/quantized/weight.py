"""A tensor that holds a quantized weight, and that everybody but the engine sees as the dense one.

[Note: quantized weights] Its shape and dtype are those of the dense weight, and whatever computes
with it gets the dense values: they are made for that one operation, on the device of the parts, and
dropped. So a plain forward is right (and slow), adapters and architectures need not know, and a
read never lies. Writes are refused. The engine asks for ``parts``: those are what lies in host
memory or a mapped file and goes up; a slot holds the dense weight, which the device makes from
them.

Its own memory is that of its first part, so its address and its count of writes tell of that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ConfigError
from .format import Format

# Which checkpoints' experts are put together with. That of others is dense.
_TOGETHER = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _NotBitsAndBytes(ConfigError, AttributeError):
    """An AttributeError too, so that whoever asks whether there is one is told no."""


class QuantizedWeight(torch.Tensor):
    """A frozen weight in fewer bits. Make it a parameter with
    ``nn.Parameter(weight, requires_grad=False)``.

    Args:
        format: how to read the parts.
        parts: plain tensors on one device, those that ``format`` describes. They are not copied.
        shape: of the dense weight.
        dtype: of the dense weight.

    Raises:
        ConfigError: the parts are not those of a weight of that shape.

    Example:
        >>> parts = NF4().quantize(linear.weight)
        >>> weight = QuantizedWeight(NF4(), parts, linear.weight.shape, torch.bfloat16)
        >>> linear.weight = nn.Parameter(weight, requires_grad=False)
    """

    format: Format
    parts: tuple[torch.Tensor, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["QuantizedWeight"],
        format: Format,
        parts: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> "QuantizedWeight":
        format.check(parts, shape)
        return cls._of(format, tuple(parts), torch.Size(shape), dtype)

    @classmethod
    def _of(
        cls, format: Format, parts: tuple[torch.Tensor, ...], shape: torch.Size, dtype: torch.dtype
    ) -> "QuantizedWeight":
        made = torch.Tensor._make_subclass(cls, _stand_in(parts[0], shape, dtype))
        made.format, made.parts = format, parts
        return made

    @classmethod
    def quantize(cls, weight: torch.Tensor, format: Format) -> "QuantizedWeight":
        """``weight`` in that format, on its device.

        Raises:
            ConfigError: its shape does not divide into the format's blocks.
        """
        return cls(format, format.quantize(weight), weight.shape, weight.dtype)

    def dequantize(self) -> torch.Tensor:
        """The dense weight, as a new plain tensor."""
        return self.format.dequantize(self.parts, self.shape, self.dtype)

    def dequantize_on(self, device: torch.device) -> torch.Tensor:
        """The same on another device."""
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.write_to(out)
        return out

    def write_to(self, out: torch.Tensor) -> None:
        """Writes the dense weight to ``out``: contiguous, of its shape, on any device. The parts
        travel, because they are smaller."""
        # The host would read what has not come yet.
        is_ordered = out.device.type != "cpu"
        parts = [part.to(out.device, non_blocking=is_ordered) for part in self.parts]
        self.format.dequantize_into(parts, out)

    def move_to(self, parts: Sequence[torch.Tensor]) -> None:
        """The same bytes lie in ``parts`` from here on, and what was theirs before is let go."""
        self.data = type(self)._of(self.format, tuple(parts), self.shape, self.dtype)

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; what is assigned has to be quantized too."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, QuantizedWeight) or value.dtype != self.dtype:
            raise ConfigError(
                f"a weight that is quantized ({self.format.name}, {tuple(self.shape)}, "
                f"{self.dtype}) cannot become {value.dtype} in place; leave it as it is, or "
                "replace the parameter by its dequantize()"
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.format, self.parts = value.format, value.parts

    @classmethod
    def join(
        cls, weights: "Sequence[QuantizedWeight]", dim: int, *, stack: bool = False
    ) -> "QuantizedWeight":
        """Some weights of one format and dtype put together along ``dim``, or along a new first
        dimension with ``stack``, in new memory.

        Raises:
            ConfigError: the format cannot, or not along that dimension.
        """
        first, shapes = weights[0], [(1,) * stack + tuple(weight.shape) for weight in weights]
        parts = first.format.join([weight.parts for weight in weights], shapes, dim)
        shape = list(shapes[0])
        shape[dim] = sum(one[dim] for one in shapes)
        return cls(first.format, parts, shape, first.dtype)

    @property
    def quant_state(self) -> Any:
        """Bitsandbytes' weights have one, which PEFT's layers over them merge with.

        Raises:
            ConfigError: always; it names what merges instead.
        """
        raise _NotBitsAndBytes(
            "a QuantizedWeight has no quant_state: PEFT's layers over four bits cannot merge into "
            "a model that a RoundPipe trainer has trained. Save the adapter, and merge it with "
            "roundpipe_hf.merge_and_save(adapter, base, out)"
        )

    @property
    def num_bytes(self) -> int:
        """Of all its parts."""
        return sum(part.nbytes for part in self.parts)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"QuantizedWeight({self.format.name}, {tuple(self.shape)}, {self.dtype}, "
            f"{self.num_bytes} bytes)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedWeight":
        if id(self) not in memo:
            parts = tuple(part.clone() for part in self.parts)
            copy = type(self)._of(self.format, parts, self.shape, self.dtype)
            copy.__dict__ = {**self.__dict__, "parts": parts}
            memo[id(self)] = copy
        copied: QuantizedWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        rest = {
            key: value for key, value in self.__dict__.items() if key not in ("format", "parts")
        }
        return _made_again, (self.format, self.parts, tuple(self.shape), self.dtype, rest)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            own = args[0]
            return cls._of(own.format, own.parts, own.shape, own.dtype)
        if func in _TOGETHER and _are_alike(args[0]):
            dim, is_stack = args[1] if len(args) > 1 else 0, func is torch.ops.aten.stack.default
            if not is_stack or dim == 0:
                return cls.join(args[0], dim % args[0][0].dim(), stack=is_stack)
        _refuse_writes(func, args, kwargs)
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            return func(args[0].dequantize_on(kwargs["device"]), **kwargs)
        dense = tree_map_only(QuantizedWeight, QuantizedWeight.dequantize, (args, kwargs))
        return func(*dense[0], **dense[1])


def stored_bytes(weight: torch.Tensor) -> int:
    """What a weight takes on the host: of a quantized one its parts."""
    return weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes


def _are_alike(weights: Sequence[Any]) -> bool:
    return all(
        isinstance(one, QuantizedWeight)
        and (one.format, one.dtype) == (weights[0].format, weights[0].dtype)
        for one in weights
    )


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for place, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if alias is None or not alias.is_write:
            continue
        for one in (each for each in tree_leaves(value) if isinstance(each, QuantizedWeight)):
            raise ConfigError(
                f"{func.overloadpacket.__name__} writes to a weight that is quantized "
                f"({one.format.name}, {tuple(one.shape)}), whose values are fixed; train an "
                "adapter (roundpipe_hf.merge_and_save merges it), or replace the parameter by its "
                "dequantize()"
            )


def _stand_in(part: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the dense shape over the first bytes of the part. Nobody reads it."""
    start = part.storage_offset() * part.element_size()
    if start % dtype.itemsize or part.nbytes < dtype.itemsize:
        raise ConfigError(
            f"a quantized weight's first part begins at byte {start} and has {part.nbytes}; it "
            f"takes at least {dtype.itemsize}, at a multiple of that. Clone it"
        )
    empty = torch.empty(0, dtype=dtype, device=part.device)
    return empty.set_(part.untyped_storage(), start // dtype.itemsize, shape, (0,) * len(shape))


def _made_again(
    format: Format,
    parts: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rest: dict[str, Any],
) -> QuantizedWeight:
    made = QuantizedWeight(format, parts, shape, dtype)
    made.__dict__.update(rest)
    return made
