"""Answers which ways to train a model fit a machine, what each takes, and which is best."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..autoplan.cutting import TOKENS_AT_ONCE
from ..autoplan.problem import MOST_SHORTAGES
from ..errors import ConfigError, PlanError
from ..memory.state_file import check_folder
from ..recompute.row_wise import can_cut
from ..transfer.read_ahead import KEPT_OF_FREE
from .host import frozen_bytes, host_bytes, optimizer_bytes
from .machine import PROCESS_BYTES, Failure, Machine, what_would_fit
from .models import ImaginedModel, imagine
from .planned import PlannedStep
from .sketch import LayerSketch, batch_of, sketches, tokens_at_once
from .ways import Choice, choices, microbatch_counts

Bound = Literal["compute", "link", "disk", "optimizer", "memory"]
_UNLIMITED = 1 << 59
# Relative: steps whose predicted times differ by less are as fast.
_ALIKE = 0.02
# A share of what devices compute that is more than a few layers run twice.
_NOTABLE = 0.1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One way to train, and what it takes.

    Args:
        choice: what makes it this way.
        arguments: to train so: those of `RoundPipeTrainingArguments` and ``load_pretrained``, and
            how to make the optimizer where it is not the Trainer's.
        device: bytes of tensors at the fullest moment of the fullest device, by what for.
        host: bytes of host memory, by what for.
        disk_bytes: of files: the weights, their quantized copy where one is made, and state.
        up_bytes, down_bytes: to and from all devices in a step.
        step_ms: a step, once measurements have settled.
        compute_ms, link_ms, update_ms: what each would take alone.
        bound: what a step waits for; "memory" where devices compute again what they could not keep.
        stages: layers in each stage, forward (the fused one last) and backward.
        spilled: layers whose kept inputs wait on the host.
        tokens_at_once: what modules that compute each token by itself run for; 0 for all, which is
            so where that fits.
    """

    choice: Choice
    arguments: dict[str, Any]
    device: dict[str, int]
    host: dict[str, int]
    disk_bytes: int
    up_bytes: int
    down_bytes: int
    step_ms: float
    compute_ms: float
    link_ms: float
    update_ms: float
    bound: Bound
    stages: tuple[tuple[int, ...], tuple[int, ...]]
    spilled: int
    tokens: int
    tokens_at_once: int

    @property
    def device_bytes(self) -> int:
        """On the fullest device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Beside `PROCESS_BYTES`."""
        return sum(self.host.values())

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.step_ms


class Estimates(list[Estimate]):
    """A list, the best first, which a notebook shows as the table of `python -m roundpipe plan`."""

    def _repr_html_(self) -> str:
        from .table import as_table

        return as_table(self)


