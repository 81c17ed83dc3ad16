"""Cut a batch into microbatches and join their outputs again. Knows nothing of stages, devices or threads.

[Note: marks] The rule is: what has the batch size along dim 0 is cut there, all else goes to every microbatch. A *mark*
overrides it for one leaf: an int is the dim to cut (or concatenate) along, REPLICATE gives every microbatch the whole
leaf (or, merging, wants it to agree), None leaves it to the rule. Users write marks as specs: trees of
``torch.distributed.pipelining``'s ``TensorChunkSpec`` / ``_Replicate`` / None. A marker in place of a container covers
everything in it, and a dict may name only some of the keys.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_structure, tree_unflatten

from .errors import ConfigError
from .packed import RoundPipePackedData

REPLICATE: Final = "replicate"
Mark: TypeAlias = int | Literal["replicate"] | None
Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# By name first: position_ids, cache_position and the like may come first and have a dim 0 that is not the batch.
_BATCH_KWARGS = tuple(f"kwargs[{name!r}]" for name in ("input_ids", "inputs_embeds", "pixel_values"))


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A batch, cut. All three tuples have one entry per microbatch; at least one, none of them empty."""

    inputs: tuple[Inputs, ...]  # (args, kwargs)
    labels: tuple[Any, ...]  # None each when there is no label
    rows: tuple[int, ...]  # 0 where there is no batch dimension
    batch_size: int  # sum of rows


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows of the batch by the rule: dim 0 of ``input_ids``, ``inputs_embeds`` or ``pixel_values`` if given by keyword,
    else of the first tensor that is not a scalar, args before kwargs. None when there is no such tensor."""
    leaf = _batch_leaf([*_walk(args, None, "args", ""), *_walk(kwargs, None, "kwargs", "")])
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
    """Cut inputs and label into ``num_microbatch`` microbatches; fewer when there are fewer rows, one when no tensor
    can be cut. Every row is used once, sizes differ by at most one, slices are views that autograd sees through.
    `RoundPipePackedData` among the inputs is cut already: its microbatches are the microbatches, whatever their number.

    Args:
        split_input: a function ``(args, kwargs, n) -> (args_list, kwargs_list)`` of 1 to n entries, or a spec: a pair
            for args and kwargs, or one marker for both ([Note: marks]).
        split_label: a function ``(label, n) -> label_list``, n being the microbatches there are, or a spec.

    Raises:
        ConfigError: no rows, ``num_microbatch`` below 1, a function returned wrong lengths, a spec does not fit, packed
            values with different microbatches.

    Example:
        >>> cut = split((torch.arange(10).view(5, 2),), {"scale": 2.0}, torch.arange(5), 2)
        >>> cut.rows, [label.tolist() for label in cut.labels]
        ((3, 2), [[0, 1, 2], [3, 4]])
    """
    if num_microbatch < 1:
        raise ConfigError(f"num_microbatch is {num_microbatch}; it must be at least 1")
    if _is_function(split_input):
        refuse_packed(
            (args, kwargs),
            "it is cut already, but split_input is a function that cuts; merge the outputs of the first engine, or "
            "give its values to forward_backward(microbatches=...)",
        )
        inputs = _call_split_input(split_input, args, kwargs, num_microbatch)
        rows = tuple(batch_size_of(*one) or 0 for one in inputs)
        if split_label is None:
            _check_label_follows(label, batch_size_of(args, kwargs), rows)
    else:
        args_spec, kwargs_spec = _pair_of_specs(split_input)
        leaves = [
            *_walk(args, args_spec, "args", "split_input"),
            *_walk(kwargs, kwargs_spec, "kwargs", "split_input"),
        ]
        rows = _plan_rows(leaves, num_microbatch)
        inputs = _cut((args, kwargs), leaves, rows)
    labels = _split_label(label, split_label, rows)
    return Microbatches(inputs=tuple(inputs), labels=tuple(labels), rows=rows, batch_size=sum(rows))


def merge(outputs: Sequence[Any], rows: Sequence[int], how: Any = None) -> Any:
    """Join the outputs of the microbatches, keeping their structure; a single one comes back as it is.

    Tensors whose dim 0 is the microbatch's rows, in every microbatch, are concatenated; 0-d floating-point tensors are
    averaged, weighted by rows; everything else must agree and is taken from the first. All of it is differentiable.
    The rule sees shapes only: with one row in each microbatch, a (1, S) tensor that belongs to no row (position ids,
    say) is concatenated too. Mark it with a spec if that matters.

    Args:
        outputs: one tree per microbatch.
        rows: the rows of each, as ``split`` gave them.
        how: a function ``(outputs, rows) -> merged``, called for a single microbatch too, so that the form of the
            result does not depend on the batch; or a spec ([Note: marks]); None or True for the rule.

    Raises:
        ConfigError: a leaf neither concatenates, averages nor agrees, or the structures differ; names the leaf.
    """
    assert 0 < len(outputs) == len(rows), f"{len(outputs)} outputs for {len(rows)} microbatches"
    if _is_function(how):
        return how(outputs, rows)
    if len(outputs) == 1:
        return outputs[0]
    spec = None if how is True else how
    structure = tree_structure(outputs[0])
    columns = [list(_walk(output, spec, "output", "merge_output")) for output in outputs]
    for i, output in enumerate(outputs):
        if tree_structure(output) != structure:
            paths = zip_longest(*([leaf.path for leaf in columns[k]] for k in (0, i)))
            where = next((a or b for a, b in paths if a != b), "output")
            raise ConfigError(
                f"microbatches 0 and {i} returned different structures, first at {where}; "
                "give merge_output a function (outputs, rows) -> merged, or False to get them unmerged"
            )
    return tree_unflatten([_merge_leaf(leaves, rows) for leaves in zip(*columns, strict=True)], structure)


def refuse_packed(inputs: Any, why: str) -> None:
    """Raises ConfigError if one of the inputs is packed."""
    leaves, _ = tree_flatten(inputs)
    if any(isinstance(leaf, RoundPipePackedData) for leaf in leaves):
        raise ConfigError(f"an input is RoundPipePackedData: {why}")


# --- trees, marks and specs ---


class _Leaf(NamedTuple):
    path: str  # as the user would write it: kwargs['input_ids'], output[0].logits
    value: Any
    mark: Mark

    def __str__(self) -> str:
        return f"{self.path} ({_show(self.value)})"


def _walk(node: Any, spec: Any, path: str, option: str) -> Iterator[_Leaf]:
    """The leaves in pytree order, each with its mark; ``option`` is what to blame in an error. Not torch's
    ``tree_flatten_with_path``: that one refuses types registered without key names."""
    if tree_is_leaf(node):
        mark = _mark(spec, path, option)
        leaf = _Leaf(path, node, mark)
        if isinstance(mark, int) and not _has_dim(node, mark):
            if node is not None:  # An optional input that was left out is no mistake of the spec's.
                raise ConfigError(f"{option} has TensorChunkSpec({mark}) for {leaf}, which has no such dim")
            leaf = _Leaf(path, node, None)
        yield leaf
    elif tree_is_leaf(spec):
        mark = _mark(spec, path, option)
        for leaf in (leaf for key, child in _children(node) for leaf in _walk(child, None, path + key, option)):
            covered = mark == REPLICATE or (isinstance(mark, int) and _has_dim(leaf.value, mark))
            yield leaf._replace(mark=mark) if covered else leaf
    else:
        children, specs = _children(node), dict(_children(spec))
        unknown = specs.keys() - {key for key, _ in children}
        if unknown or (len(specs) < len(children) and not isinstance(spec, Mapping)):
            has, needs = (", ".join(keys) or "nothing" for keys in (specs, dict(children)))
            raise ConfigError(f"{option} does not fit {path}: it has {has} where the value has {needs}")
        for key, child in children:
            yield from _walk(child, specs.get(key), path + key, option)


def _children(node: Any) -> list[tuple[str, Any]]:
    values, _ = tree_flatten(node, is_leaf=lambda inner: inner is not node)
    if isinstance(node, Mapping) and len(node) == len(values):
        keys = [f"[{key!r}]" for key in node]
    else:
        keys = [f".{field}" for field in getattr(node, "_fields", ())] or [f"[{i}]" for i in range(len(values))]
    return list(zip(keys, values, strict=True))


def _mark(spec: Any, path: str, option: str) -> Mark:
    if spec is None:
        return None
    # Here, not above: it takes over a second to import, and whoever made a spec has paid for it.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    if isinstance(spec, TensorChunkSpec):
        return spec.split_dim
    if isinstance(spec, _Replicate) or spec is _Replicate:
        return REPLICATE
    raise ConfigError(
        f"{option} has {spec!r} for {path}; use TensorChunkSpec(dim) or _Replicate() of torch.distributed.pipelining, "
        "None for the usual rule, or a function"
    )


def _pair_of_specs(spec: Any) -> tuple[Any, Any]:
    if tree_is_leaf(spec):
        return spec, spec
    if not isinstance(spec, (tuple, list)) or len(spec) != 2:
        raise ConfigError(f"split_input is {spec!r}; a spec is a pair, for args and for kwargs, or one marker for both")
    return spec[0], spec[1]


def _is_function(override: Any) -> bool:
    return callable(override) and not isinstance(override, type)  # The class _Replicate is a marker too.


def _has_dim(value: Any, dim: int) -> bool:
    return isinstance(value, torch.Tensor) and -value.ndim <= dim < value.ndim


# --- split ---


def _batch_leaf(leaves: Sequence[_Leaf]) -> _Leaf | None:
    """The tensor whose rows are the batch's, among those that may be cut."""
    candidates = [leaf for leaf in leaves if leaf.mark != REPLICATE and _has_dim(leaf.value, 0)]
    named = {leaf.path: leaf for leaf in candidates if leaf.path in _BATCH_KWARGS}
    return next((named[path] for path in _BATCH_KWARGS if path in named), candidates[0] if candidates else None)


