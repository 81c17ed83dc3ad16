"""Modules that compute each token by itself, run for a part of a sequence at a time.

[Note: row-wise modules] A layer names, in its attribute ``row_wise``, inner modules whose output
for a token depends on that token alone: MLPs and norms. Only who knows a module can say so, its
preset or its author; nothing is guessed. Where a call is short of memory such a module runs for
some tokens at a time. It keeps its input alone, and its backward runs each part once more: what the
module holds inside never exists for more than one part. The gradient of a weight is a sum over
parts, in fp32 for 16-bit weights, and is rounded once, after each part's product was.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError
from .graph_leaves import leaves_beside

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Declared(NamedTuple):
    """A module that a layer calls row-wise. ``obstacle``: why it must run whole all the same."""

    name: str
    module: nn.Module
    obstacle: str | None


def declared_in(layer: nn.Module) -> list[_Declared]:
    """The modules that ``layer`` names.

    Raises:
        ConfigError: it names one that it does not have.
    """
    names = getattr(layer, "row_wise", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"row_wise of {type(layer).__name__} is {names!r}; give a tuple of names of modules"
        )
    found = []
    for name in names:
        try:
            module = layer.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                f"row_wise of {type(layer).__name__} names {name!r}, which it does not have"
            ) from error
        found.append(_Declared(name, module, _obstacle(module)))
    return found


def _obstacle(module: nn.Module) -> str | None:
    """Names what keeps a module from being run in parts, and again in its backward."""
    for part in module.modules():
        what = type(part).__name__
        if any(vars(part)[table] for table in _HOOKS):
            return f"{what} in it has hooks, which would run for every part"
        if "forward" in vars(part):
            return f"the forward of {what} in it is patched"
        if isinstance(part, _DropoutNd) and part.training and part.p > 0:
            return f"{what} in it draws random numbers (p={part.p:g})"
        if any(weight is not None and weight.ndim > 2 for weight in part._parameters.values()):
            return f"{what} in it has stacked weights, as a mixture of experts"
    if any(name.split(".")[-1] == "experts" for name, _ in module.named_modules()):
        return "it is a mixture of experts"
    return None


def can_cut(layers: Iterable[nn.Module]) -> bool:
    """Says whether any of them has a module that may run in parts."""
    return any(not each.obstacle for layer in layers for each in declared_in(layer))


def refuse_uncut(layers: Iterable[nn.Module]) -> None:
    """For who asks for it by name.

    Raises:
        ConfigError: no layer names row-wise modules, or one of those cannot run in parts.
    """
    declared = [(layer, each) for layer in layers for each in declared_in(layer)]
    for layer, each in declared:
        if each.obstacle:
            raise ConfigError(
                f"tokens_at_once: {each.name} of {type(layer).__name__} cannot run for some tokens "
                f"at a time: {each.obstacle}; remove that, or leave tokens_at_once out"
            )
    if not declared:
        raise ConfigError(
            "tokens_at_once: no layer names modules that compute each token by itself; name them "
            "in an attribute row_wise of the layer's class, such as row_wise = ('mlp',), or leave "
            "tokens_at_once out"
        )


class RowCuts:
    """Turns row-wise modules of one device's replicas into such that run in parts. Used by the
    device's worker. The class of the replica's module is another, so nobody else's module is
    touched."""

    def __init__(self) -> None:
        self._kinds: dict[Any, type[nn.Module]] = {}

    def apply(
        self,
        replica: nn.Module,
        tokens: int,
        compiled: Callable[[type[nn.Module]], Callable[..., Any]] | None = None,
    ) -> None:
        """Modules of ``replica`` run for ``tokens`` tokens at a time.

        Args:
            compiled: gives the compiled forward of a class, where the layer is compiled. Norms then
                stay whole, because compiled code merges them with what is around them.
        """
        for name, module, obstacle in declared_in(replica):
            if obstacle or (compiled is not None and not _multiplies(module)):
                continue
            kind = type(module)
            key = kind, name, tokens, compiled is not None
            if key not in self._kinds:
                run: Any = kind.forward if compiled is None else compiled(kind)
                cut = _Cut(run, kind.forward, name, tokens, WeakKeyDictionary())
                self._kinds[key] = _cut_kind(kind, cut)
            module.__class__ = self._kinds[key]


def _multiplies(module: nn.Module) -> bool:
    """Norms do not."""
    return any(weight.ndim > 1 for weight in module.parameters())


class _Cut(NamedTuple):
    """A class of modules runs ``forward`` for at most ``tokens`` at a time.

    ``plain``: the same, not compiled. ``seen``: of each module the modes, training or not, that it
    was looked at in. A replica is made anew where anything was set on the user's module.
    """

    forward: Callable[..., Any]
    plain: Callable[..., Any]
    name: str
    tokens: int
    seen: WeakKeyDictionary[nn.Module, set[bool]]

    def look(self, module: nn.Module, rows: Tensor) -> None:
        """Before a module's first run in a mode.

        Raises:
            ConfigError: the module draws random numbers, which its backward would draw anew, writes
                to its input or its buffers, once for every run, or does not keep tokens apart:
                what is not a number in one must not reach others.
        """
        is_first = not self.seen
        modes = self.seen.setdefault(module, set())
        if module.training in modes:
            return
        what = f"{self.name} ({type(module).__name__}) is named in row_wise, but"
        remedy = "take it out of row_wise, or pass tokens_at_once=0"
        given = rows.clone()
        written = {"its input": given, **{f"its buffer {n}": b for n, b in module.named_buffers()}}
        versions = {name: _version(tensor) for name, tensor in written.items()}
        with _Draws() as draws:
            made = self.plain(module, given.unsqueeze(0))
        written.update((f"its buffer {name}", own) for name, own in module.named_buffers())
        for name, tensor in written.items():
            if versions.get(name) != _version(tensor):
                raise ConfigError(f"{what} writes to {name}; {remedy}")
        if draws.found:
            raise ConfigError(f"{what} draws random numbers ({draws.found}); {remedy}")
        if not isinstance(made, Tensor) or made.shape[:2] != (1, len(rows)):
            shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ConfigError(
                f"{what} makes {shape} of {(1, *rows.shape)}, not one row for each token; {remedy}"
            )
        # Of one module alone, because asking waits for the device.
        if is_first and rows.is_floating_point() and not rows.is_meta and len(rows) > 1:
            middle = len(rows) // 2
            given = rows.clone()
            given[middle] = torch.nan
            spread = self.plain(module, given.unsqueeze(0))[0].isnan() & ~made[0].isnan()
            spread[middle] = False
            if spread.any():
                raise ConfigError(f"{what} lets a token see others; {remedy}")
        modes.add(module.training)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Another one where a tensor was written to, or is another; of what is made in inference mode
    nobody counts the writes."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


class _Draws(TorchDispatchMode):
    """Notes an operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            self.found = str(operation)
        return operation(*args, **(kwargs or {}))


