"""The plan that an engine would use once it had measured what was sketched, and what that holds of
a device and sends over the link."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import nn

from ..autoplan.free_memory import FreeMemory
from ..autoplan.host_room import HostRoom
from ..autoplan.planned import Planned
from ..autoplan.planner import Planner
from ..memory.pinning import HostMemory
from ..params.dtypes import GradientRules
from ..params.gradient_buffers import is_small
from ..params.placement.device_state import state_bytes
from ..params.placement.device_states import DeviceStates
from ..params.working import LayerParameters, ParameterStore
from ..plan.actions import Pass
from ..plan.best import plan_peak, smallest_plan, step_ms
from ..plan.costs import LayerCosts, StageSums, Workload
from ..plan.memory import held_beside
from ..plan.schedule import fused_passes
from .inside import GradientBytes, most_inside
from .machine import ImaginedDevice, Machine
from .sketch import LayerSketch
from .ways import OPTIMIZERS, Choice

# Updates after which an engine believes their times (`autoplan/rates.py`).
_UPDATES = 8
# Of memory that is written to for the first time (docs/internals/host-and-pages.md).
_NEW_BYTES_PER_MS = 4e6


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step, each as if it were all there is: what devices compute, ``again`` of
    that a second time for want of memory, what the busier way of the link carries, the update."""

    step: float
    compute: float
    again: float
    link: float
    update: float


