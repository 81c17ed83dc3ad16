"""What a spec says of each leaf of a tree of inputs or outputs.

[Note: choices] The rule is: what has the batch size along dim 0 is cut there, all else goes to
every microbatch. A *choice* overrides it for one leaf: an int is the dim to cut (or concatenate)
along, REPLICATE gives every microbatch the whole leaf (or, merging, wants it to agree), None leaves
it to the rule. Users write choices as specs: trees of ``torch.distributed.pipelining``'s
``TensorChunkSpec`` / ``_Replicate`` / None; merging, also its ``_CustomReducer``, such as
``sum_reducer``, which makes one value of those of the microbatches. A marker in place of a
container covers everything in it, and a dict may name only some of the keys.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf

from ..errors import ConfigError

REPLICATE: Final = "replicate"


@dataclass(frozen=True)
class Reduce:
    """A choice for merging: ``function`` takes what came out so far, ``initial`` first, and the
    value of the next microbatch."""

    initial: Any
    function: Callable[[Any, Any], Any]


Choice: TypeAlias = int | Literal["replicate"] | Reduce | None


class Leaf(NamedTuple):
    path: str  # as the user would write it: kwargs['input_ids'], output[0].logits
    value: Any
    chosen: Choice

    def __str__(self) -> str:
        return f"{self.path} ({show(self.value)})"


def walk(node: Any, spec: Any, path: str, option: str) -> Iterator[Leaf]:
    """The leaves in pytree order, each with its choice; ``option`` is what to blame in an error.
    Not torch's ``tree_flatten_with_path``: that one refuses types registered without key names."""
    if tree_is_leaf(node):
        chosen = _choice(spec, path, option)
        leaf = Leaf(path, node, chosen)
        if isinstance(chosen, int) and not has_dim(node, chosen):
            if node is not None:  # An optional input that was left out is no mistake of the spec's.
                raise ConfigError(
                    f"{option} has TensorChunkSpec({chosen}) for {leaf}, which has no such dim"
                )
            leaf = Leaf(path, node, None)
        yield leaf
    elif tree_is_leaf(spec):
        chosen = _choice(spec, path, option)
        for leaf in (
            leaf for key, child in _children(node) for leaf in walk(child, None, path + key, option)
        ):
            covered = has_dim(leaf.value, chosen) if isinstance(chosen, int) else chosen is not None
            yield leaf._replace(chosen=chosen) if covered else leaf
    else:
        children, specs = _children(node), dict(_children(spec))
        unknown = specs.keys() - {key for key, _ in children}
        if unknown or (len(specs) < len(children) and not isinstance(spec, Mapping)):
            has, needs = (", ".join(keys) or "nothing" for keys in (specs, dict(children)))
            raise ConfigError(
                f"{option} does not fit {path}: it has {has} where the value has {needs}"
            )
        for key, child in children:
            yield from walk(child, specs.get(key), path + key, option)


def _children(node: Any) -> list[tuple[str, Any]]:
    whole = [node]
    values, _ = tree_flatten(node, is_leaf=lambda inner: inner is not whole[0])
    # Because what torch flattens with is garbage in a circle, and would hold the batch until it is
    # found.
    whole.clear()
    if isinstance(node, Mapping) and len(node) == len(values):
        keys = [f"[{key!r}]" for key in node]
    else:
        keys = [f".{field}" for field in getattr(node, "_fields", ())] or [
            f"[{i}]" for i in range(len(values))
        ]
    return list(zip(keys, values, strict=True))


def _choice(spec: Any, path: str, option: str) -> Choice:
    if spec is None:
        return None
    # Here, not above: it takes over a second to import, and whoever made a spec has paid for it.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

    if isinstance(spec, TensorChunkSpec):
        return spec.split_dim
    if isinstance(spec, _Replicate) or spec is _Replicate:
        return REPLICATE
    if isinstance(spec, _CustomReducer) and option == "merge_output":
        return Reduce(spec.init_value, spec.reduce_fn)
    raise ConfigError(
        f"{option} has {spec!r} for {path}; use TensorChunkSpec(dim) or _Replicate() of "
        "torch.distributed.pipelining, None for the usual rule, or a function"
    )


def pair_of_specs(spec: Any) -> tuple[Any, Any]:
    if tree_is_leaf(spec):
        return spec, spec
    if not isinstance(spec, (tuple, list)) or len(spec) != 2:
        raise ConfigError(
            f"split_input is {spec!r}; a spec is a pair, for args and for kwargs, or one marker "
            "for both"
        )
    return spec[0], spec[1]


def is_function(override: Any) -> bool:
    # The class _Replicate is a marker too.
    return callable(override) and not isinstance(override, type)


def check_takes(function: Any, count: int, option: str, form: str) -> None:
    """Raises ConfigError for a function that cannot be called with ``count`` arguments."""
    if not is_function(function):
        return
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        raise ConfigError(f"{option} cannot be called as {form}: {show(function)}") from None
    except ValueError:
        return  # because it does not say what it takes


def has_dim(value: Any, dim: int) -> bool:
    return isinstance(value, torch.Tensor) and -value.ndim <= dim < value.ndim


def show(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.ndim:
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
