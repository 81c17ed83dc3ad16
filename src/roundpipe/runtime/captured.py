"""Layers whose kernels are queued again in one go, forward and backward.

[Note: captured layers] A small layer's kernels take less time than queueing them one by one. Where
a layer stays on its device, is given inputs of the same form and comes with the same modules, both
passes are recorded once and replayed from then on: the same kernels on the same memory. See
docs/internals/device-graphs.md for what may be recorded, and who owns which memory.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from ..device import Device
from ..errors import ConfigError
from ..layers.structure import Snapshot
from ..memory.slots import SlotPool
from ..recompute.user_data import Running
from .stage import MicrobatchRun, Stage

_log = logging.getLogger("roundpipe")
_SEEN_BEFORE = 3  # stage runs alike before one is recorded
_KEPT_UNUSED = 20  # calls
_OF_SPARE = 0.5  # of the memory that a call leaves, what recorded work may keep
# A layer that changes often, in its modules or the form of its inputs, is recorded so many times,
# and once more after so many replays for each time.
_RECORDED_FREELY, _WORTH_RECORDING = 8, 20
# Whose modules do nothing in a forward but compute. Others may count, draw or print, which is not
# recorded.
_KNOWN = frozenset({"torch", "transformers", "peft", "roundpipe"})
_CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype)
_PLAIN = (torch.Tensor, nn.Parameter)
_Turn = tuple[int, int]  # one microbatch of one stage run


class _Form(NamedTuple):
    """What a recorded layer depends on, but for the values of tensors that it is given or has."""

    spec: Any
    leaves: tuple[Any, ...]
    only_loss: bool
    ambient: Any
    mode: tuple[bool, ...]


def _form_of(
    run: MicrobatchRun, layer: int, leaves: Sequence[Any], spec: Any, device: torch.device
) -> _Form | None:
    """None where a leaf is neither a plain tensor of the device nor a constant. The value of a
    tensor on the host would be recorded."""
    described: list[Any] = []
    for leaf, first in zip(leaves, _first_places(leaves), strict=True):
        if isinstance(leaf, torch.Tensor):
            is_plain = type(leaf) in _PLAIN and leaf.layout is torch.strided
            if not is_plain or leaf.device != device or leaf.is_inference():
                return None
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, first))
        elif isinstance(leaf, _CONSTANTS):
            described.append((type(leaf), leaf))
        else:
            return None
    call = run.call
    mode = run.stage.layer_modes[layer]
    return _Form(spec, tuple(described), call.asked.only_loss, call.model.ambient, mode)


def _first_places(leaves: Sequence[Any]) -> list[int]:
    """Of each leaf, where it comes first: code may ask whether two are the same."""
    places: dict[int, int] = {}
    return [places.setdefault(id(leaf), place) for place, leaf in enumerate(leaves)]


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Static:
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
        self._turn: _Turn | None = None  # in which it was filled

    def _part_of(self, leaf: torch.Tensor) -> torch.Tensor:
        for place in self._expanded:
            leaf = leaf.narrow(place, 0, 1)
        return leaf

    def _has(self, leaf: torch.Tensor) -> bool:
        if self._last is None:
            return False
        last, version = self._last
        return last is leaf and version == leaf._version

    def suits(self, leaf: torch.Tensor, turn: _Turn) -> bool:
        """Whether ``leaf`` may be put in: not over another one of the same microbatch, which the
        backward of a layer before may be still to read."""
        return self._turn != turn or self._has(leaf)

    def fill(self, leaf: torch.Tensor, turn: _Turn) -> None:
        """To be called without grad."""
        if self._has(leaf):
            return
        self._own.copy_(self._part_of(leaf))
        # Only what carries no gradient is handed from layer to layer as it is, and shared.
        if not leaf.requires_grad:
            self._last, self._turn = (leaf, leaf._version), turn

    def forget(self) -> None:
        self._last = self._turn = None


class _CapturedLayer:
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
        statics: weakref.WeakValueDictionary[Any, _Static],
        turn: _Turn,
        *,
        is_first: bool,
    ) -> None:
        self._module = module
        self.settings = Snapshot((), _settings_of(module))
        self._is_first = is_first
        self._spec = spec
        self.inputs: dict[int, _Static] = {}
        self._given = list(leaves)
        for place, first in enumerate(_first_places(leaves)):
            leaf = leaves[place]
            if not isinstance(leaf, torch.Tensor):
                continue
            if first != place:
                self._given[place] = self._given[first]
                continue
            key = place, leaf.shape, leaf.stride(), leaf.dtype
            static = None if leaf.requires_grad else statics.get(key)
            if static is None or not static.suits(leaf, turn):
                static = _Static(leaf)
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

    def suits(self, leaves: Sequence[Any], turn: _Turn) -> bool:
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
                place is not None or isinstance(leaf, (torch.Tensor, *_CONSTANTS))
                for leaf, place in leaves
            )
        )

    def arrive(self, gradient: torch.Tensor) -> None:
        """That of its tracked output comes."""
        assert self._arriving is not None
        self._arriving[0].copy_(gradient)

    def run(self, leaves: Sequence[Any], turn: _Turn, parameters: Sequence[nn.Parameter]) -> Any:
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
        ctx: Any, layer: _CapturedLayer, leaves: Sequence[Any], turn: _Turn, *_: torch.Tensor
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


class _Seen:
    """A layer, as its last stage runs saw it: ``slot`` has its weights, ``module`` is its replica.
    ``captured`` once it is recorded. Until then it keeps neither: slots are given back, and
    replicas that were changed may hold activations."""

    def __init__(self, form: _Form, module: nn.Module, slot: torch.Tensor) -> None:
        self.form = form
        self._module = weakref.ref(module)
        self._slot = weakref.ref(slot)
        self.num_stages = 0
        self.last_call = 0
        self.stage: weakref.ref[Stage] | None = None  # the last one
        self.is_refused = False
        self.captured: _CapturedLayer | None = None

    def is_of(self, form: _Form, module: nn.Module, slot: torch.Tensor) -> bool:
        return (
            self._module() is module
            and self._slot() is slot
            and self.form == form
            and (self.captured is None or self.captured.settings.is_true)
        )

    @property
    def is_over(self) -> bool:
        """Whether it cannot come again."""
        return self._module() is None or self._slot() is None


class CapturedLayers:
    """Of one device. Used by its worker, on the compute lane.

    Args:
        layers: of the model; those whose class is there once are left as they are.
        is_wanted: None for layers that are known to do nothing but compute, on accelerators.
    """

    def __init__(
        self, device: Device, layers: Sequence[nn.Module], slots: SlotPool, is_wanted: bool | None
    ) -> None:
        self._device = device
        self._slots = slots
        self._is_told = bool(is_wanted)
        self._ways = _ways()
        counts = Counter(map(type, layers))
        is_accelerated = device.torch_device.type != "cpu"
        self._layers = frozenset(
            index
            for index, layer in enumerate(layers)
            if is_wanted is not False
            and counts[type(layer)] > 1
            and not any(True for _ in layer.buffers())
            and (is_wanted or (is_accelerated and _are_known(layer.modules())))
        )
        self._call = 0
        # By layer, address of its weights, of which there may be two in turn, and form of its
        # inputs: a batch without padding may come without a mask.
        self._seen: dict[Any, _Seen] = {}
        self._recorded: Counter[int] = Counter()
        self._replayed: Counter[int] = Counter()
        self._statics = weakref.WeakValueDictionary[Any, _Static]()
        self._num_bytes = 0

    def call(self, run: MicrobatchRun, layer: int, module: nn.Module, value: Any) -> Any:
        """The layer's output, as ``module`` would make it, with a graph whose backward comes before
        the layer runs again."""
        is_out = layer not in self._layers or run.again or run.stage.keeps_graphs or _is_watched()
        if is_out:
            return called(module, value, is_first=layer == 0)
        leaves, spec = pytree.tree_flatten(value)
        form = _form_of(run, layer, leaves, spec, self._device.torch_device)
        seen = None if form is None else self._find(run.stage, layer, module, form)
        if seen is None:
            return called(module, value, is_first=layer == 0)
        turn = id(run.stage), run.microbatch
        if seen.captured is None and self._is_due(seen, run, layer):
            self._capture(seen, run, layer, module, (leaves, spec), turn)
        if seen.captured is not None and not seen.captured.suits(leaves, turn):
            self._drop(seen)  # to be recorded again, with inputs of its own
        if seen.captured is None:
            versions = _versions(leaves)
            output = called(module, value, is_first=layer == 0)
            seen.is_refused |= _versions(leaves) != versions  # others read what it writes to
            return output
        self._replayed[layer] += 1
        return seen.captured.run(leaves, turn, _trained(run.stage, layer))

    def _find(self, stage: Stage, layer: int, module: nn.Module, form: _Form) -> _Seen | None:
        """What is known of the layer in this form; None if it changes too often."""
        slot = stage.uploaded[layer].slot.buffer
        key = layer, slot.data_ptr(), form.leaves
        seen = self._seen.get(key)
        if seen is None or not seen.is_of(form, module, slot):
            times = self._recorded[layer]
            if times >= _RECORDED_FREELY and self._replayed[layer] < times * _WORTH_RECORDING:
                return None
            if seen is not None:
                self._drop(seen)
            seen = self._seen[key] = _Seen(form, module, slot)
        if seen.stage is None or seen.stage() is not stage:
            seen.stage = weakref.ref(stage)
            seen.num_stages += 1
        seen.last_call = self._call
        return seen

    def _is_due(self, seen: _Seen, run: MicrobatchRun, layer: int) -> bool:
        """Whether the layer is to be recorded now. Not in a call that is timed, which would take
        the recording for the layer."""
        memory, replica = run.call.memory, run.stage.replicas[layer]
        return (
            not seen.is_refused
            and seen.num_stages > _SEEN_BEFORE
            and replica.is_as_made
            and not replica.with_buffers
            and (self._is_told or _are_known(owner for owner, _ in replica.pairs))
            and not memory.is_timed
            and memory.measured.knows_graph(layer)
        )

    def _capture(
        self,
        seen: _Seen,
        run: MicrobatchRun,
        layer: int,
        module: nn.Module,
        given: tuple[Sequence[Any], Any],
        turn: _Turn,
    ) -> None:
        """Records the layer, if there is room."""
        spare = _OF_SPARE * (run.call.memory.slot_limit - self._slots.num_bytes)
        num_held = sum(known.captured is not None for known in self._seen.values())
        if self._num_bytes + self._num_bytes / max(num_held, 1) >= spare:
            seen.is_refused = True
            return
        self._recorded[layer] += 1
        captured = _CapturedLayer(
            module,
            list(run.stage.residents[layer].parameters.values()),
            *given,
            self._statics,
            turn,
            is_first=layer == 0,
        )
        state = self._device.rng_state()
        try:
            is_recorded = captured.record(self._device)
        finally:
            self._device.set_rng_state(state)  # because the layer itself is still to draw
        if not is_recorded:
            seen.is_refused = True
            _log.info("layer %d cannot be captured: it waits for values", layer)
            return
        self._num_bytes += captured.num_bytes
        seen.captured = captured

    def begin_call(self) -> None:
        """Lets go of what the last calls did not run: memory that it holds may be what another plan
        counts on. And of all if kernels are chosen in another way now."""
        self._call += 1
        ways = _ways()
        if ways != self._ways:
            self.forget()
        self._ways = ways
        for key, seen in list(self._seen.items()):
            if seen.is_over or seen.last_call < self._call - _KEPT_UNUSED:
                self._drop(self._seen.pop(key))

    def let_inputs_go(self) -> None:
        """A stage run is over."""
        for static in self._statics.values():
            static.forget()

    def _drop(self, seen: _Seen) -> None:
        if seen.captured is not None:
            self._num_bytes -= seen.captured.num_bytes
            seen.captured = None

    def forget(self) -> None:
        """Lets go of all that was recorded, and its memory."""
        self._seen.clear()
        self._statics.clear()
        self._num_bytes = 0

    def give_up(self) -> None:
        """The device's memory did not suffice: nothing is recorded any more."""
        self.forget()
        self._layers = frozenset()


def _trained(stage: Stage, layer: int) -> list[nn.Parameter]:
    return [own for own in stage.residents[layer].parameters.values() if own.requires_grad]


def called(module: nn.Module, value: Any, *, is_first: bool) -> Any:
    """What a layer makes of its input, which is the model's own for the first one."""
    if is_first:
        args, kwargs = value
        return module(*args, **kwargs)
    return module(value)


def _are_known(parts: Iterable[nn.Module]) -> bool:
    """Whether all are of libraries whose forwards do nothing but compute."""
    return all(
        type(part).__module__.partition(".")[0] in _KNOWN and "forward" not in vars(part)
        for part in parts
    )


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


def _ways() -> tuple[Any, ...]:
    """What kernels are chosen by, in all threads, beside what they are given."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _is_watched() -> bool:
    """Whether somebody wants to see every operation as it runs."""
    return bool(modules._has_any_global_hook()) or torch.is_anomaly_enabled()
