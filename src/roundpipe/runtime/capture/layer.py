"""One layer's kernels, recorded and replayed: see [Note: captured layers]."""

import logging
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ...device import Device
from ...errors import ConfigError
from ...layers.structure import Snapshot
from ...recompute.user_data import Running

_log = logging.getLogger("roundpipe")
CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype)
Turn = tuple[int, int]  # one microbatch of one stage run


def first_places(leaves: Sequence[Any]) -> list[int]:
    """Of each leaf, where it comes first: code may ask whether two are the same."""
    places: dict[int, int] = {}
    return [places.setdefault(id(leaf), place) for place, leaf in enumerate(leaves)]


class Static:
    """Memory that a recorded layer reads an input from. Filled before each replay, but where that
    was the same tensor the last time."""

    def __init__(self, leaf: torch.Tensor) -> None:
        # Dimensions that are expanded stay so, because kernels are chosen by strides.
        self._expanded = [place for place, stride in enumerate(leaf.stride()) if not stride]
        part = self._part_of(leaf.detach())
        self._own = torch.empty_strided(
            part.shape, part.stride(), dtype=part.dtype, device=part.device
        )
        self.tensor = self._own.expand(leaf.shape)
        self._last: tuple[torch.Tensor, int] | None = None
        self._turn: Turn | None = None  # in which it was filled

    def _part_of(self, leaf: torch.Tensor) -> torch.Tensor:
        for place in self._expanded:
            leaf = leaf.narrow(place, 0, 1)
        return leaf

    def _has(self, leaf: torch.Tensor) -> bool:
        if self._last is None:
            return False
        last, version = self._last
        return last is leaf and version == leaf._version

    def suits(self, leaf: torch.Tensor, turn: Turn) -> bool:
        """Whether ``leaf`` may be put in: not over another one of the same microbatch, which the
        backward of a layer before may be still to read."""
        return self._turn != turn or self._has(leaf)

    def fill(self, leaf: torch.Tensor, turn: Turn) -> None:
        """To be called without grad."""
        if self._has(leaf):
            return
        self._own.copy_(self._part_of(leaf))
        # Only what carries no gradient is handed from layer to layer as it is, and shared.
        if not leaf.requires_grad:
            self._last, self._turn = (leaf, leaf._version), turn

    def forget(self) -> None:
        self._last = self._turn = None