def _plan_rows(leaves: Sequence[_Leaf], num_microbatch: int) -> tuple[int, ...]:
    packed = [leaf for leaf in leaves if isinstance(leaf.value, RoundPipePackedData)]
    if packed:
        for other in packed[1:]:
            _check_same_microbatches(packed[0].value.rows, packed[0].path, other)
        return tuple(packed[0].value.rows)
    batch = _batch_leaf(leaves)
    if batch is None:
        return (0,)
    cut = [batch, *(leaf for leaf in leaves if isinstance(leaf.mark, int))]
    sizes = [int(leaf.value.size(leaf.mark or 0)) for leaf in cut]
    if 0 in sizes:
        raise ConfigError(f"the batch has no rows: {cut[sizes.index(0)]}")
    return _even_rows(sizes[0], min(num_microbatch, *sizes))


def _even_rows(size: int, count: int) -> tuple[int, ...]:
    """As ``torch.tensor_split``: ``_even_rows(5, 3) == (2, 2, 1)``."""
    each, larger = divmod(size, count)
    return tuple(each + (i < larger) for i in range(count))


def _check_same_microbatches(rows: Sequence[int], whose: str, packed: _Leaf) -> None:
    if packed.value.rows != tuple(rows):
        raise ConfigError(
            f"{whose} has {len(rows)} microbatches of {list(rows)} rows, {packed.path} has {len(packed.value.rows)} of "
            f"{list(packed.value.rows)}; make them with the same num_microbatch"
        )


