"""Generation on a device, by a copy of the model that lives as long as the generation.

[Note: generating copy] The engine runs whole batches of whole sequences; a decoder needs one token
at a time, with a key-value cache. So the model is copied once for many tokens: weights that fit go
to the device and stay there, and those of the other blocks pass through two buffers, each block's
on its way while the one before computes. The cache stays on the device. The copy shares the host's
weights, which nobody may write meanwhile.
"""

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..device import Device
from ..errors import ConfigError
from ..microbatch.sizes import tensor_leaves
from ..plan.memory import readable
from ..quantized import QuantizedWeight
from ..transfer.turns import StreamedBlocks, buffer_bytes

if TYPE_CHECKING:
    from .base import Engine

logger = logging.getLogger(__name__)

# Of free memory, for a copy and its cache: what its blocks need inside is not known.
_OF_FREE = 0.85


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


def through_copy(engine: "Engine", device: Device, method: Callable[..., Any]) -> Any:
    """Returns ``engine.generate``, where ``method`` is the model's own: with a device, and a model
    of transformers', generation by a copy on that device."""
    is_known = all(hasattr(engine.model, name) for name in ("config", "generation_config"))
    is_ours = getattr(method, "calls_engine", False)
    if is_ours or not is_known or not _copies_to(device.torch_device):
        return method
    return functools.wraps(method)(functools.partial(generate_on, engine, device))


def generate_on(engine: "Engine", device: Device, *args: Any, **kwargs: Any) -> Any:
    """Returns what ``engine.model.generate(*args, **kwargs)`` does, with the newest weights, made
    on ``device``. Tensors are where the first one given is, or on the host. On a virtual device
    the host's weights generate.

    Raises:
        ConfigError: ``assistant_model``, whose weights are not on the device.
        torch.OutOfMemoryError: one row alone does not fit.
    """
    given = tensor_leaves((args, kwargs))
    home = given[0].device if given else torch.device("cpu")
    kwargs = _keeping_cache(engine.model, kwargs)
    target, model = device.torch_device, engine.model
    if not _copies_to(target):
        engine._flush("generate()")
        args, kwargs = _to((args, kwargs), target)
        return _to(type(model).generate(model, *args, **kwargs), home)  # type: ignore[attr-defined]
    if kwargs.get("assistant_model") is not None:
        raise ConfigError(
            f"generate(assistant_model=) is not supported: the copy that generates is on {target}, "
            "and the assistant is not; leave it out, or close() the engine to generate on the host"
        )
    engine.free_devices()
    num_bytes = _OF_FREE * device.limit_bytes()
    return _to(generated(model, target, num_bytes, *args, **kwargs), home)


@contextmanager
def copy_on(model: nn.Module, device: torch.device, num_bytes: float) -> Iterator[nn.Module]:
    """A copy of ``model`` to call on ``device``; of its weights ``num_bytes`` at most stay there,
    but for those outside of its blocks, which all do, and those that several blocks share.

    Where all stay, adapters of LoRA are merged into the copy, as far as its dtype holds them.
    """
    with torch.no_grad():
        made = sharing(model)
        for module in made.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        blocks = _blocks_of(made)
        streamed = StreamedBlocks(device)
        own = _own_parameters(made, blocks)
        passing = {parameter for block in own for parameter in block}
        resident = [one for one in made.parameters() if one not in passing]
        left = int(num_bytes) - sum(one.nbytes for one in resident)
        for block, parameters, stays in zip(blocks, own, _staying(own, left), strict=True):
            if stays:
                resident += parameters
            else:
                streamed.add(block, parameters)
        for parameter in resident:
            # A copy on the CPU too, because adapters may be merged into it.
            parameter.data = value_on(parameter, device)
        if not len(streamed):
            _merge(made)
        else:
            _say_once(
                f"{len(streamed)} of {len(blocks)} blocks are streamed to generate: "
                f"{readable(streamed.num_bytes)} for each token of all rows"
            )
        try:
            yield made
        finally:
            streamed.close()
            # Said because the copy may be a part of a circle (its ``generate`` is bound to it), and
            # the collector seldom runs: what it has would be there when the next one is made.
            for tensor in (*made.parameters(), *made.buffers()):
                tensor.data = tensor.new_empty(0)


