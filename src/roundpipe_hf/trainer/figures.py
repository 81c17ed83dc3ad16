"""What steps take, beside what was expected, for the log: said by the logger ``roundpipe_hf`` where
it takes information, never in the Trainer's own entries, which are those of the plain Trainer."""

import logging
import resource
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from roundpipe import estimate
from roundpipe.device.facts import facts_of
from roundpipe.forecast.estimate import Estimate
from roundpipe.forecast.machine import CONTEXT_BYTES, PROCESS_BYTES, Machine
from roundpipe.forecast.measure import measured_machine
from roundpipe.plan.memory import readable
from roundpipe.system.host_memory import all_host_bytes
from roundpipe.trace import spans
from roundpipe.trace.summary import OPTIMIZER

from ..arguments import pipeline_of
from ..compat import adapter_configs

if TYPE_CHECKING:
    from .mixin import RoundPipeTrainerMixin

logger = logging.getLogger(__name__)
_LANES = {"upload": "upload", "fetch": "upload", "offload": "download", "compute": "compute"}
_FIRST = 2  # the step that is compared: the first one is planned blindly, and compiles


class StepFigures:
    """Used by the user's thread; spans come from all.

    Nothing is waited for: a lane's spans count once it has passed them, and the clock runs from the
    end of one step, with its log, saving and evaluation, to the end of the next.
    """

    def __init__(self, trainer: "RoundPipeTrainerMixin") -> None:
        self._trainer: Any = trainer
        self._spans = deque[spans.Span]()
        self._is_on = False
        self._began = self._entered = self._seconds = 0.0
        self._busy = defaultdict[str, float](float)

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """A run of the Trainer's goes on inside."""
        self._is_on = logger.isEnabledFor(logging.INFO) and self._trainer.is_world_process_zero()
        if not self._is_on:
            yield
            return
        self._spans.clear()
        self._step = self._steps = self._tokens = self._rows = self._seq = 0
        self._seconds, self._busy = 0.0, defaultdict(float)
        self._began = self._entered = 0.0
        try:
            with spans.listen(self._spans.append, places=False):
                yield
        finally:
            self._is_on = False
            self._spans.clear()

    def batch(self, inputs: Any) -> None:
        """A batch of the window is there."""
        if not self._is_on:
            return
        if not self._entered:
            self._entered = time.perf_counter()
            # Before the first batch a run is prepared.
            self._began = self._began or self._entered
            self._busy["data"] += self._entered - self._began
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        given = inputs.get(name) if isinstance(inputs, Mapping) else None
        if isinstance(given, torch.Tensor) and given.ndim:
            self._tokens += given.numel()
            self._rows += len(given)
            self._seq = max(self._seq, given[0].numel())

    @contextmanager
    def step(self, *, will_log: bool, will_pause: bool) -> Iterator[None]:
        """A step was handed over; inside the Trainer logs, and perhaps saves and evaluates, which
        is no part of it (``will_pause``)."""
        if not self._is_on or not self._entered:
            yield
            return
        seconds = time.perf_counter() - self._began
        self._step, self._steps = self._step + 1, self._steps + 1
        self._seconds += seconds
        self._count()
        if self._step == _FIRST:
            self._compare(seconds)
        self._rows = self._seq = 0
        yield
        if will_log:
            logger.info("step %d: %s", self._trainer.state.global_step, self._rates())
            self._tokens = self._steps = 0
            self._seconds, self._busy = 0.0, defaultdict(float)
        if will_pause:
            self._spans.clear()
        self._began, self._entered = time.perf_counter(), 0.0

    def _count(self) -> None:
        """What is done; the rest waits for the next step."""
        for _ in range(len(self._spans)):
            span = self._spans.popleft()
            if span.name in OPTIMIZER:
                self._busy["optimizer"] += span.end - span.start
            elif span.name in _LANES:
                taken = span.end - span.start
                if span.on_lane is not None:
                    on_lane = span.on_lane.duration()
                    if on_lane is None:
                        self._spans.append(span)
                        continue
                    taken = on_lane
                self._busy[_LANES[span.name]] += taken / self._num_devices()

    def _rates(self) -> str:
        by_time = sorted(self._busy.items(), key=lambda one: -one[1])
        shares = {name: busy / self._seconds for name, busy in by_time}
        said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        tokens = f"{self._tokens / self._seconds:.0f} tokens/s, " if self._tokens else ""
        return (
            f"{tokens}{1e3 * self._seconds / self._steps:.0f} ms/step, bound by "
            f"{next(iter(shares), 'nothing')} ({said}); {self._memory()}"
        )

    def _compare(self, seconds: float) -> None:
        measured = f"measured {1e3 * seconds:.0f} ms, {self._memory()}"
        try:
            with torch.random.fork_rng(devices=[]):
                expected = self._expected()
        except Exception as error:  # because nothing of this is needed to train
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            logger.info("step %d: %s; no estimate (%s)", _FIRST, measured, why)
            return
        is_virtual = self._is_virtual()
        device = expected.device_bytes + (0 if is_virtual else CONTEXT_BYTES)
        host = expected.host_bytes + PROCESS_BYTES
        logger.info(
            "step %d: %s; roundpipe.estimate: %.0f ms%s, device peak %s, host peak %s, bound by %s",
            _FIRST,
            measured,
            expected.step_ms,
            "" if measured_machine() else " at assumed rates (python -m roundpipe bench)",
            readable(device),
            readable(host),
            expected.bound,
        )

    def _expected(self) -> Estimate:
        args, model = self._trainer.args, self._trainer.model
        pipeline, devices = pipeline_of(args), self._devices()
        known = [facts for device in devices if (facts := facts_of(device))]
        names = {field.name for field in fields(Machine)} - {"gpus", "gpu_memory", "ram"}
        measured = measured_machine(is_virtual=self._is_virtual())
        machine = {name: value for name, value in measured.items() if name in names}
        ram = all_host_bytes() / 1e9
        memory: Any = min((facts.total_bytes for facts in known), default=0) / 1e9 or ram
        ranks = [each.r for each in adapter_configs(model).values()]
        return estimate(
            model.config,
            lora=ranks[0] if ranks else None,
            seq=self._seq,
            batch=self._rows,
            num_microbatch=pipeline.num_microbatch,
            async_optimizer=pipeline.async_optimizer,
            optimizer="adamw",
            pin_model="off" if pipeline.pin_model == "off" else "alloc",
            quantization=None if hasattr(model.config, "quantization_config") else "none",
            dtype=next(model.parameters()).dtype,
            devices="cpu" if self._is_virtual() else "cuda",
            gpus=len(devices),
            gpu_memory=pipeline.max_gpu_memory or memory,
            ram=ram,
            **machine,
        )[0]

    def _memory(self) -> str:
        most = max(device.memory_in_use().most for device in self._devices())
        device = f"device peak {readable(most)}, " if most else ""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"{device}host peak {readable(host)}"

    def _devices(self) -> Any:
        return self._trainer.model_wrapped.devices

    def _num_devices(self) -> int:
        return len(self._devices())

    def _is_virtual(self) -> bool:
        return bool(self._devices()[0].torch_device.type == "cpu")