def _cut(tree: Any, leaves: Sequence[_Leaf], rows: Sequence[int]) -> list[Any]:
    if len(rows) == 1 and not any(isinstance(leaf.value, RoundPipePackedData) for leaf in leaves):
        return [tree]
    columns = [_cut_leaf(leaf, rows) for leaf in leaves]
    structure = tree_structure(tree)
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(len(rows))]


def _cut_leaf(leaf: _Leaf, rows: Sequence[int]) -> list[Any]:
    value, dim = leaf.value, leaf.mark
    if isinstance(value, RoundPipePackedData):
        return list(value)
    if dim is None and _has_dim(value, 0) and value.size(0) == sum(rows) > 0:
        dim = 0
    if not isinstance(dim, int):
        return [value] * len(rows)
    size = int(value.size(dim))
    if size < len(rows):
        raise ConfigError(f"cannot cut {leaf} into {len(rows)} microbatches along dim {dim}")
    sizes = rows if size == sum(rows) else _even_rows(size, len(rows))
    # narrow, not Tensor.split: autograd refuses in-place changes to views that come several from one call.
    return [value.narrow(dim, sum(sizes[:i]), sizes[i]) for i in range(len(sizes))]


def _call_split_input(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int
) -> list[Inputs]:
    returned = function(args, kwargs, num_microbatch)
    if not _is_list(returned) or len(returned) != 2 or not all(map(_is_list, returned)):
        raise ConfigError(f"split_input must return (args_list, kwargs_list), not a {type(returned).__name__}")
    args_list, kwargs_list = returned
    if len(args_list) != len(kwargs_list):
        raise ConfigError(f"split_input returned {len(args_list)} args but {len(kwargs_list)} kwargs; they go in pairs")
    if not 1 <= len(args_list) <= num_microbatch:
        raise ConfigError(f"split_input returned {len(args_list)} microbatches; num_microbatch is {num_microbatch}")
    for i, (one_args, one_kwargs) in enumerate(zip(args_list, kwargs_list, strict=True)):
        if not _is_list(one_args) or not isinstance(one_kwargs, Mapping):
            raise ConfigError(
                f"split_input must return a tuple of args and a dict of kwargs for microbatch {i}, "
                f"not a {type(one_args).__name__} and a {type(one_kwargs).__name__}"
            )
        if batch_size_of(tuple(one_args), dict(one_kwargs)) == 0:
            raise ConfigError(f"split_input returned no rows for microbatch {i} of {len(args_list)}")
    return [(tuple(a), dict(k)) for a, k in zip(args_list, kwargs_list, strict=True)]


