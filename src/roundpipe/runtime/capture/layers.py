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
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from ...device import Device
from ...memory.slots import SlotPool
from ..stage import MicrobatchRun, Stage
from .layer import CONSTANTS, CapturedLayer, Static, Turn, first_places

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
_PLAIN = (torch.Tensor, nn.Parameter)


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
    for leaf, first in zip(leaves, first_places(leaves), strict=True):
        if isinstance(leaf, torch.Tensor):
            is_plain = type(leaf) in _PLAIN and leaf.layout is torch.strided
            if not is_plain or leaf.device != device or leaf.is_inference():
                return None
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, first))
        elif isinstance(leaf, CONSTANTS):
            described.append((type(leaf), leaf))
        else:
            return None
    call = run.call
    mode = run.stage.layer_modes[layer]
    return _Form(spec, tuple(described), call.asked.only_loss, call.model.ambient, mode)


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]


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
        self.captured: CapturedLayer | None = None

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
        self._kinds = [type(layer) for layer in layers]
        counts = Counter(self._kinds)
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
        self._statics = weakref.WeakValueDictionary[Any, Static]()
        self._num_bytes = 0

    def call(self, run: MicrobatchRun, layer: int, module: nn.Module, value: Any) -> Any:
        """The layer's output, as ``module`` would make it, with a graph whose backward comes before
        the layer runs again."""
        stage = run.stage
        is_out = layer not in self._layers or run.again or _is_watched()
        if is_out or stage.keeps_graphs or stage.tokens_at_once:
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
        turn: Turn,
    ) -> None:
        """Records the layer, if there is room."""
        spare = _OF_SPARE * (run.call.memory.slot_limit - self._slots.num_bytes)
        num_held = sum(known.captured is not None for known in self._seen.values())
        if self._num_bytes + self._num_bytes / max(num_held, 1) >= spare:
            seen.is_refused = True
            return
        self._recorded[layer] += 1
        captured = CapturedLayer(
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
            kind = self._kinds[layer]
            self._layers -= {one for one in self._layers if self._kinds[one] is kind}
            _log.info("%s cannot be captured: it waits for values, for instance", kind.__name__)
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

    def give_up(self) -> bool:
        """The device's memory did not suffice: nothing is recorded any more. Returns whether there
        were recordings, which held some of it."""
        were_any = any(seen.captured is not None for seen in self._seen.values())
        self.forget()
        self._layers = frozenset()
        return were_any


def _trained(stage: Stage, layer: int) -> list[nn.Parameter]:
    return [own for own in stage.residents[layer].parameters.values() if own.requires_grad]


def called(module: nn.Module, value: Any, *, is_first: bool) -> Any:
    """What a layer makes of its input, which is the model's own for the first one."""
    if is_first:
        args, kwargs = value
        return module(*args, **kwargs)
    return module(value)


def _are_known(parts: Iterable[nn.Module]) -> bool:
    """Says whether all are of libraries whose forwards do nothing but compute."""
    return all(
        type(part).__module__.partition(".")[0] in _KNOWN and "forward" not in vars(part)
        for part in parts
    )


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