class PlannedStep:
    """One step of training as planned.

    Args:
        layers: on the meta device, quantized as ``choice`` says.
        sketches: of them.
        tokens: of a microbatch.
        kind: of the devices.
        shortages: how often the engine's calls have run out of a device's memory before they fit.
        tokens_at_once: what row-wise modules run for, 0 for all.

    Raises:
        PlanError: no plan fits into a device.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        sketches: Sequence[LayerSketch],
        machine: Machine,
        choice: Choice,
        num_microbatches: int,
        tokens: int,
        *,
        kind: str,
        device_bytes: int,
        from_disk: float = 0.0,
        shortages: int = 0,
        has_states: bool = True,
        tokens_at_once: int = 0,
    ) -> None:
        self.choice, self.machine, self._sketches = choice, machine, sketches
        self.from_disk, self.kind = from_disk, kind
        self.tokens_at_once = tokens_at_once
        self._has_states = has_states and choice.optimizer_state_dir is None
        self.rules = GradientRules(torch.float32, None)
        memory = HostMemory(choice.pin_model, accelerated=False)  # type: ignore[arg-type]
        self.store = ParameterStore(layers, memory, device="meta")
        devices: Any = [ImaginedDevice(i, device_bytes, kind) for i in range(machine.gpus)]
        room = self._input_room()
        self._planner = Planner(
            self.store, devices, layers=layers, rules=self.rules, input_room=lambda: room
        )
        self._planner.note_step(choice.is_async)
        self.num_microbatches = num_microbatches
        # As in an engine: the first call's plan is made of guesses, and stays if it is good enough.
        self.first = self._plan(tokens)
        up = machine.up_bytes_per_ms(choice.pin_model, from_disk=from_disk)
        self._tell_what_was_measured(up)
        for _ in range(shortages):
            self.first.measured.record_shortage()
        self._planner.note_writes(False)
        self._planner.reconsider()
        self.planned = self._plan(tokens)
        self.passes = fused_passes(self.planned.plan, self.workload.first_trained)
        one = devices[0] if machine.gpus == 1 and self._has_states else None
        self._free = FreeMemory(self._planner, self.store, DeviceStates(self.store, one, memory))

    def _input_room(self) -> float:
        """All other state leaves this of the machine's memory for kept inputs."""
        on_disk = self.choice.optimizer_state_dir is not None
        held = HostRoom(inf, self.store.parameters, self.rules, has_state_file=on_disk)
        in_files = held.frozen if self.choice.pin_model == "off" else 0
        per_master = 0 if on_disk else OPTIMIZERS[self.choice.optimizer].moment_bytes / 4
        taken = held.weights - in_files + held.masters * (1 + per_master) + held.gradients
        return max(0.0, self.machine.ram_bytes - taken)

    def _plan(self, tokens: int) -> Planned:
        return self._planner.plan(
            "fused",
            self.num_microbatches,
            None,
            tokens=tokens,
            elements=tokens,
            input_bytes=self._sketches[0].inputs,
            tokens_at_once=self.tokens_at_once,
        )

    def _tell_what_was_measured(self, up_bytes_per_ms: float) -> None:
        measured, rates = self._planner.measured(), self._planner.rates
        for index, sketch in enumerate(self._sketches):
            measured.record_saved_bytes(index, sketch.saved, sketch.largest)
            measured.record_input_bytes(index, sketch.inputs)
            for computation, flops in (
                ("forward", sketch.forward),
                ("recompute", sketch.forward),
                ("backward", sketch.backward),
            ):
                ms = max(flops / (self.machine.tflops * 1e9), 0.01)
                measured.record_time(computation, index, ms)  # type: ignore[arg-type]
        rates.record_copy("up", 1 << 30, (1 << 30) / up_bytes_per_ms)
        rates.record_copy("down", 1 << 30, (1 << 30) / (self.machine.link * 1e6))
        for _ in range(_UPDATES):
            rates.record_update(self.update_ms_of(self.store.layers))

    def update_ms_of(self, layers: Sequence[LayerParameters]) -> float:
        """An update of those layers on the host."""
        trained = {id(use.parameter): use.parameter for layer in layers for use in layer.trainable}
        if not trained:
            return 0.0
        elements = sum(parameter.numel() for parameter in trained.values())
        return self.machine.update_ms(
            elements,
            self.choice.optimizer,
            max(p.itemsize for p in trained.values()),
            is_on_disk=self.choice.optimizer_state_dir is not None,
        )

    @cached_property
    def problem(self) -> tuple[LayerCosts, Workload]:
        return self._planner.problem_of(self.planned)

    @property
    def workload(self) -> Workload:
        return self.problem[1]

    # What stays on the device.

    @cached_property
    def on_device(self) -> dict[int, int]:
        """Device states: what each layer that has one takes, by its number."""
        self._free.let_device_states(self.planned)
        states, left = dict[int, int](), self._free.left_bytes(self.planned)
        is_async = self.choice.is_async
        is_known = self.choice.optimizer in ("adamw", "sgd")
        moves = self._has_states and is_known and self.machine.gpus == 1
        if not moves or self._planner.hides_update(self.planned):
            return states
        for layer in self.store.layers:
            group = self.store.tied_with(layer)
            uses = {id(use.parameter): use.parameter for each in group for use in each.uses}
            movable = not any(each.has_frozen or each.has_quantized for each in group)
            if not uses or not movable or layer.layer in states:
                continue
            elements = sum(parameter.numel() for parameter in uses.values())
            state = int(elements * (4 + OPTIMIZERS[self.choice.optimizer].moment_bytes))
            gradients = sum(
                p.numel() * self.rules.dtypes(p).offloaded.itemsize for p in uses.values()
            )
            taken = state_bytes(
                [each.num_bytes for each in group], state, gradients if is_async else 0
            )
            if sum(states.values()) + sum(taken) <= left:
                states |= zip((each.layer for each in group), taken, strict=True)
        return states

    @cached_property
    def resident(self) -> frozenset[int]:
        """Layers whose weights stay on every device."""
        taken = sum(self.on_device.values())
        there = self._free.resident_layers(self.planned, [self.passes], taken)
        return there - self.on_device.keys()

    @cached_property
    def _left_to_send(self) -> tuple[LayerCosts, Workload]:
        """The problem as it is when layers are where they stay."""
        costs, workload = self.problem
        layers = list(enumerate(self.store.layers))
        trained = [layer.trained_bytes for _, layer in layers]

        def unless_there(own: Sequence[int]) -> tuple[int, ...]:
            return tuple(0 if i in self.on_device else n for i, n in enumerate(own))

        uploads = [
            trained[i] if i in self.resident else own for i, own in enumerate(costs.upload_bytes)
        ]
        others = [layer for i, layer in layers if i not in self.on_device]
        return replace(
            costs,
            weight_bytes=unless_there(costs.weight_bytes),
            upload_bytes=unless_there(uploads),
            offloaded_bytes=unless_there(costs.offloaded_bytes),
        ), replace(workload, optimizer_ms=self.update_ms_of(others))

    # What it takes.

    def device_bytes(self) -> dict[str, int]:
        """At the fullest moment of the fullest device: ``slots``, ``optimizer`` (device states with
        their weights), ``boundaries`` with sums on their way down, and what the stage run itself
        holds, ``activations`` and sums."""
        costs, workload = self._left_to_send
        spilled, totals = self.planned.spilled, StageSums(costs)
        slots, beside = held_beside(self.passes, totals, workload, spilled, self.resident)
        slots = [max(held, min(self._first_slots(), self._slot_limit())) for held in slots]
        inside = [self._most_inside(*stage_run) for stage_run in self.passes]
        fullest = max(range(len(inside)), key=lambda run: slots[run] + beside[run] + inside[run])
        images = 2 if self.choice.is_async else 1
        states = sum(
            taken - (2 - images) * self.store.layers[layer].num_bytes
            for layer, taken in self.on_device.items()
        )
        return {
            "slots": slots[fullest],
            "optimizer": states,
            "boundaries": beside[fullest],
            "activations": inside[fullest],
        }

    def _first_slots(self) -> int:
        """Slots of the first plan, before any layer had a device state. They are kept where there
        is room for them."""
        if not self.on_device:
            return 0
        costs, workload = self.problem
        passes = fused_passes(self.first.plan, workload.first_trained)
        slots, _ = held_beside(passes, StageSums(costs), workload, self.first.spilled, frozenset())
        return max(slots)

    def _slot_limit(self) -> int:
        return int(max(self._free.slot_limit(self.planned) - sum(self.on_device.values()), 0))

    def _most_inside(self, pass_: Pass, layers: range) -> int:
        own = [self._sketches[layer] for layer in layers]
        if pass_ is Pass.FORWARD:
            return max(sketch.forward_peak for sketch in own)
        gradients = [self._gradients_of(layer) for layer in layers]
        trained = range(max(self.workload.first_trained - layers.start, 0), len(layers))
        return most_inside(own, gradients, trained, self.num_microbatches)

    def _gradients_of(self, layer: int) -> GradientBytes:
        made, rounded = self.store.layers[layer].trained_bytes, 0
        for use in self.store.layers[layer].trainable:
            summed, offloaded = self.rules.dtypes(use.parameter)
            kept = summed if self.num_microbatches > 1 else use.parameter.dtype
            if is_small(use.parameter.shape) or kept != offloaded:
                rounded += use.parameter.numel() * offloaded.itemsize
        is_summed = self.num_microbatches > 1
        summed_bytes = self.problem[0].gradient_bytes[layer] if is_summed else made
        return GradientBytes(made, summed_bytes, rounded, layer in self.on_device)

    def times(self) -> Times:
        """See `Times`."""
        costs, workload = self._left_to_send
        totals, devices = StageSums(costs), workload.num_devices
        shares = len(self.passes) / max(len({*self.passes}), 1)
        each = workload.num_microbatches / devices / shares
        compute = sum(totals.compute_ms(*stage_run) for stage_run in self.passes)
        again = sum(
            sum(costs.recompute[run.start : run.stop])
            for pass_, run in self.passes
            if pass_ is Pass.BACKWARD
        )
        up, down = self.link_bytes()
        return Times(
            step=step_ms(self.planned.plan, "fused", costs, workload),
            compute=compute * each,
            again=again * each,
            link=max(up * costs.up_ms_per_byte, down * costs.down_ms_per_byte) / devices,
            update=workload.optimizer_ms,
        )

    def link_bytes(self) -> tuple[int, int]:
        """Up to the devices and down again, in a step."""
        costs, workload = self._left_to_send
        up = down = 0
        sent: set[int] = set()
        for pass_, layers in self.passes:
            for layer in layers:
                if layer not in self.resident:
                    up += costs.upload_bytes[layer]
                elif layer not in sent:  # what an update has changed, once
                    up += costs.upload_bytes[layer] * workload.num_devices
                    sent.add(layer)
                if pass_ is not Pass.FORWARD and layer >= workload.first_trained:
                    down += costs.offloaded_bytes[layer]
        spilled = self.spilled_bytes()
        return up + spilled, down + spilled

    def spilled_bytes(self, planned: Planned | None = None) -> int:
        """Kept inputs that wait on the host, by the plan or by another one."""
        inputs, spilled = self.problem[0].input_bytes, (planned or self.planned).spilled
        return sum(inputs[layer] for layer in spilled) * self.num_microbatches

    def gradient_sets(self, moments: int) -> float:
        """How many sets of gradients the host holds at most. Asynchronous updates go from the
        deepest layer to the shallowest, as the next call's gradients come: a second set is needed
        of the layers in whose update they would have to wait. The first is the slowest: it makes
        ``moments``, bytes of the host's."""
        if not self.choice.is_async:
            return 1.0
        costs, workload = self._left_to_send
        totals = StageSums(costs)
        update = workload.optimizer_ms + moments / _NEW_BYTES_PER_MS
        each = workload.num_microbatches / workload.num_devices
        ms = {run: totals.compute_ms(*run) * each for run in self.passes}
        backward = sum(own for (pass_, _), own in ms.items() if pass_ is Pass.BACKWARD)
        # The last microbatch of the fused stage brings the first.
        before = sum(ms.values()) - backward
        before -= sum(own for (pass_, _), own in ms.items() if pass_ is Pass.FUSED) / (
            workload.num_microbatches
        )
        if update <= before + backward:
            return 1.0
        return 2.0 - before / (update - backward)

    def least_device_bytes(self) -> int:
        """What the smallest plan needs: layer by layer, its inputs on the host."""
        costs, workload = self.problem
        smallest = smallest_plan("fused", costs.num_layers)
        return plan_peak(smallest, "fused", costs, replace(workload, limit_bytes=0.0)).bytes.total