def _check_label_follows(label: Any, batch_size: int | None, rows: Sequence[int]) -> None:
    """Where ``split_input`` changed the number of rows nobody can tell which rows of the label belong to which
    microbatch; going whole to each, the label might broadcast and train silently wrong."""
    if batch_size is None or batch_size == sum(rows) or len(rows) == 1:
        return
    for leaf in _walk(label, None, "label", "split_label"):
        if _has_dim(leaf.value, 0) and leaf.value.size(0) == batch_size:
            raise ConfigError(
                f"split_input made {sum(rows)} rows of {batch_size}: cannot cut {leaf} to match; give split_label"
            )


def _split_label(label: Any, how: Any, rows: Sequence[int]) -> list[Any]:
    if label is None:
        return [None] * len(rows)
    if not _is_function(how):
        leaves = list(_walk(label, how, "label", "split_label"))
        for leaf in leaves:
            if isinstance(leaf.value, RoundPipePackedData):
                _check_same_microbatches(rows, "the input", leaf)
        return _cut(label, leaves, rows)
    labels = how(label, len(rows))
    if not _is_list(labels):
        raise ConfigError(f"split_label must return a list of labels, not a {type(labels).__name__}")
    if len(labels) != len(rows):
        raise ConfigError(f"split_label returned {len(labels)} labels for {len(rows)} microbatches")
    return list(labels)


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


# --- merge ---


def _merge_leaf(leaves: Sequence[_Leaf], rows: Sequence[int]) -> Any:
    """``leaves``: the same leaf of every microbatch."""
    values, mark = [leaf.value for leaf in leaves], leaves[0].mark
    if mark != REPLICATE and all(isinstance(value, torch.Tensor) for value in values):
        if mark is None and all(value.ndim == 0 for value in values):
            if values[0].is_floating_point() or values[0].is_complex():
                return _mean(values, rows)
        else:
            dim = mark or 0
            fits = isinstance(mark, int) or all(
                value.ndim > 0 and value.size(0) == n for value, n in zip(values, rows, strict=True)
            )
            if fits and len({_shape_without(value, dim) for value in values}) == 1:
                return torch.cat(values, dim)
    other = next((i for i, value in enumerate(values) if not _agree(values[0], value)), None)
    if other is None:
        return values[0]
    raise ConfigError(
        f"cannot merge {leaves[0].path}: {_show(values[0])} in microbatch 0 and {_show(values[other])} in microbatch "
        f"{other} neither agree nor concatenate over rows {list(rows)}. Give merge_output a spec such as "
        "TensorChunkSpec(dim), a function (outputs, rows) -> merged, or False to get the microbatches unmerged"
    )


def _mean(scalars: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """() each. At least in fp32; plain mean when there are no rows."""
    weights = rows if sum(rows) else [1] * len(rows)
    wide = torch.promote_types(scalars[0].dtype, torch.float32)
    weighted = [scalar.to(wide) * weight for scalar, weight in zip(scalars, weights, strict=True)]
    return (torch.stack(weighted).sum() / sum(weights)).to(scalars[0].dtype)


def _shape_without(value: torch.Tensor, dim: int) -> tuple[int, ...] | None:
    if not _has_dim(value, dim):
        return None
    dim %= value.ndim
    return (value.ndim, *value.shape[:dim], *value.shape[dim + 1 :])


def _agree(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)  # NumPy arrays compare element by element.


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.ndim:
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
