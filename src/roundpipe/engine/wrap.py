"""From any model to an engine: by the preset of its architecture, as the sequence it is, or part by
part."""

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..config import RoundPipeRunConfig
from ..errors import ConfigError
from ..microbatch import split
from ..params.ranks import Ranks
from ..presets.adapters import base_of
from ..presets.preset import cut
from .base import call_site, check_model
from .checkpoints import refused_alike
from .partitioned import AutoRoundPipe, takes_use_cache, without_cache
from .parts.find import ModelPart, default_upper_threshold, find_parts, whole
from .sequential import RoundPipe
from .state import HostSettings

logger = logging.getLogger(__name__)
_UNSET = RoundPipeRunConfig()


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Sequence[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] = {},  # never written to
    model_run_config: RoundPipeRunConfig = _UNSET,
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe | AutoRoundPipe:
    """Wraps ``model`` for training through the pipeline; the engine's ``.model`` is ``model``
    itself.

    A Hugging Face model with a preset (also under PEFT) becomes embeddings, blocks and head, an
    ``nn.Sequential`` its children. Of anything else the parts that are worth it run on devices, the
    rest on the CPU; see [Note: parts]. If that one part is the whole model, it is an engine of a
    single layer. A model that has an engine may be wrapped again: the new one goes on from the
    newest weights; its optimizer is to be made anew. See [Note: turns].

    Args:
        model: any module, on the CPU.
        use_sequential_preset: None uses a preset if there is one, and says so (in the log at INFO,
            on stderr where logging is not set up); True insists on it; False does not look for one.
        lower_threshold: bytes of parameters from which a module that holds them itself is a part;
            parts with fewer in total run as one microbatch.
        upper_threshold: bytes of parameters up to which a module is a part; default: the model's,
            divided by the number of devices + 1.
        skip_modules: stay on the CPU with all they hold.
        override_config: settings for the engine of a part, by its module.
        model_run_config: settings for all engines; beats what a preset brings.
        name: shown in logs, traces and errors; default ``file.py:line`` of the caller.
        roundpipe_kwargs: passed to `RoundPipe`.

    Returns:
        A `RoundPipe` for what is a sequence or a single part, else an `AutoRoundPipe`, which has no
        ``forward_backward``.

    Raises:
        NotImplementedError: a preset was insisted on and there is none.
        ConfigError: the model is an engine already, its adapters cannot run through the pipeline,
            or a setting is for a module that is no part.

    Example:
        >>> engine = wrap_model_to_roundpipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), devices=1)
        >>> engine.close()
    """
    check_model(model)
    name = name or call_site()
    made = None if use_sequential_preset is False else cut(model)
    if made is not None:
        architecture = type(base_of(model)).__name__
        if skip_modules or override_config:
            raise ConfigError(
                "skip_modules and override_config are for models that are wrapped part by part, "
                f"but {architecture} runs by its preset; leave them out, or pass "
                "use_sequential_preset=False"
            )
        said = f"{name}: {architecture} runs by its preset as {len(made.sequential)} layers"
        logger.info(said)
        if use_sequential_preset is None and not logger.hasHandlers():
            print(said, file=sys.stderr)  # where logging is not set up INFO is lost
        of_preset = RoundPipeRunConfig(split_input=made.split_input, merge_output=made.merge_output)
        run_config = model_run_config.over(of_preset)
        engine = RoundPipe(
            made.sequential, name=name, model_run_config=run_config, **roundpipe_kwargs
        )
        engine.set_original_model(model)
        return engine
    if use_sequential_preset:
        raise NotImplementedError(
            f"there is no preset for {type(model).__name__}; pass use_sequential_preset=None to "
            "wrap it part by part"
        )
    settings = HostSettings(**roundpipe_kwargs)
    _check_modules(model, skip_modules, "skip_modules")
    if upper_threshold is None:
        upper_threshold = default_upper_threshold(model, _fewest_devices(settings))
    parts = find_parts(
        model, lower_threshold=lower_threshold, upper_threshold=upper_threshold, skip=skip_modules
    )
    if not parts and not skip_modules:
        parts = [whole(model, lower_threshold=lower_threshold)]
    _check_overrides(override_config, parts)
    if [part.path for part in parts] == [""]:
        rules = parts[0].config
        if takes_use_cache(base_of(model)):
            rules = _of_whole_model(model).over(rules)
        own = override_config.get(model, _UNSET).over(model_run_config).over(rules)
        return RoundPipe(model, name=name, model_run_config=own, **roundpipe_kwargs)
    logger.info(
        "%s: %s runs part by part: %s",
        name,
        type(model).__name__,
        ", ".join(part.path for part in parts),
    )
    return AutoRoundPipe(
        model,
        parts,
        name=name,
        model_run_config=model_run_config,
        overrides=override_config,
        settings=settings,
    )


def _fewest_devices(settings: HostSettings) -> int:
    """That any rank has, because all have to cut the model alike."""
    ranks = Ranks(settings.process_group)
    try:
        with refused_alike(ranks, "choosing devices"):
            own = len(settings.choose_devices())
        return int(min(ranks.combined([own], torch.minimum)))
    finally:
        ranks.close()


def _of_whole_model(model: nn.Module) -> RoundPipeRunConfig:
    """How a model of transformers' runs as a single layer: without a cache, which no two
    microbatches could share; whole if its loss is a mean over what each row has its own number
    of."""
    is_whole = "labels" in inspect.signature(type(base_of(model)).forward).parameters
    if is_whole:
        logger.info("%s runs as a single layer and microbatch", type(model).__name__)

    def split_input(args: Any, kwargs: Any, n: int) -> tuple[list[Any], list[Any]]:
        inputs = split(args, without_cache(model, kwargs), None, n).inputs
        return [args for args, _ in inputs], [kwargs for _, kwargs in inputs]

    return RoundPipeRunConfig(num_microbatch=1 if is_whole else None, split_input=split_input)


def _check_modules(model: nn.Module, given: Sequence[nn.Module], option: str) -> None:
    inside = {id(module) for module in model.modules()}
    for module in given:
        if id(module) not in inside:
            raise ConfigError(f"{option} names a {type(module).__name__} that is not in the model")


def _check_overrides(
    overrides: Mapping[nn.Module, RoundPipeRunConfig], parts: Sequence[ModelPart]
) -> None:
    known = {id(part.module) for part in parts}
    for module in overrides:
        if id(module) not in known:
            found = ", ".join(part.path or "the whole model" for part in parts)
            raise ConfigError(
                f"override_config names a {type(module).__name__} that gets no engine of its own; "
                f"the parts that do: {found}"
            )
