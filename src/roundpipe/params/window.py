"""The gradients between two optimizer steps: what offloaded in one call or more, added up, and what
of it each master shows to ``step_fn``."""

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from ..memory import huge_pages
from ..memory.state_file import Memory
from ..trace import spans
from .dtypes import GradientRules
from .gradient_buffers import GradientBuffer, GradientBuffers
from .gradients import Backward, OffloadedLayer
from .placement.held import Held, hold_as
from .working import LayerParameters, ParameterStore

if TYPE_CHECKING:
    from .masters import Masters

_NOTHING: Mapping[int, Sequence[OffloadedLayer]] = MappingProxyType({})
_first_microbatch = attrgetter("first_microbatch")


class Offloaded(NamedTuple):
    """What reached one parameter: memory of the window, not to be written, valid until the window
    lets go of it.

    ``parts`` has one tensor for each use and share, in the order of layers, then of microbatches,
    to be added in ``summed``. ``norms``: what `norms_of` it is, if it is one use in one call.
    """

    parts: tuple[torch.Tensor, ...]
    norms: torch.Tensor | None
    summed: torch.dtype

    def total(self) -> torch.Tensor:
        """On the host, wherever they were offloaded to."""
        total = self.parts[0].cpu()
        for part in self.parts[1:]:
            total = total.to(self.summed) + part.cpu()
        return total


