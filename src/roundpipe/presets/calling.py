"""How a Hugging Face forward is called: by name, without what a sequence of blocks cannot honour,
block by block."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

# What first layers take besides, see causal_lm.py and loss.py.
_OURS = ("skip_logits", "loss_weight")
_ONE_ADAPTER_EACH = ("adapter_names", "alora_offsets", "task_ids")


def by_name(model_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call of the class's forward, all by name, those of its ``**kwargs``
    among them."""
    signature = inspect.signature(model_class.forward)  # type: ignore[attr-defined]
    ours = {name: kwargs[name] for name in _OURS if name in kwargs}
    theirs = {name: value for name, value in kwargs.items() if name not in ours}
    named: dict[str, Any] = dict(signature.bind(None, *args, **theirs).arguments)
    del named[next(iter(signature.parameters))]
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named | ours


def parameters_of(model_class: type) -> Mapping[str, Any]:
    """What the class's forward takes by name."""
    return inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]


def refuse_unsupported(config: Any, kwargs: dict[str, Any]) -> None:
    """Raises for what the model's own forward would do and a sequence of blocks cannot; takes out
    ``return_dict``."""
    in_parts = " or, as its own forward can, wrap the model with use_sequential_preset=False"
    for name, instead in (("output_hidden_states", in_parts), ("output_attentions", "")):
        if kwargs.get(name, getattr(config, name, False)):
            raise ConfigError(
                f"{name}=True: a preset does not collect what blocks return; leave it out{instead}"
            )
    for name in _ONE_ADAPTER_EACH:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{name}: one adapter serves the whole batch in the pipeline; leave it out"
            )
    if config._attn_implementation == "flex_attention":
        raise ConfigError(
            "flex_attention's BlockMask cannot move between devices; load the model with sdpa or "
            "flash"
        )
    if kwargs.pop("return_dict", None) is False or not config.return_dict:
        raise ConfigError(
            "return_dict=False: the pipeline returns a ModelOutput; use its to_tuple()"
        )


def refuse_cache(past_key_values: Any, use_cache: bool | None) -> None:
    """A cache is never built, whatever ``config.use_cache`` says; asking for one in the call is an
    error."""
    if past_key_values is not None or use_cache:
        raise ConfigError(
            "the pipeline keeps no key-value cache; leave out past_key_values and use_cache=True"
        )


def causal_config(config: Any, kwargs: dict[str, Any]) -> Any:
    """The config to make masks with: transformers lets ``is_causal`` of a call override it, and
    hands it to blocks."""
    is_causal = kwargs.get("is_causal", getattr(config, "is_causal", None))
    if is_causal is None:
        return config
    kwargs["is_causal"] = is_causal
    config = copy.copy(config)  # because other microbatches read the model's own meanwhile
    config.is_causal = is_causal
    return config


def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a block without the checkpointing that `gradient_checkpointing_enable` puts into its
    own ``__call__``.

    The engine recomputes already. Hooks run all the same: they are in `nn.Module`'s ``__call__``.
    """
    return nn.Module.__call__(block, *args, **kwargs)


def note_lengths(module: nn.Module) -> None:
    """Makes numbers of the sequence lengths that dynamic rotary embeddings have just noted as 0-d
    tensors.

    The engine gives the user's module what a forward has set on its replica, but for tensors, which
    live on a device. Without the length the frequencies would be those of the last batch, not of
    the longest.
    """
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name.endswith("max_seq_len_cached") and isinstance(value, torch.Tensor):
                setattr(part, name, int(value))
