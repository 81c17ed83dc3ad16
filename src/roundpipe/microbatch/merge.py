"""Joins what the microbatches gave. See [Note: choices]."""

import inspect
from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_structure, tree_unflatten

from ..errors import ConfigError
from .specs import REPLICATE, Leaf, Reduce, check_takes, has_dim, is_function, show, walk


def merge(outputs: Sequence[Any], rows: Sequence[int], how: Any = None) -> Any:
    """Join the outputs of the microbatches, keeping their structure; a single one comes back as it
    is.

    Tensors whose dim 0 is the microbatch's rows, in every microbatch, are concatenated; 0-d
    floating-point tensors are averaged, weighted by rows; everything else must agree and is taken
    from the first. All of it is differentiable. The rule sees shapes only: with one row in each
    microbatch, a (1, S) tensor that belongs to no row (position ids, say) is concatenated too. Mark
    it with a spec if that matters.

    Args:
        outputs: one tree per microbatch.
        rows: the rows of each, as ``split`` gave them.
        how: a function ``(outputs, rows) -> merged``, or of the outputs alone, called for a single
            microbatch too, so that the form of the result does not depend on the batch; or a spec
            ([Note: choices]); None or True for the rule.

    Raises:
        ConfigError: a leaf neither concatenates, averages nor agrees, or the structures differ;
            names the leaf.
    """
    assert 0 < len(outputs) == len(rows), f"{len(outputs)} outputs for {len(rows)} microbatches"
    if is_function(how):
        return how(outputs, rows) if _takes_rows(how) else how(outputs)
    spec = None if how is True else how
    if len(outputs) == 1 and spec is None:
        return outputs[0]
    structure = tree_structure(outputs[0])
    columns = [list(walk(output, spec, "output", "merge_output")) for output in outputs]
    if len(outputs) == 1 and not any(isinstance(leaf.chosen, Reduce) for leaf in columns[0]):
        return outputs[0]
    for i, output in enumerate(outputs):
        if tree_structure(output) != structure:
            paths = zip_longest(*([leaf.path for leaf in columns[k]] for k in (0, i)))
            where = next((a or b for a, b in paths if a != b), "output")
            raise ConfigError(
                f"microbatches 0 and {i} returned different structures, first at {where}; give "
                "merge_output a function (outputs, rows) -> merged, or False to get them unmerged"
            )
    return tree_unflatten(
        [_merge_leaf(leaves, rows) for leaves in zip(*columns, strict=True)], structure
    )


def check_merge_function(how: Any) -> None:
    """Raises ConfigError for a function that can be called neither as ``(outputs, rows)`` nor as
    ``(outputs)``."""
    if is_function(how):
        count = 2 if _takes_rows(how) else 1
        check_takes(how, count, "merge_output", "(outputs, rows) -> merged, or (outputs) -> merged")


def _takes_rows(function: Any) -> bool:
    """False for one whose second argument, if there is one, is about something else."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return False  # such as torch.cat
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in by_place if p.default is p.empty or p.name == "rows"]
    return len(needed) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _merge_leaf(leaves: Sequence[Leaf], rows: Sequence[int]) -> Any:
    """``leaves``: the same leaf of every microbatch."""
    values, chosen = [leaf.value for leaf in leaves], leaves[0].chosen
    if isinstance(chosen, Reduce):
        return reduce(chosen.function, values, chosen.initial)
    if len(values) == 1:
        return values[0]
    if chosen != REPLICATE and all(isinstance(value, torch.Tensor) for value in values):
        if chosen is None and all(value.ndim == 0 for value in values):
            if values[0].is_floating_point() or values[0].is_complex():
                return _mean(values, rows)
        else:
            dim = chosen or 0
            fits = isinstance(chosen, int) or all(
                value.ndim > 0 and value.size(0) == n for value, n in zip(values, rows, strict=True)
            )
            if fits and len({_shape_without(value, dim) for value in values}) == 1:
                return torch.cat(values, dim)
    other = next((i for i, value in enumerate(values) if not _agree(values[0], value)), None)
    if other is None:
        return values[0]
    raise ConfigError(
        f"cannot merge {leaves[0].path}: {show(values[0])} in microbatch 0 and "
        f"{show(values[other])} in microbatch {other} neither agree nor concatenate over rows "
        f"{list(rows)}. Give merge_output a spec such as TensorChunkSpec(dim), a function "
        "(outputs, rows) -> merged, or False to get the microbatches unmerged"
    )


def _mean(scalars: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """() each. At least in fp32; plain mean when there are no rows."""
    weights = rows if sum(rows) else [1] * len(rows)
    wide = torch.promote_types(scalars[0].dtype, torch.float32)
    weighted = [scalar.to(wide) * weight for scalar, weight in zip(scalars, weights, strict=True)]
    return (torch.stack(weighted).sum() / sum(weights)).to(scalars[0].dtype)


def _shape_without(value: torch.Tensor, dim: int) -> tuple[int, ...] | None:
    if not has_dim(value, dim):
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
    # NumPy arrays compare element by element.
    return bool(same.all()) if hasattr(same, "all") else bool(same)
