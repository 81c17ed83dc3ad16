"""Cuts a batch into microbatches. See [Note: choices]."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten

from ..errors import ConfigError
from .packed import RoundPipePackedData
from .specs import REPLICATE, Leaf, has_dim, is_function, pair_of_specs, walk

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# By name first: position_ids, cache_position and the like may come first and have a dim 0 that is
# not the batch.
_BATCH_KWARGS = tuple(
    f"kwargs[{name!r}]" for name in ("input_ids", "inputs_embeds", "pixel_values")
)


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A batch, cut. All three tuples have one entry per microbatch; at least one, none of them
    empty."""

    inputs: tuple[Inputs, ...]  # (args, kwargs)
    labels: tuple[Any, ...]  # None each when there is no label
    rows: tuple[int, ...]  # 0 where there is no batch dimension
    batch_size: int  # sum of rows


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows of the batch by the rule: dim 0 of ``input_ids``, ``inputs_embeds`` or ``pixel_values``
    if given by keyword, else of the first tensor that is not a scalar, args before kwargs. None
    when there is no such tensor."""
    leaf = _batch_leaf([*walk(args, None, "args", ""), *walk(kwargs, None, "kwargs", "")])
    return None if leaf is None else int(leaf.value.size(0))


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: Any,
    num_microbatch: int,
    *,
    split_input: Any = None,
    split_label: Any = None,
) -> Microbatches:
    """Cut inputs and label into ``num_microbatch`` microbatches; fewer when there are fewer rows,
    one when no tensor can be cut. Every row is used once, sizes differ by at most one, slices are
    views that autograd sees through. `RoundPipePackedData` among the inputs is cut already: its
    microbatches are the microbatches, whatever their number.

    Args:
        split_input: a function ``(args, kwargs, n) -> (args_list, kwargs_list)`` of 1 to n entries,
            or a spec: a pair for args and kwargs, or one marker for both ([Note: choices]).
        split_label: a function ``(label, n) -> label_list``, n being the microbatches there are, or
            a spec.

    Raises:
        ConfigError: no rows, ``num_microbatch`` below 1, a function returned wrong lengths, a spec
            does not fit, packed values with different microbatches.

    Example:
        >>> cut = split((torch.arange(10).view(5, 2),), {"scale": 2.0}, torch.arange(5), 2)
        >>> cut.rows, [label.tolist() for label in cut.labels]
        ((3, 2), [[0, 1, 2], [3, 4]])
    """
    if num_microbatch < 1:
        raise ConfigError(f"num_microbatch is {num_microbatch}; it must be at least 1")
    if is_function(split_input):
        refuse_packed(
            (args, kwargs),
            "it is cut already, but split_input is a function that cuts; merge the outputs of the "
            "first engine, or give its values to forward_backward(microbatches=...)",
        )
        inputs = _call_split_input(split_input, args, kwargs, num_microbatch)
        rows = tuple(batch_size_of(*one) or 0 for one in inputs)
        if split_label is None:
            _check_label_follows(label, batch_size_of(args, kwargs), rows)
    else:
        args_spec, kwargs_spec = pair_of_specs(split_input)
        leaves = [
            *walk(args, args_spec, "args", "split_input"),
            *walk(kwargs, kwargs_spec, "kwargs", "split_input"),
        ]
        rows = _plan_rows(leaves, num_microbatch)
        inputs = _cut((args, kwargs), leaves, rows)
    labels = _split_label(label, split_label, rows)
    return Microbatches(inputs=tuple(inputs), labels=tuple(labels), rows=rows, batch_size=sum(rows))


def refuse_packed(inputs: Any, why: str) -> None:
    """Raises ConfigError if one of the inputs is packed."""
    leaves, _ = tree_flatten(inputs)
    if any(isinstance(leaf, RoundPipePackedData) for leaf in leaves):
        raise ConfigError(f"an input is RoundPipePackedData: {why}")


def _batch_leaf(leaves: Sequence[Leaf]) -> Leaf | None:
    """The tensor whose rows are the batch's, among those that may be cut."""
    candidates = [leaf for leaf in leaves if leaf.chosen != REPLICATE and has_dim(leaf.value, 0)]
    named = {leaf.path: leaf for leaf in candidates if leaf.path in _BATCH_KWARGS}
    return next(
        (named[path] for path in _BATCH_KWARGS if path in named),
        candidates[0] if candidates else None,
    )


def _plan_rows(leaves: Sequence[Leaf], num_microbatch: int) -> tuple[int, ...]:
    packed = [leaf for leaf in leaves if isinstance(leaf.value, RoundPipePackedData)]
    if packed:
        for other in packed[1:]:
            _check_same_microbatches(packed[0].value.rows, packed[0].path, other)
        return tuple(packed[0].value.rows)
    batch = _batch_leaf(leaves)
    if batch is None:
        return (0,)
    cut = [batch, *(leaf for leaf in leaves if isinstance(leaf.chosen, int))]
    sizes = [int(leaf.value.size(leaf.chosen or 0)) for leaf in cut]
    if 0 in sizes:
        raise ConfigError(f"the batch has no rows: {cut[sizes.index(0)]}")
    return _even_rows(sizes[0], min(num_microbatch, *sizes))


