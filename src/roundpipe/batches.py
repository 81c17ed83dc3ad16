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
    """A batch in ``count`` microbatches, or as many as ``config`` says."""
    return split(
        tuple(args),
        dict(kwargs or {}),
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
        ConfigError: there are none, or a whole batch was given as well.
    """
    if args or kwargs or label is not None:
        raise ConfigError("give either input_args, input_kwargs and label, or microbatches, not both")
    if not microbatches:
        raise ConfigError("microbatches is empty; give at least one (args, kwargs, label)")
    for given, named, part in microbatches:
        refuse_packed((given, named, part), "microbatches are cut already; give one of its values to each")
    parts = [split(tuple(given), dict(named), part, 1) for given, named, part in microbatches]
    return Microbatches(
        inputs=tuple(part.inputs[0] for part in parts),
        labels=tuple(part.labels[0] for part in parts),
        rows=tuple(part.rows[0] for part in parts),
        batch_size=sum(part.batch_size for part in parts),
    )


def delivered(call: Call, config: RoundPipeRunConfig, *, is_shared: bool = False) -> list[Boundary]:
    """The call's outputs where the caller wants them, complete. ``is_shared``: a backward may still read them."""
    target = None if config.merge_output is False else torch.device("cpu")
    if config.output_device is not None:
        target = torch.device(config.output_device)
    return [deliver(call.outputs[m], target, is_shared=is_shared) for m in range(call.settings.num_microbatches)]


def joined(values: list[Any], outputs: list[Boundary], parts: Microbatches, config: RoundPipeRunConfig) -> Any:
    """``values``, which are those of ``outputs``, as one value; or packed."""
    if config.merge_output is False:
        return RoundPipePackedData(values, parts.rows, [output.ready for output in outputs if output.ready is not None])
    return merge(values, parts.rows, config.merge_output)


def outputs_as_loss(outputs: Any, _: Any) -> Any:
    """The loss where no ``loss_fn`` is given: the outputs, or what they carry as Hugging Face models' do."""
    return getattr(outputs, "loss", outputs)