def _cut_kind(kind: type[nn.Module], cut: _Cut) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_single = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not is_single or args[0].ndim < 3 or args[0].shape[:2].numel() <= cut.tokens:
            return cut.forward(self, *args, **kwargs)
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        return _InParts.apply(self, cut, weights, args[0], *weights)

    # Because the compiler would take the loop apart, and hold what is inside of all parts at once.
    alone = torch._dynamo.disable(forward)
    return type(kind.__name__, (kind,), {"forward": alone, "__module__": kind.__module__})


class _InParts(Function):
    """See [Note: row-wise modules]. ``weights`` are given twice: autograd is to know of them, and
    must not save them, because whoever has hooks on saved tensors may hand back others."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, cut: _Cut, weights: list[Tensor], input: Tensor, *_: Tensor
    ) -> Any:
        ctx.module, ctx.cut, ctx.weights = module, cut, weights
        ctx.autocast = _autocast_of(input)
        ctx.save_for_backward(input)
        # Detached, because views of an input say that they want a gradient, and have no graph.
        rows = input.detach().flatten(0, 1)
        first, *others = _parts(len(rows), cut.tokens)
        with torch.autocast(**ctx.autocast):
            cut.look(module, rows[first])
            made = cut.forward(module, rows[first].unsqueeze(0))
            # No view is returned, because nobody could write to one in place.
            output = made.new_empty(*input.shape[:2], *made.shape[2:])
            outputs = output.view(len(rows), *made.shape[2:])
            outputs[first] = made[0]
            del made
            for part in others:
                outputs[part] = cut.forward(module, rows[part].unsqueeze(0))[0]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (input,), cut, weights = ctx.saved_tensors, ctx.cut, ctx.weights
        needs_input = ctx.needs_input_grad[3]
        rows, gradients = input.flatten(0, 1), gradient.flatten(0, 1)
        of_input = torch.empty_like(rows) if needs_input else None
        sums: list[Tensor | None] = [None] * len(weights)
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            for part in _parts(len(rows), cut.tokens):
                given = rows[part].unsqueeze(0).detach().requires_grad_(needs_input)
                wanted = [given, *weights] if needs_input else weights
                # A view, because who watches the backward of modules cannot have hooks on leaves.
                made = cut.forward(ctx.module, given.view_as(given))
                if not made.requires_grad:  # what it makes depends on nothing that is trained
                    return None, None, None, torch.zeros_like(input) if needs_input else None, *sums
                if part.start == 0:
                    _refuse_others(made, wanted, ctx.module, cut.name)
                found = list(
                    torch.autograd.grad(
                        made, wanted, gradients[part].unsqueeze(0), allow_unused=True
                    )
                )
                del made
                if of_input is not None:
                    own = found.pop(0)
                    of_input[part] = 0 if own is None else own[0]
                sums = list(map(_added, sums, found))
        rounded = [
            None if sum_ is None else sum_.to(weight.dtype)
            for sum_, weight in zip(sums, weights, strict=True)
        ]
        return None, None, None, None if of_input is None else of_input.view_as(input), *rounded


def _parts(num_rows: int, tokens: int) -> Iterator[slice]:
    """At most ``tokens`` rows each, and as many each but for the last, so that the compiler sees
    two shapes at most."""
    size = -(-num_rows // -(-num_rows // tokens))
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _added(sum_: Tensor | None, own: Tensor | None) -> Tensor | None:
    """In fp32 or wider."""
    if own is None or sum_ is None:
        is_narrow = own is not None and own.dtype in (torch.bfloat16, torch.float16)
        return sum_ if own is None else own.float() if is_narrow else own
    return sum_.add_(own)


def _autocast_of(input: Tensor) -> dict[str, Any]:
    """Returns it as it is now, but for its cache, of which what is made without a graph would be
    used where one is needed."""
    # Whoever asks for shapes alone is on the meta device, which has no autocast.
    kind = "cpu" if input.is_meta else input.device.type
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": False,
    }


def _refuse_others(made: Tensor, wanted: Sequence[Tensor], module: nn.Module, name: str) -> None:
    """Raises for a tensor with a gradient that is no parameter of the module: it would get none."""
    known = set(map(id, wanted))
    for leaf in leaves_beside([made], ()):
        if id(leaf) not in known:
            raise ConfigError(
                f"{name} ({type(module).__name__}) computes with a tensor of shape "
                f"{tuple(leaf.shape)} that wants a gradient and is neither its input nor a "
                "parameter of its own; take it out of row_wise, or pass tokens_at_once=0"
            )