def estimate(
    model: Any,
    *,
    lora: int | None = None,
    seq: int = 2048,
    batch: int = 8,
    num_microbatch: int | None = None,
    quantization: str | None = None,
    optimizer: str | None = None,
    async_optimizer: bool | None = None,
    pin_model: str | None = None,
    optimizer_state_dir: str | None = None,
    dtype: torch.dtype | None = None,
    devices: Literal["cuda", "cpu"] = "cuda",
    **machine: Any,
) -> list[Estimate]:
    """Says what training would take, for each way that fits the machine, the fastest first, and of
    those that are as fast the plainest. Nothing is loaded: layers run on the meta device, and the
    engine's planner plans with what that shows.

    Args:
        model: a folder with a config.json, a config of transformers' or a model on the meta device.
        lora: rank of adapters on all linear layers but the head; None trains all weights.
        seq: tokens of a row.
        batch: rows of a step, all devices together.
        num_microbatch: default: the number of devices + 1, but no more than rows; twice and four
            times as many are tried too, and named where they are faster.
        quantization, optimizer, async_optimizer, pin_model: only ways with that; None tries all.
            "none", "nf4", "fp8", "int8", or "nf4_double" and "mxfp4" (tried only if given); a name
            in `OPTIMIZERS`; True or False; "alloc" or "off", which leaves weights in their files.
        optimizer_state_dir: as of `RoundPipe`; times are as if no state stayed in memory.
        dtype: of the weights; default: that of the config.
        devices: what devices are; "cpu" for virtual ones.
        machine: what `Machine` takes: gpus, gpu_memory, ram, link, tflops, host, cores, disk.

    Returns:
        At least one estimate, times in milliseconds.

    Raises:
        ConfigError: something that is missing, unknown or does not go together.
        PlanError: no way fits; it says what would.

    Example:
        >>> best = roundpipe.estimate("path/to/model", lora=32, gpu_memory="24GB")[0]
        >>> print(best.step_ms, best.arguments)
    """
    on = _machine(machine)
    split = 1 if num_microbatch is None else num_microbatch
    for name, value in (("seq", seq), ("batch", batch), ("num_microbatch", split)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number, at least 1")
    imagined = imagine(model, lora=lora, dtype=dtype)
    default = min(num_microbatch or on.gpus + 1, batch)
    if optimizer_state_dir is not None:
        check_folder(optimizer_state_dir)
    ways = choices(
        quantization, async_optimizer, optimizer, pin_model, imagined.quantization, is_full=not lora
    )
    ways = [way._replace(optimizer_state_dir=optimizer_state_dir) for way in ways]
    answers: dict[Choice, list[Estimate | Failure]] = {way: [] for way in ways}
    counts = [default] if num_microbatch else microbatch_counts(default, batch, seq)
    for count in counts:
        size = -(-batch // count), seq
        try:
            at_once = tokens_at_once(imagined.layers, *size, on.device_bytes(devices))
        except PlanError:
            if count == counts[-1]:
                raise
            continue
        known = sketches(imagined.layers, batch_of(*size), at_once)
        said = {} if count == default and num_microbatch is None else {"num_microbatch": count}
        asked = _Asked(imagined, known, on, count, batch, seq, devices, said, at_once)
        for way, made in asked.answers(ways, size, is_strict=quantization is not None):
            answers[way].append(made)
    best = [_best(made) for made in answers.values()]
    found = [made for made in best if isinstance(made, Estimate)]
    if not found:
        failures = [made for made in best if isinstance(made, Failure)]
        room, can_split = (on.device_bytes(devices), asked.ram_bytes), counts[-1] < batch
        raise PlanError(
            what_would_fit(failures, on, *room, is_full=lora is None, can_split=can_split)
        )
    # What is as fast as the plainest way that is, within what can be told, is no better.
    places = {way: place for place, way in enumerate(ways)}
    found.sort(key=lambda each: (round(math.log(each.step_ms) / _ALIKE), places[each.choice]))
    return Estimates(found)


def _best(answers: Sequence[Estimate | Failure]) -> Estimate | Failure:
    """Chooses the fastest answer for one way, or the first, of the fewest microbatches, if that is
    as fast."""
    found = [made for made in answers if isinstance(made, Estimate)]
    if not found:
        return answers[-1]
    fastest = min(found, key=lambda made: made.step_ms)
    return found[0] if found[0].step_ms <= (1 + _ALIKE) * fastest.step_ms else fastest


def _machine(given: dict[str, Any]) -> Machine:
    try:
        return Machine(**given)
    except TypeError as error:
        known = ", ".join(Machine.__dataclass_fields__)
        raise ConfigError(f"estimate() takes of a machine: {known}; {error}") from error


@dataclass(frozen=True)
class _Asked:
    """A model, a machine and a batch."""

    model: ImaginedModel
    sketches: Sequence[LayerSketch]
    machine: Machine
    num_microbatches: int
    rows: int
    seq: int
    kind: str
    said: dict[str, Any]  # of the arguments, what was asked for
    tokens_at_once: int = 0

    def answers(
        self, ways: Sequence[Choice], size: tuple[int, int], *, is_strict: bool
    ) -> Iterator[tuple[Choice, Estimate | Failure]]:
        """Answers for each way, in parts where the device is too small for the whole. ``size`` is a
        microbatch's, rows and tokens. If ``is_strict``, weights that do not divide into blocks
        raise ConfigError."""
        cut = None
        for way in ways:
            try:
                with self.model.quantized(way.quantization):
                    made = self.answer(way)
                    if isinstance(made, Failure) and made.device_bytes > self._device_bytes:
                        cut = cut or self.in_parts(size)
                        made = made if cut is None else cut.answer(way)
            except ConfigError as error:
                if is_strict:
                    raise
                made = Failure(way, 0, 0, 0, str(error))
            yield way, made

    def in_parts(self, size: tuple[int, int]) -> "_Asked | None":
        """Asks the same with row-wise modules cut; None if there are none, or they are."""
        if self.tokens_at_once or not can_cut(self.model.layers):
            return None
        known = sketches(self.model.layers, batch_of(*size), TOKENS_AT_ONCE)
        return replace(self, sketches=known, tokens_at_once=TOKENS_AT_ONCE)

    def answer(self, way: Choice) -> Estimate | Failure:
        """With the model's weights as the way has them."""
        try:
            step = self._planned(way)
            host = host_bytes(step, self.ram_bytes)
            kept, in_files = (
                KEPT_OF_FREE * (self.ram_bytes - sum(host.values())),
                self._in_files(step, way),
            )
            if in_files > kept > 0:
                # The rest is read again in each sweep.
                step = self._planned(way, from_disk=1 - kept / in_files)
                host = host_bytes(step, self.ram_bytes)
        except PlanError:
            step = self._planned(way, device_bytes=_UNLIMITED, has_states=False)
            needed = sum(host_bytes(step, math.inf).values())
            return Failure(way, step.least_device_bytes(), needed, sum(optimizer_bytes(step)))
        device = step.device_bytes()
        for shortages in range(1, MOST_SHORTAGES + 1):
            if sum(device.values()) <= self._device_bytes:
                break
            # As an engine does that runs out of memory: it plans again, with less.
            step = self._planned(way, from_disk=step.from_disk, shortages=shortages)
            device, host = step.device_bytes(), host_bytes(step, self.ram_bytes)
        if sum(host.values()) > self.ram_bytes or sum(device.values()) > self._device_bytes:
            state = sum(optimizer_bytes(step))
            return Failure(way, sum(device.values()), sum(host.values()), state)
        times, (up, down) = step.times(), step.link_bytes()
        plan = step.planned.plan
        return Estimate(
            choice=way,
            arguments=way.arguments() | self.said,
            device=device,
            host=host,
            disk_bytes=self._disk_bytes(step, way),
            up_bytes=up,
            down_bytes=down,
            step_ms=times.step,
            compute_ms=times.compute,
            link_ms=times.link,
            update_ms=times.update,
            bound=self._bound(step),
            stages=(tuple(map(len, plan.fwd_plan)), tuple(map(len, plan.bwd_plan))),
            spilled=len(step.planned.spilled),
            tokens=self.rows * self.seq,
            tokens_at_once=self.tokens_at_once,
        )

    @property
    def ram_bytes(self) -> int:
        """Counts what the host has for tensors."""
        return self.machine.ram_bytes - (PROCESS_BYTES if self.kind != "cpu" else 0)

    @property
    def _device_bytes(self) -> int:
        return self.machine.device_bytes(self.kind)

    def _planned(
        self,
        way: Choice,
        *,
        device_bytes: int | None = None,
        from_disk: float = 0.0,
        shortages: int = 0,
        has_states: bool = True,
    ) -> PlannedStep:
        return PlannedStep(
            self.model.layers,
            self.sketches,
            self.machine,
            way,
            self.num_microbatches,
            -(-self.rows // self.num_microbatches) * self.seq,
            kind=self.kind,
            device_bytes=device_bytes or self._device_bytes,
            from_disk=from_disk,
            shortages=shortages,
            has_states=has_states,
            tokens_at_once=self.tokens_at_once,
        )

    def _bound(self, step: PlannedStep) -> Bound:
        """Where the disk makes the longest of them longer, that is what it waits for."""
        times = step.times()
        most = max(times.compute, times.link, times.update)
        if most == times.link:
            pinned = step.choice.pin_model
            slow, fast = (
                self.machine.up_bytes_per_ms(pinned, from_disk=share)
                for share in (step.from_disk, 0.0)
            )
            return "disk" if slow < fast else "link"
        if most == times.update:
            is_on_disk = step.choice.optimizer_state_dir is not None
            moved = 2 * sum(optimizer_bytes(step)) / (self.machine.disk * 1e6)
            return "disk" if is_on_disk and moved > 0.99 * most else "optimizer"
        return "memory" if times.again > _NOTABLE * times.compute else "compute"

    def _in_files(self, step: PlannedStep, way: Choice) -> int:
        if way.pin_model != "off":
            return 0
        return frozen_bytes(step)

    def _disk_bytes(self, step: PlannedStep, way: Choice) -> int:
        state = 0 if way.optimizer_state_dir is None else sum(optimizer_bytes(step))
        if way.quantization == "none":
            return self.model.file_bytes + state
        is_copy = self.model.quantization == "none"
        return frozen_bytes(step) + (self.model.file_bytes if is_copy else 0) + state
