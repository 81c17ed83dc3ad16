"""The engine's settings as training arguments: typed for the command line, plain values so that
they survive JSON."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from transformers import TrainingArguments

from roundpipe import RoundPipeRunConfig, virtual
from roundpipe.errors import ConfigError
from roundpipe.system.sizes import bytes_of

PinModel = Literal["alloc", "register", "off"]
LossReduction = Literal["sum", "rows", "tokens"]
ComputeDtype = Literal["fp8"]
OptimDtype = Literal["float32", "bfloat16", "float16", "auto"]
HOST = torch.device("cpu")
# Of the settings: no engine knows them.
_OF_THE_TRAINER = ("async_optimizer", "loss_reduction", "sharded_checkpoints", "trace_dir")
_device_of_loss: ContextVar[torch.device | None] = ContextVar("device_of_loss", default=None)


@contextmanager
def losses_on(device: torch.device | None) -> Iterator[None]:
    """This thread runs a loss whose tensors are there; None for what is no loss, as the model that
    one calls."""
    before = _device_of_loss.set(device)
    try:
        yield
    finally:
        _device_of_loss.reset(before)


@dataclass
class PipelineArguments:
    """Adds the engine's settings to any training arguments class; put it before that class among
    the bases. Where there is no accelerator ``use_cpu`` is set, so bf16 is allowed; TRL's
    arguments, which ask for it by default, do so only if you say so.

    Args:
        async_optimizer: let the optimizer run behind the next step; gradients are then exactly one
            step old.
        devices: a number, of accelerators or where there are none of virtual CPU devices; or names
            of devices, on the command line ``cuda:0,cuda:1``; None for every visible accelerator.
        num_microbatch: microbatches per batch; None for as many that those of the batches of an
            accumulation window are the number of devices + 1 or more, but 1 on a single virtual
            device without ``max_gpu_memory``, where cutting gains nothing.
        recompute_grain: ``"stage"`` (default) or ``"layer"``, which recomputes one layer at a time.
        pin_model: how host memory is page-locked, as in `RoundPipe`.
        optim_dtype: dtype of the optimizer's own copies of the weights; ``"auto"`` keeps the
            weights'.
        max_gpu_memory: what the engine stays under on each device: ``"24GB"``, ``"900MiB"`` or a
            number of GB, 10**9 bytes.
        max_host_memory: what the process stays under in host memory, as in `RoundPipe`.
        optimizer_state_dir: a folder on a disk where masters and the optimizer's state lie instead
            of in memory, as in `RoundPipe`.
        compute_dtype: ``"fp8"`` has the blocks' linear layers multiply in fp8, as in `RoundPipe`.
        cuda_graphs: whether blocks that stay on a GPU queue their kernels as CUDA graphs, as in
            `RoundPipe`; None where that is known to be right.
        loss_reduction: how a loss of the user's own reduces a batch, see `loss_reduction`; None
            where that is not known.
        sharded_checkpoints: of several processes, have each write what it owns of the optimizer's
            state, in the format of ``torch.distributed.checkpoint``; else the first one gathers it
            in its memory and writes the plain Trainer's file. Any number of processes resumes from
            either, with either setting.
        trace_dir: a folder for a timeline of steps 3 to 5 of each run, ``steps-3-5.json``, that
            `python -m roundpipe timeline`, Perfetto and Chrome open; the file before is replaced.

    Raises:
        ConfigError: a value that a setting cannot have.

    Example:
        >>> @dataclass
        ... class MyArguments(PipelineArguments, TrainingArguments):
        ...     pass
    """

    async_optimizer: bool = field(
        default=False,
        metadata={
            "help": (
                "Let the optimizer run behind the next step: faster, gradients are exactly one "
                "step old."
            )
        },
    )
    # The second member of a union is what HfArgumentParser reads from the command line: a string.
    devices: int | str | list[str] | None = field(
        default=None,
        metadata={
            "help": "cuda:0,cuda:1,..., or a number: of accelerators, or where there are none of "
            "virtual CPU devices; else every visible accelerator."
        },
    )
    num_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Microbatches per batch; else so many that an accumulation window has the "
            "number of devices + 1, but 1 on a single virtual device without max_gpu_memory."
        },
    )
    recompute_grain: str | None = field(
        default=None,
        metadata={
            "help": "'stage' (default) or 'layer': what is recomputed at a time in backward."
        },
    )
    pin_model: PinModel = field(
        default="alloc", metadata={"help": "How host memory is page-locked."}
    )
    optim_dtype: OptimDtype = field(
        default="float32",
        metadata={"help": "Dtype of the optimizer's own copies; 'auto' keeps the weights' dtype."},
    )
    max_gpu_memory: float | str | None = field(
        default=None,
        metadata={"help": "What the engine stays under on each device: 24GB, 900MiB, or GB."},
    )
    max_host_memory: float | str | None = field(
        default=None,
        metadata={"help": "What the process stays under in host memory: 60GB, or a number of GB."},
    )
    optimizer_state_dir: str | None = field(
        default=None,
        metadata={
            "help": "A folder on a disk for what the optimizer keeps, where memory is too small."
        },
    )
    compute_dtype: ComputeDtype | None = field(
        default=None,
        metadata={
            "help": "fp8: the blocks' linear layers multiply in it, where the devices can; faster, "
            "less exact."
        },
    )
    cuda_graphs: bool | None = field(
        default=None,
        metadata={
            "help": "Whether blocks that stay on a GPU queue their kernels as CUDA graphs; by "
            "default those of transformers and PEFT do."
        },
    )
    loss_reduction: LossReduction | None = field(
        default=None,
        metadata={
            "help": "How a loss of your own reduces a batch: 'sum', 'rows' or 'tokens' (means over "
            "those). It then runs fused with the model, else on whole batches."
        },
    )
    sharded_checkpoints: bool = field(
        default=False,
        metadata={
            "help": "Each process writes what it owns of the optimizer's state; else the first one "
            "gathers it and writes optimizer.pt."
        },
    )
    trace_dir: str | None = field(
        default=None, metadata={"help": "Folder for a timeline of steps 3 to 5 of each run."}
    )

    def __post_init__(self) -> None:
        self.devices = _plain_devices(self.devices)
        if isinstance(self.devices, int) and self.devices < 1:
            raise ConfigError(
                f"devices is {self.devices}; give a number, at least 1, or names such as "
                "cuda:0,cuda:1, or leave it out"
            )
        for name in ("max_gpu_memory", "max_host_memory"):
            size = getattr(self, name)
            if isinstance(size, str) and size.replace(".", "", 1).isdigit():
                size = float(size)  # GB, as on the command line
                setattr(self, name, size)
            if size is not None:
                bytes_of(size, name)
        check_choice("pin_model", self.pin_model, get_args(PinModel))
        check_choice("optim_dtype", self.optim_dtype, get_args(OptimDtype))
        if self.compute_dtype is not None:
            check_choice("compute_dtype", self.compute_dtype, get_args(ComputeDtype))
        if self.loss_reduction is not None:
            check_choice("loss_reduction", self.loss_reduction, get_args(LossReduction))
        self.run_config()  # because a bad value should be told here, not at the first training step
        inherited: Callable[[], None] | None = getattr(super(), "__post_init__", None)
        if inherited is not None:
            if not torch.accelerator.is_available() and not getattr(self, "use_cpu", False):
                # Else bf16 would be refused, which TRL's arguments take where nothing is said, and
                # which most CPUs compute slowly.
                self.use_cpu = True
                if getattr(self, "bf16", False) is None:
                    vars(self)["bf16"] = False  # a field of the class that this one is put before
            inherited()

    @property
    def device(self) -> torch.device:
        """Trainer's device, but in a loss that of its microbatch, so that
        ``weight.to(self.args.device)`` is there."""
        here = _device_of_loss.get()
        inherited: torch.device = super().device if here is None else here  # type: ignore[misc]
        return inherited

    def run_config(self) -> RoundPipeRunConfig:
        """Returns those settings that calls of an engine take."""
        grain: Any = self.recompute_grain
        return RoundPipeRunConfig(num_microbatch=self.num_microbatch, recompute_grain=grain)

    def master_dtype(self) -> torch.dtype | None:
        """Returns ``optim_dtype`` as torch's; None for ``"auto"``."""
        return None if self.optim_dtype == "auto" else getattr(torch, self.optim_dtype)