class GradientWindow:
    """The gradients between two optimizer steps: one sum per use over the calls committed so far.

    Touched by the optimizer thread only; the first call's buffers are adopted, so one call per step
    copies nothing.
    """

    def __init__(
        self, store: ParameterStore, rules: GradientRules, buffers: GradientBuffers
    ) -> None:
        self._store = store
        self._rules = rules
        self._buffers = buffers
        self._layers: dict[int, list[_LayerSums]] = {}  # one for each share of the microbatches
        self._left: dict[int, torch.Tensor] = {}  # by the id of the parameter
        self.error: BaseException | None = None
        self.num_changes = 0  # tells apart what it has held

    def commit(self, call: Backward) -> None:
        """Adds a call's gradients once it is finished. Sums over calls are fp32 (or wider).

        What different shares of the microbatches made stays apart until somebody reads it, because
        adding it up here would take memory and a pass of its own.
        """
        with spans.span("wait_offloaded"):
            call.wait_finished()
        offloaded = sorted(call.offloaded, key=_first_microbatch)
        with spans.span("commit", layers=len(offloaded)):
            self.num_changes += 1
            shares_seen: Counter[int] = Counter()
            for one in offloaded:
                layer, shares = one.layer.layer, self._layers.setdefault(one.layer.layer, [])
                if shares_seen[layer] == len(shares):
                    shares.append(_LayerSums(one.layer, self._buffers))
                shares[shares_seen[layer]].add(one)
                shares_seen[layer] += 1

    @torch.no_grad()
    def begin_with_left(self, masters: "Masters") -> None:
        """Takes the gradients that the step before has not dropped. With no call committed yet."""
        self.num_changes += 1
        found = ((id(parameter), master.left()) for parameter, master in masters.existing())
        self._left |= {key: gradient for key, gradient in found if gradient is not None}

    def add(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Adds what came in another way than through calls."""
        self.num_changes += 1
        for parameter, gradient in gradients.items():
            left = self._left.get(id(parameter))
            self._left[id(parameter)] = gradient if left is None else left + gradient

    def show(self, masters: "Masters", totals: Mapping[int, Offloaded] | None = None) -> None:
        """Opens every master's gradient to the step that begins.

        Args:
            totals: those of all ranks together, by the parameter's id, in place of the window's.

        Raises:
            ConfigError: a gradient arrived for a parameter that no optimizer can have, since it has
                no master yet.
        """
        handed_out = bool(masters.by_parameter)
        for parameter in self._store.parameters:
            # Also where it has been frozen since, as an adapter is when another one is set.
            own = self.offloaded(parameter) if totals is None else totals.get(id(parameter))
            master = masters.by_parameter.get(id(parameter))
            if master is None:
                if own is None and not parameter.requires_grad:
                    continue
                if handed_out and own is not None:
                    raise ConfigError(
                        f"parameter {self._store.name_of(parameter)!r} became trainable after the "
                        "optimizer was made "
                        "and would get no update; make the optimizer again over optim_parameters()"
                    )
                master = masters.of(parameter)
            master.open(own)

    def offloaded(
        self, parameter: nn.Parameter, coming: Mapping[int, Sequence[OffloadedLayer]] = _NOTHING
    ) -> Offloaded | None:
        """What the step before has left and the calls committed so far have made; None if nothing
        reached the parameter. ``coming``, by layer, is to be committed later and counts as if it
        had been."""
        left = self._left.get(id(parameter))
        summed = self._rules.dtypes(parameter).summed
        parts, norms = [] if left is None else [left], None
        for use in self._store.uses[id(parameter)]:
            new = sorted(coming.get(use.layer, ()), key=_first_microbatch)
            for sums, one in zip_longest(self._layers.get(use.layer, ()), new):
                gradient = None if sums is None else sums.gradients.get(use.place)
                added = None if one is None else one.gradients.get(use.place)
                if gradient is None:
                    gradient = added
                elif added is not None:
                    gradient = gradient.cpu().to(summed) + added.cpu()
                if gradient is not None:
                    parts.append(gradient)
                    norms = sums.norms.get(use.place) if sums and added is None else None
        if len(parts) < 2:
            return Offloaded((parts[0],), norms, parts[0].dtype) if parts else None
        if left is not None:
            summed = torch.promote_types(summed, left.dtype)
        return Offloaded(tuple(parts), None, summed)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum of what offloaded; None if nothing did."""
        offloaded = self.offloaded(parameter)
        return None if offloaded is None else offloaded.total()

    def release(self) -> None:
        """Forgets all sums and gives the memory back for the next call."""
        self._left.clear()
        for layer in list(self._layers):
            self._release(layer)

    def release_layers(self, layers: Iterable[LayerParameters]) -> None:
        """Gives some layers' memory back. No update that reads it is to come any more."""
        for layer in layers:
            self._release(layer.layer)

    def _release(self, layer: int) -> None:
        for sums in self._layers.pop(layer, ()):
            sums.give_back()


class _LayerSums:
    """One layer's gradients in a window. ``norms`` holds what came with a gradient to which nothing
    was added."""

    def __init__(self, layer: LayerParameters, buffers: GradientBuffers) -> None:
        self.gradients: dict[int, torch.Tensor] = {}
        self.norms: dict[int, torch.Tensor] = {}
        self._layer = layer
        self._buffers = buffers
        self._offloaded: GradientBuffer | None = None  # the first call's, adopted
        self._summed: GradientBuffer | None = None

    def add(self, offloaded: OffloadedLayer) -> None:
        if self._offloaded is None:
            self._offloaded = offloaded.buffer
            self.gradients, self.norms = dict(offloaded.gradients), dict(offloaded.norms)
            return
        if self._summed is None:
            # Not only those that train now, because the caller may have frozen some since the
            # calls.
            places = (
                {use.place for use in self._layer.trainable}
                | self.gradients.keys()
                | offloaded.gradients.keys()
            )
            self._summed = self._buffers.take_sums(
                self._layer, [u for u in self._layer.uses if u.place in places]
            )
            self.gradients = {
                place: self._begun(place, gradient) for place, gradient in self.gradients.items()
            }
        for place, gradient in offloaded.gradients.items():
            if place in self.gradients:
                self.gradients[place].add_(gradient.cpu())
                self.norms.pop(place, None)
            else:
                self.gradients[place] = self._begun(place, gradient)
        self._buffers.give_back(offloaded.buffer)

    def _begun(self, place: int, gradient: torch.Tensor) -> torch.Tensor:
        """A sum over calls that begins with ``gradient``, in memory of its dtype."""
        assert self._offloaded is not None
        assert self._summed is not None
        for target in (self._summed.tensors.get(place), self._offloaded.tensors.get(place)):
            if target is not None:
                return target if target is gradient else target.copy_(gradient)
        # Frozen in the first call, or without host memory because it offloaded on its device.
        return gradient.to("cpu", torch.promote_types(gradient.dtype, torch.float32), copy=True)

    def give_back(self) -> None:
        for buffer in (self._offloaded, self._summed):
            if buffer is not None:
                self._buffers.give_back(buffer)
        self.gradients.clear()


class Master(nn.Parameter):
    """A trainable parameter's copy for the optimizer.

    During a step its gradient first is what offloaded, in the offloaded dtype and not yet scaled by
    clipping; RoundPipe's own optimizers read that directly. ``.grad`` in the master's dtype is made
    when somebody else first reads it. Only the optimizer thread sees the gradient: a ``zero_grad``
    of the caller's must not reach into a step under way.

    ``memory``: where it lies, and where its moments are to be made. ``is_owned``: False if another
    rank has it; then this is its weight, and has no gradient ([Note: ranks]). ``is_set_outside``:
    somebody has set a gradient where no step would see it.
    """

    memory: Memory = huge_pages
    is_owned: bool = True
    is_shared_out: bool = False
    is_set_outside: bool = False

    _offloaded: Offloaded | None = None
    _made: torch.Tensor | None = None
    _thread: int | None = None
    scale: float = 1.0

    def open(self, offloaded: Offloaded | None) -> None:
        """The calling thread's step owns the gradient, if there is one, from here on."""
        self._offloaded, self._made, self.scale = offloaded, None, 1.0
        self._thread = threading.get_ident()

    def close(self) -> None:
        self._offloaded = self._made = self._thread = None

    def left(self) -> torch.Tensor | None:
        """The gradient if the step has not dropped it, as ``grad`` would show it but in fp32 or
        wider; not memory of the window."""
        gradient = self._made
        if self._offloaded is not None:
            total = self._offloaded.total()
            dtype = torch.promote_types(total.dtype, torch.float32)
            gradient = total.to(dtype, copy=len(self._offloaded.parts) == 1)
        if gradient is not None and self.scale != 1.0:
            gradient.mul_(self.scale)
            self.scale = 1.0
        return gradient

    @property
    def is_in_step(self) -> bool:
        """Whether the calling thread runs a step of this master's engine."""
        return self._thread == threading.get_ident()

    @property
    def _is_elsewhere(self) -> bool:
        return self._thread is not None and self._thread != threading.get_ident()

    def offloaded(self) -> tuple[torch.Tensor, ...]:
        """The gradient before ``scale`` is applied, as parts to be added, in whatever dtypes; empty
        if none arrived.

        Valid until the step ends; not to be written.
        """
        if self._offloaded is not None:
            return self._offloaded.parts
        return () if self._made is None else (self._made,)

    @property
    def has_gradient(self) -> bool:
        return self._offloaded is not None or self._made is not None

    @property
    def is_gradient_seen(self) -> bool:
        """Whether ``.grad`` was made or set, so that somebody else may write to it."""
        return self._made is not None

    @property
    def gradient_norms(self) -> torch.Tensor | None:
        """Of ``offloaded`` what `norms_of` gives, where the device has sent it along."""
        return None if self._offloaded is None else self._offloaded.norms

    @property
    def grad(self) -> torch.Tensor | None:
        if self._is_elsewhere:
            return None
        reader: str = sys._getframe(1).f_globals.get("__name__", "")
        _refuse_torch_grad_scaler(reader)
        if self.is_shared_out and reader == "torch.nn.utils.clip_grad":
            raise ConfigError(
                "torch's clipping was used in step_fn, where this rank has only a part of the "
                "gradients; use roundpipe.clip_grad_norm_, which measures those of all ranks"
            )
        if self._offloaded is not None:
            # A copy, because step_fn may keep it while the offloaded memory already serves the next
            # call.
            self._made, self._offloaded = self._offloaded.total().to(self.dtype, copy=True), None
        if self._made is not None and self.scale != 1.0:
            self._made.mul_(self.scale)
        self.scale = 1.0
        return self._made

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if self._is_elsewhere:
            self.is_set_outside = gradient is not None
        elif self.is_owned:
            self.is_set_outside = self._thread is None and gradient is not None
            self._offloaded, self._made, self.scale = None, gradient, 1.0


class HeldMaster(Held, Master):
    """A master that an update is going to write. See [Note: newest values]."""


hold_as(Master, HeldMaster)


def _refuse_torch_grad_scaler(reader: str) -> None:
    """Its scale may have moved on by now and its skips would come too late. ``reader``: the module
    that reads."""
    if reader.startswith("torch.") and reader.endswith("grad_scaler"):
        raise ConfigError(
            "torch's GradScaler was used in step_fn; use roundpipe.GradScaler, whose scale() goes "
            "into loss_fn, unscale_() and step() into step_fn, and update() after RoundPipe.step()"
        )
