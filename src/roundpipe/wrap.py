"""From any model to an engine: by the preset of its architecture, as the sequence it is, or as a single layer."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .config import RoundPipeRunConfig
from .errors import ConfigError
from .model import RoundPipe
from .presets.adapters import base_of
from .presets.preset import cut

logger = logging.getLogger(__name__)


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Sequence[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] = {},  # never written to
    model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008  # frozen
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe:
    """Wraps ``model`` for training through the pipeline; the engine's ``.model`` is ``model`` itself.

    A Hugging Face model with a preset (also under PEFT) becomes embeddings, blocks and head; an ``nn.Sequential`` its
    children; anything else one single layer, which saves no memory.

    Args:
        use_sequential_preset: None uses a preset if there is one; True insists on it; False does not look for one.
        lower_threshold, upper_threshold, skip_modules, override_config: of the recursive rules, which are not there
            yet: anything but the default is refused.
        model_run_config: beats what the preset brings.
        roundpipe_kwargs: passed to `RoundPipe`.

    Raises:
        NotImplementedError: a preset was insisted on and there is none, or an option above is given.
        ConfigError: the model is an engine already, or its adapters cannot run through the pipeline.

    Example:
        >>> engine = wrap_model_to_roundpipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), devices=1)
        >>> engine.close()
    """
    if isinstance(model, RoundPipe):
        raise ConfigError("this model is wrapped already; wrap engine.model to wrap it anew")
    _refuse_recursive_options(lower_threshold, upper_threshold, skip_modules, override_config)
    name = name or _caller()
    made = None if use_sequential_preset is False else cut(model)
    if made is not None:
        logger.info("%s: %s runs by its preset as %d layers", name, type(base_of(model)).__name__, len(made.sequential))
        of_preset = RoundPipeRunConfig(split_input=made.split_input, merge_output=made.merge_output)
        run_config = model_run_config.over(of_preset)
        engine = RoundPipe(made.sequential, name=name, model_run_config=run_config, **roundpipe_kwargs)
        engine.set_original_model(model)
        return engine
    architecture = type(model).__name__
    if use_sequential_preset:
        raise NotImplementedError(
            f"there is no preset for {architecture}; pass use_sequential_preset=None to run it as a single layer, "
            "or an nn.Sequential of its parts"
        )
    if not isinstance(model, nn.Sequential):
        logger.warning(
            "%s: %s has no preset and is no nn.Sequential: it runs as a single layer, all of it on the device at once",
            name,
            architecture,
        )
    engine = RoundPipe(model, name=name, model_run_config=model_run_config, **roundpipe_kwargs)
    engine.set_original_model(model)
    return engine


def _refuse_recursive_options(
    lower_threshold: int,
    upper_threshold: int | None,
    skip_modules: Sequence[nn.Module],
    override_config: Mapping[nn.Module, RoundPipeRunConfig],
) -> None:
    given = {
        "lower_threshold": lower_threshold != 16 * 1024,
        "upper_threshold": upper_threshold is not None,
        "skip_modules": len(skip_modules) > 0,
        "override_config": len(override_config) > 0,
    }
    if any(given.values()):
        options = ", ".join(option for option, is_given in given.items() if is_given)
        raise NotImplementedError(f"{options}: wrapping part by part is not implemented; leave it out")


def _caller() -> str:
    """Where the user called us, as `RoundPipe` names itself when called directly."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