@dataclass
class RoundPipeTrainingArguments(PipelineArguments, TrainingArguments):
    """`transformers.TrainingArguments` plus the engine's settings, see `PipelineArguments`.

    Example:
        >>> args = RoundPipeTrainingArguments("out", bf16=True, max_gpu_memory="24GB")
    """


def pipeline_of(args: TrainingArguments) -> PipelineArguments:
    """The engine's settings in ``args``; their defaults if it is a class that knows none."""
    return args if isinstance(args, PipelineArguments) else PipelineArguments()


def engine_settings_in(args: TrainingArguments) -> list[str]:
    """The names of the settings that shape an engine and are not at their defaults."""
    names = [one.name for one in fields(PipelineArguments) if one.name not in _OF_THE_TRAINER]
    given, defaults = pipeline_of(args), PipelineArguments()
    return [name for name in names if getattr(given, name) != getattr(defaults, name)]


def device_type_of(args: TrainingArguments) -> str:
    """Where the engine computes: ``"cpu"`` on virtual devices, whatever accelerator the Trainer
    itself sees."""
    devices = engine_devices(args)
    return devices[0].type if isinstance(devices, list) else _own_device(args).type


def engine_devices(args: TrainingArguments) -> int | list[torch.device] | None:
    """As RoundPipe takes them. ``use_cpu`` means the CPU even where the engine would find an
    accelerator.

    Of several processes on this machine each has its share of those named, or of all there are.
    """
    devices = pipeline_of(args).devices
    if isinstance(devices, str):
        raise ConfigError(
            f"devices was set to {devices!r} after construction; assign a list of device names"
        )
    kind = _own_device(args).type
    if kind == "cpu" and not isinstance(devices, list):
        return virtual(1 if devices is None else devices)
    if args.world_size == 1:
        return [torch.device(name) for name in devices] if isinstance(devices, list) else devices
    names = devices if isinstance(devices, list) else _first(kind, devices)
    count = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    if len(names) % count:
        raise ConfigError(
            f"{len(names)} devices ({', '.join(names)}) for {count} processes: start as many that "
            "each gets the same number of devices, or name others in devices"
        )
    return own_share([torch.device(name) for name in names], args.local_process_index, count)


def _first(kind: str, count: int | None) -> list[str]:
    there = torch.get_device_module(kind).device_count()
    return [f"{kind}:{index}" for index in range(there if count is None else count)]


def _own_device(args: TrainingArguments) -> torch.device:
    with losses_on(None):
        return args.device


def _plain_devices(devices: Any) -> int | list[str] | None:
    if devices is None or isinstance(devices, int):
        return devices
    names = devices.split(",") if isinstance(devices, str) else [str(device) for device in devices]
    if len(names) == 1 and names[0].isdigit():
        return int(names[0])
    for name in names:
        _check_device(name)
    return names


def _check_device(name: str) -> None:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"devices names {name!r}, which torch does not know; use e.g. cuda:0,cuda:1"
        ) from error


def check_choice(option: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} is {value!r}; use one of {', '.join(map(repr, choices))}")


def own_share(devices: Sequence[torch.device], index: int, count: int) -> list[torch.device]:
    """The devices of one of ``count`` processes of a machine: as many for each, neighbours
    together."""
    each = len(devices) // count
    return list(devices[index * each : (index + 1) * each])