def generated(model: Any, device: torch.device, num_bytes: float, *args: Any, **kwargs: Any) -> Any:
    """Returns what ``model.generate(*args, **kwargs)`` does, made on ``device``: tokens of shape
    (rows, length), or what holds them and their scores. With fewer rows at a time where its memory
    does not hold the caches of all; greedy tokens are the same then, drawn ones are drawn in
    another order.

    Raises:
        torch.OutOfMemoryError: one row alone does not fit, or rows of which somebody asks more than
            tokens do not fit together.
    """
    args, kwargs = _to((args, kwargs), device)
    # Because the copy is dropped afterwards.
    kwargs = _with_setting(kwargs, "disable_compile", True)
    asked = _Asked(model, args, kwargs)
    with copy_on(model, device, num_bytes - asked.cache_bytes(model)) as made:
        return _in_parts(made, args, kwargs)


def _keeping_cache(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns ``kwargs`` by which a model whose config was set not to keep keys and values for its
    training keeps them to generate. Without, each token takes the work of all before it.

    Only who asks in the call, or by a generation config that was not made from the model's, gets
    none.
    """
    config, own = kwargs.get("generation_config"), model.generation_config
    asked = (kwargs.get("use_cache"), getattr(config, "use_cache", None))
    is_for_training = (
        own.use_cache is False
        and own._from_model_config
        and getattr(type(model.config.get_text_config(decoder=True)), "use_cache", None) is True
    )
    # Then blocks keep nothing whatever they are asked for, and a token would see none before it.
    recomputes = model.training and is_checkpointing(model)
    if not is_for_training or recomputes or any(one is not None for one in asked):
        return kwargs
    _say_once("generating with a key-value cache: use_cache=False is of the model's config alone")
    return _with_setting(kwargs, "use_cache", True)


def is_checkpointing(model: nn.Module) -> bool:
    """Says whether blocks recompute by themselves. They are asked one by one, because the model's
    own property for it has another name in later releases of transformers."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _with_setting(kwargs: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Where the others are, because transformers warns of settings in two places."""
    if kwargs.get("generation_config") is None:
        return kwargs | {name: value}
    config = copy.copy(kwargs["generation_config"])
    setattr(config, name, value)
    return kwargs | {"generation_config": config}


def _in_parts(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    asked = _Asked(model, args, kwargs)
    try:
        return model.generate(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        whole = next((name for name in _OF_ALL_ROWS if asked.is_given(name)), None)
        if whole is not None:
            error.add_note(f"{whole} is of all rows together: give generate() fewer rows")
        if whole is not None or asked.rows < 2:
            raise
        logger.warning(
            "generating %d rows ran out of memory; it goes on with half: %s", asked.rows, error
        )
    rows = asked.rows
    halves = (slice(None, rows // 2), slice(rows // 2, None))
    parts = [_in_parts(model, *_cut((args, kwargs), rows, half)) for half in halves]
    length = max(part.shape[1] for part in parts)
    padding = asked.padding()
    return torch.cat(
        [nn.functional.pad(part, (0, length - part.shape[1]), value=padding) for part in parts]
    )


# What cannot be put together from what halves of the rows give, is told of each row's place, or has
# as much for each row as its prompt says.
_OF_ALL_ROWS = (
    *("return_dict_in_generate", "streamer", "prefix_allowed_tokens_fn"),
    *("pixel_values", "pixel_values_videos"),
)


class _Asked:
    """The arguments of one generation."""

    def __init__(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs
        self._config = kwargs.get("generation_config") or model.generation_config
        named = map(kwargs.get, ("inputs", "input_ids", "inputs_embeds"))
        self._inputs: Any = next(iter(tensor_leaves([*args[:1], *named])), None)
        self.rows = 1 if self._inputs is None else len(self._inputs)

    def setting(self, name: str) -> Any:
        given = self._kwargs.get(name)
        return getattr(self._config, name, None) if given is None else given

    def is_given(self, name: str) -> bool:
        value = self.setting(name)
        return isinstance(value, torch.Tensor) or bool(value)

    def padding(self) -> float:
        """Returns the token that transformers puts after the end of a row."""
        for token in (self.setting("pad_token_id"), self.setting("eos_token_id")):
            if token is not None:
                return float(token[0] if isinstance(token, list | tuple) else token)
        return 0.0

    def cache_bytes(self, model: Any) -> float:
        """About what keys, values and logits take on the way; nothing where the model's config does
        not say it."""
        config = model.config.get_text_config()

        def size(*names: str) -> int:
            return next((value for name in names if (value := getattr(config, name, None))), 0)

        has_length = self._inputs is not None and self._inputs.ndim > 1
        length = self._inputs.shape[1] if has_length else 0
        new = self.setting("max_new_tokens") or self.setting("max_length") or 0
        heads = size("num_attention_heads")
        width = size("head_dim", "d_kv") or size("hidden_size") // max(heads, 1)
        values = 2 * size("num_hidden_layers") * (size("num_key_value_heads") or heads) * width
        kept = sum(bool(self.setting(name)) for name in ("output_scores", "output_logits"))
        per_row = values * (length + new) * model.dtype.itemsize
        per_row += (16 + 4 * kept * new) * size("vocab_size")
        copies = max(self.setting("num_beams") or 1, self.setting("num_return_sequences") or 1)
        return float(self.rows * copies * per_row)


def _copies_to(device: torch.device) -> bool:
    """Returns True where a copy is faster than the weights where they are."""
    return device.type != "cpu"


def _cut(given: Any, rows: int, half: slice) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[half] if tensor.ndim > 0 and len(tensor) == rows else tensor

    return tree_map_only(torch.Tensor, cut, given)


def _to(given: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)


def sharing(model: nn.Module) -> nn.Module:
    """A copy whose parameters are other objects over the same memory. In place of quantized weights
    it has plain ones without values, until they are given ``value_on``."""
    memo: dict[int, Any] = {id(parameter): _twin(parameter) for parameter in model.parameters()}
    made: nn.Module = copy.deepcopy(model, memo)
    return made


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, QuantizedWeight):
        return nn.Parameter(parameter.detach(), requires_grad=False)
    nothing = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
    made: Any = nn.Parameter(nothing, requires_grad=False)
    made.quantized = parameter
    return made  # type: ignore[no-any-return]


def value_on(parameter: nn.Parameter, device: torch.device, *, copy: bool = True) -> torch.Tensor:
    """The dense value of a parameter that ``sharing`` has made, on ``device``; always new memory
    with ``copy``."""
    quantized = getattr(parameter, "quantized", None)
    if quantized is None:
        return parameter.data.to(device, copy=copy)
    dense: torch.Tensor = quantized.dequantize_on(device)
    return dense


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of the model's lists of blocks: one list of a decoder, two of an encoder and its
    decoder. What is a list inside of a block is not cut."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # from outside to inside
        if isinstance(module, nn.ModuleList) and module not in inside:
            found += module
            inside.update(module.modules())
    return found


def _own_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Returns the parameters of each block that nobody else has."""
    holders = Counter(parameter for block in blocks for parameter in block.parameters())
    holders.update(_outside(model, set(blocks)))
    return [[one for one in block.parameters() if holders[one] == 1] for block in blocks]


def _staying(own: Sequence[Sequence[nn.Parameter]], left: int) -> Iterator[bool]:
    """Returns which blocks stay where ``left`` bytes have room. The others are spread among them,
    because one passes while those between it and the one before compute."""
    sizes = [sum(one.nbytes for one in block) for block in own]
    if sum(sizes) > left:
        left -= buffer_bytes(own)
    kept = seen = 0
    for size in sizes:
        seen += size
        stays = (kept + size) * sum(sizes) <= left * seen
        kept += size if stays else 0
        yield stays


def _outside(module: nn.Module, blocks: Set[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters that are reached without going through a block, some several times."""
    if module not in blocks:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _outside(child, blocks)


def _merge(model: nn.Module) -> None:
    config = getattr(model, "peft_config", None)
    # Over quantized weights adapters stay apart, because a merged weight would be rounded to their
    # dtype where training does not.
    is_quantized = any(hasattr(parameter, "quantized") for parameter in model.parameters())
    if (
        not is_quantized
        and config
        and all(str(one.peft_type).endswith("LORA") for one in config.values())
    ):
        model.merge_adapter()  # type: ignore[operator]  # a PEFT model's