class CapturedLayer:
    """One layer's forward and backward for inputs of one form. Used on the compute lane.

    Args:
        statics: of leaves that carry no gradient, shared by all layers of the device that are given
            the same ones.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        leaves: Sequence[Any],
        spec: Any,
        statics: weakref.WeakValueDictionary[Any, Static],
        turn: Turn,
        *,
        is_first: bool,
    ) -> None:
        self._module = module
        self.settings = Snapshot((), _settings_of(module))
        self._is_first = is_first
        self._spec = spec
        self.inputs: dict[int, Static] = {}
        self._given = list(leaves)
        for place, first in enumerate(first_places(leaves)):
            leaf = leaves[place]
            if not isinstance(leaf, torch.Tensor):
                continue
            if first != place:
                self._given[place] = self._given[first]
                continue
            key = place, leaf.shape, leaf.stride(), leaf.dtype
            static = None if leaf.requires_grad else statics.get(key)
            if static is None or not static.suits(leaf, turn):
                static = Static(leaf)
                if not leaf.requires_grad:
                    statics.setdefault(key, static)
            with torch.no_grad():
                static.fill(leaf, turn)
            self.inputs[place] = static
            self._given[place] = static.tensor.detach().requires_grad_(leaf.requires_grad)
        self.carrying = [place for place in self.inputs if leaves[place].requires_grad]
        # Of its own, because autograd has what leads to a parameter run where that was used first.
        own = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in parameters}
        self._parameters: dict[str, torch.Tensor] = {
            name: own[id(p)]
            for name, p in module.named_parameters(remove_duplicate=False)
            if id(p) in own
        }
        self._trained = [p for p in own.values() if p.requires_grad]
        self.num_bytes = 0  # of the device, that it keeps
        self._arriving: list[torch.Tensor] | None = None
        self.awaited: object = None  # stands for the forward whose backward is to come

    def suits(self, leaves: Sequence[Any], turn: Turn) -> bool:
        """Whether its inputs may be filled with ``leaves``."""
        return all(static.suits(leaves[place], turn) for place, static in self.inputs.items())

    def forward(self) -> None:
        """Makes ``outputs``, and in ``passed`` says of each which input it is, if it is one."""
        value = pytree.tree_unflatten(self._given, self._spec)
        args, kwargs = value if self._is_first else ((value,), {})
        # What it saves for a recompute nobody will ask for, and it would save it twice.
        with torch.enable_grad(), Running(None):
            output = functional_call(self._module, self._parameters, args, kwargs)
        made, self.output_spec = pytree.tree_flatten(output)
        places = {id(self._given[place]): place for place in self.inputs}
        self.passed = [places.get(id(leaf)) for leaf in made]
        self.outputs = made
        self.tensors = [
            leaf
            for leaf, place in zip(made, self.passed, strict=True)
            if place is None and isinstance(leaf, torch.Tensor)
        ]
        self._tracked = [tensor for tensor in self.tensors if tensor.requires_grad]
        if self._arriving is None:
            self._arriving = [torch.empty_like(tensor) for tensor in self._tracked]

    def backward(self) -> None:
        """Makes ``gradients`` of what ``forward`` has made, for each input that carries one and
        each parameter that trains."""
        self.gradients = torch.autograd.grad(
            self._tracked,
            [*(self._given[place] for place in self.carrying), *self._trained],
            self._arriving,
            allow_unused=True,
        )

    def _is_recordable(self, device: torch.device) -> bool:
        """Whether what ``forward`` has made is all there is to it, and one of it carries a
        gradient: if of two only one got one, parameters might get zeros for none."""
        leaves = zip(self.outputs, self.passed, strict=True)
        return (
            len(self._tracked) == 1
            and len(set(map(id, self.tensors))) == len(self.tensors)
            and all(tensor.device == device for tensor in self.tensors)
            and all(
                place is not None or isinstance(leaf, (torch.Tensor, *CONSTANTS))
                for leaf, place in leaves
            )
        )

    def arrive(self, gradient: torch.Tensor) -> None:
        """That of its tracked output comes."""
        assert self._arriving is not None
        self._arriving[0].copy_(gradient)

    def run(self, leaves: Sequence[Any], turn: Turn, parameters: Sequence[nn.Parameter]) -> Any:
        """The layer's output for leaves of its form. ``parameters``: those of this stage run, which
        are where those were that it was recorded with."""
        carried = [leaves[place] for place in self.carrying]
        tensors = _Replayed.apply(self, leaves, turn, *carried, *parameters)
        made = iter(tensors)
        given = [
            leaves[place]
            if place is not None
            else next(made)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf, place in zip(self.outputs, self.passed, strict=True)
        ]
        return pytree.tree_unflatten(given, self.output_spec)

    def record(self, device: Device) -> bool:
        """False if it cannot be recorded. Whatever is wrong with the layer it says itself when it
        runs."""
        try:
            recorded = device.capture(self.forward, self.backward)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _log.debug("a layer is not recorded: %s", error)
            return False
        if recorded is None or not self._is_recordable(device.torch_device):
            return False
        self.replay_forward, self.replay_backward = recorded.replays
        self.num_bytes = recorded.num_bytes
        return True

    @property
    def tracks(self) -> list[bool]:
        return [tensor.requires_grad for tensor in self.tensors]


class _Replayed(torch.autograd.Function):
    """What autograd sees of a captured layer. Copies go out, because the next microbatch overwrites
    what a replay has made."""

    @staticmethod
    def forward(
        ctx: Any, layer: CapturedLayer, leaves: Sequence[Any], turn: Turn, *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        for place, static in layer.inputs.items():
            static.fill(leaves[place], turn)
        layer.replay_forward()
        layer.awaited = ctx.awaited = object()
        made = tuple(tensor.detach().clone() for tensor in layer.tensors)
        ctx.layer = layer
        ctx.tracks = layer.tracks
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(tensor for tensor, tracked in zip(made, ctx.tracks, strict=True) if not tracked)
        )
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        layer = ctx.layer
        (gradient,) = (g for g, is_tracked in zip(gradients, ctx.tracks, strict=True) if is_tracked)
        if gradient is None:
            return (None,) * (3 + len(layer.gradients))
        if layer.awaited is not ctx.awaited:
            raise ConfigError(
                "a backward came a second time (retain_graph=True) through a layer whose kernels "
                "are recorded, which keeps nothing for that; pass cuda_graphs=False"
            )
        layer.awaited = None
        layer.arrive(gradient)
        layer.replay_backward()
        # Autograd copies those of parameters itself, because somebody else holds on to them.
        num_inputs = len(layer.carrying)
        passed_on = (
            None if gradient is None else gradient.clone()
            for gradient in layer.gradients[:num_inputs]
        )
        return None, None, None, *passed_on, *layer.gradients[num_inputs:]


def _settings_of(module: nn.Module) -> list[dict[str, Any]]:
    """What objects that its modules hold, and share with the user's, have in them: a config says
    for instance which attention is used."""
    held = {id(value): value for part in module.modules() for value in list(vars(part).values())}
    return [
        vars(value)
        for value in held.values()
        if hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, torch.Tensor, ModuleType))
        and not callable(value)
    ]