def _even_rows(size: int, count: int) -> tuple[int, ...]:
    """As ``torch.tensor_split``: ``_even_rows(5, 3) == (2, 2, 1)``."""
    each, larger = divmod(size, count)
    return tuple(each + (i < larger) for i in range(count))


def _check_same_microbatches(rows: Sequence[int], whose: str, packed: Leaf) -> None:
    if packed.value.rows != tuple(rows):
        raise ConfigError(
            f"{whose} has {len(rows)} microbatches of {list(rows)} rows, {packed.path} has "
            f"{len(packed.value.rows)} of "
            f"{list(packed.value.rows)}; make them with the same num_microbatch"
        )


def _cut(tree: Any, leaves: Sequence[Leaf], rows: Sequence[int]) -> list[Any]:
    if len(rows) == 1 and not any(isinstance(leaf.value, RoundPipePackedData) for leaf in leaves):
        return [tree]
    columns = [_cut_leaf(leaf, rows) for leaf in leaves]
    structure = tree_structure(tree)
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(len(rows))]


def _cut_leaf(leaf: Leaf, rows: Sequence[int]) -> list[Any]:
    value, dim = leaf.value, leaf.chosen
    if isinstance(value, RoundPipePackedData):
        return list(value)
    if dim is None and has_dim(value, 0) and value.size(0) == sum(rows) > 0:
        dim = 0
    if not isinstance(dim, int):
        return [value] * len(rows)
    size = int(value.size(dim))
    if size < len(rows):
        raise ConfigError(f"cannot cut {leaf} into {len(rows)} microbatches along dim {dim}")
    sizes = rows if size == sum(rows) else _even_rows(size, len(rows))
    # narrow, not Tensor.split: autograd refuses in-place changes to views that come several from
    # one call.
    return [value.narrow(dim, sum(sizes[:i]), sizes[i]) for i in range(len(sizes))]


def _call_split_input(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int
) -> list[Inputs]:
    returned = function(args, kwargs, num_microbatch)
    if not _is_list(returned) or len(returned) != 2 or not all(map(_is_list, returned)):
        raise ConfigError(
            f"split_input must return (args_list, kwargs_list), not a {type(returned).__name__}"
        )
    args_list, kwargs_list = returned
    if len(args_list) != len(kwargs_list):
        raise ConfigError(
            f"split_input returned {len(args_list)} args but {len(kwargs_list)} kwargs; they go in "
            "pairs"
        )
    if not 1 <= len(args_list) <= num_microbatch:
        raise ConfigError(
            f"split_input returned {len(args_list)} microbatches; num_microbatch is "
            f"{num_microbatch}"
        )
    for i, (one_args, one_kwargs) in enumerate(zip(args_list, kwargs_list, strict=True)):
        if not _is_list(one_args) or not isinstance(one_kwargs, Mapping):
            raise ConfigError(
                f"split_input must return a tuple of args and a dict of kwargs for microbatch {i}, "
                f"not a {type(one_args).__name__} and a {type(one_kwargs).__name__}"
            )
        if batch_size_of(tuple(one_args), dict(one_kwargs)) == 0:
            raise ConfigError(
                f"split_input returned no rows for microbatch {i} of {len(args_list)}"
            )
    return [(tuple(a), dict(k)) for a, k in zip(args_list, kwargs_list, strict=True)]


def _check_label_follows(label: Any, batch_size: int | None, rows: Sequence[int]) -> None:
    """Where ``split_input`` changed the number of rows nobody can tell which rows of the label
    belong to which microbatch; going whole to each, the label might broadcast and train silently
    wrong."""
    if batch_size is None or batch_size == sum(rows) or len(rows) == 1:
        return
    for leaf in walk(label, None, "label", "split_label"):
        if has_dim(leaf.value, 0) and leaf.value.size(0) == batch_size:
            raise ConfigError(
                f"split_input made {sum(rows)} rows of {batch_size}: cannot cut {leaf} to match; "
                "give split_label"
            )


def _split_label(label: Any, how: Any, rows: Sequence[int]) -> list[Any]:
    if label is None:
        return [None] * len(rows)
    if not is_function(how):
        leaves = list(walk(label, how, "label", "split_label"))
        for leaf in leaves:
            if isinstance(leaf.value, RoundPipePackedData):
                _check_same_microbatches(rows, "the input", leaf)
        return _cut(label, leaves, rows)
    labels = how(label, len(rows))
    if not _is_list(labels):
        raise ConfigError(
            f"split_label must return a list of labels, not a {type(labels).__name__}"
        )
    if len(labels) != len(rows):
        raise ConfigError(f"split_label returned {len(labels)} labels for {len(rows)} microbatches")
    return list(labels)


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))
