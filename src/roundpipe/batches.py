"""From what a call is given to its microbatches, and from what these give to what the caller gets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .config import RoundPipeRunConfig
from .errors import ConfigError
from .microbatch import Microbatches, merge, refuse_packed, split
from .packed import RoundPipePackedData
from .runtime.call import Call
from .runtime.pipeline import deliver
from .runtime.transfer import Boundary

GivenMicrobatches = Sequence[tuple[Sequence[Any], Mapping[str, Any], Any]]


def cut(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, label: Any, count: int, config: RoundPipeRunConfig
) -> Microbatches:
    """A batch in ``count`` microbatches, or as many as ``config`` says.

    Raises:
        ConfigError: ``args`` are no tuple or ``kwargs`` no dictionary.
    """
    return split(
        _positional(args, "input_args"),
        _named(kwargs, "input_kwargs"),
        label,
        config.num_microbatch or count,
        split_input=config.split_input,
        split_label=config.split_label,
    )


def as_given(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, label: Any, microbatches: GivenMicrobatches
) -> Microbatches:
    """Microbatches that the caller has cut.

    Raises:
        ConfigError: there are none, one is not of three parts, or a whole batch was given as well.
    """
    if _positional(args, "input_args") or _named(kwargs, "input_kwargs") or label is not None:
        raise ConfigError("give either input_args, input_kwargs and label, or microbatches, not both")
    if not microbatches:
        raise ConfigError("microbatches is empty; give at least one (args, kwargs, label)")
    parts = []
    for index, microbatch in enumerate(microbatches):
        where = f"microbatches[{index}]"
        if not isinstance(microbatch, (tuple, list)) or len(microbatch) != 3:
            raise ConfigError(f"{where} is not (args, kwargs, label)")
        given, named, part = microbatch
        refuse_packed((given, named, part), "microbatches are cut already; give one of its values to each")
        parts.append(split(_positional(given, f"{where}'s args"), _named(named, f"{where}'s kwargs"), part, 1))
    return Microbatches(
        inputs=tuple(part.inputs[0] for part in parts),
        labels=tuple(part.labels[0] for part in parts),
        rows=tuple(part.rows[0] for part in parts),
        batch_size=sum(part.batch_size for part in parts),
    )


def _positional(args: Any, what: str) -> tuple[Any, ...]:
    """Refuses an argument given in place of the tuple of all: rows of a tensor would be taken for arguments."""
    if not isinstance(args, (tuple, list)) or isinstance(args, RoundPipePackedData):
        raise ConfigError(f"{what}: a {type(args).__name__}; give the positional arguments as a tuple, such as (x,)")
    return tuple(args)


def _named(kwargs: Any, what: str) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"{what}: a {type(kwargs).__name__}; give the arguments by name in a dictionary")
    return dict(kwargs or {})


def delivered(call: Call, config: RoundPipeRunConfig) -> list[Boundary]:
    """The call's outputs where the caller wants them, complete."""
    target = None if config.merge_output is False else torch.device("cpu")
    if config.output_device is not None:
        target = torch.device(config.output_device)
    # A call with losses may have late visits, which go on with whatever they hold.
    shared = call.kept.memory() if call.settings.loss_fn is None else None
    return [deliver(call.outputs[m], target, shared) for m in range(call.settings.num_microbatches)]


def joined(values: list[Any], outputs: list[Boundary], parts: Microbatches, config: RoundPipeRunConfig) -> Any:
    """``values``, which are those of ``outputs``, as one value; or packed."""
    if config.merge_output is False:
        return RoundPipePackedData(values, parts.rows, [output.ready for output in outputs if output.ready is not None])
    return merge(values, parts.rows, config.merge_output)


def outputs_as_loss(outputs: Any, _: Any) -> Any:
    """The loss where no ``loss_fn`` is given: the outputs, or what they carry as Hugging Face models' do."""
    return getattr(outputs, "loss", outputs)
