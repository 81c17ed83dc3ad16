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
from torch.utils._pytree import tree_leaves, tree_map_only

from ..device import Device
from ..errors import ConfigError
from ..quantized import QuantizedWeight

if TYPE_CHECKING:
    from .base import Engine

logger = logging.getLogger(__name__)

# Of free memory, for a copy and its cache: what its blocks need inside is not known.
_OF_FREE = 0.85


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
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    home = given[0].device if given else torch.device("cpu")
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
        streamed = _Streamed(device)
        own = _own_parameters(made, blocks)
        passing = {parameter for block in own for parameter in block}
        resident = [one for one in made.parameters() if one not in passing]
        left = num_bytes - sum(one.nbytes for one in resident)
        sizes = [sum(one.nbytes for one in block) for block in own]
        if sum(sizes) > left:
            left -= _buffer_bytes(own)
        for block, parameters, size in zip(blocks, own, sizes, strict=True):
            left -= size
            if left < 0:
                streamed.add(block, parameters)
            else:
                resident += parameters
        for parameter in resident:
            # A copy on the CPU too, because adapters may be merged into it.
            parameter.data = value_on(parameter, device)
        if not len(streamed):
            _merge(made)
        else:
            logger.info("%d of %d blocks are streamed to generate", len(streamed), len(blocks))
        try:
            yield made
        finally:
            streamed.close()


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
    config = copy.copy(kwargs.get("generation_config"))
    if config is None:
        kwargs["disable_compile"] = True  # of a copy that is dropped afterwards
    else:
        config.disable_compile = True  # there, because transformers does not want it in both
        kwargs["generation_config"] = config
    asked = _Asked(model, args, kwargs)
    with copy_on(model, device, num_bytes - asked.cache_bytes(model)) as made:
        return _in_parts(made, args, kwargs)


def _in_parts(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    asked = _Asked(model, args, kwargs)
    try:
        return model.generate(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        whole = next((name for name in _OF_ALL_ROWS if asked.setting(name)), None)
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


# What cannot be put together from what halves of the rows give, or is told of each row's place.
_OF_ALL_ROWS = ("return_dict_in_generate", "streamer", "prefix_allowed_tokens_fn")


class _Asked:
    """The arguments of one generation."""

    def __init__(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs
        self._config = kwargs.get("generation_config") or model.generation_config
        named = (kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
        found = (one for one in (*args[:1], *named) if isinstance(one, torch.Tensor))
        self._inputs: Any = next(found, None)
        self.rows = 1 if self._inputs is None else len(self._inputs)

    def setting(self, name: str) -> Any:
        given = self._kwargs.get(name)
        return getattr(self._config, name, None) if given is None else given

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


def _outside(module: nn.Module, blocks: Set[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters that are reached without going through a block, some several times."""
    if module not in blocks:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _outside(child, blocks)


def _buffer_bytes(own: Sequence[Sequence[nn.Parameter]]) -> int:
    """Bytes of the two buffers that blocks pass through."""
    shapes = {
        (place, one.shape, one.dtype): one.nbytes
        for block in own
        for place, one in enumerate(block)
    }
    return 2 * sum(shapes.values())


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


class _Streamed:
    """Blocks whose weights are on the host, and pass through a device block by block.

    Two buffers take turns. A lane of its own fills one while the block in the other computes, and
    fills it again only behind that block, because it reads it until then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._lane = self._module.Stream(**({} if device.type == "cpu" else {"device": device}))
        self._blocks: list[list[nn.Parameter]] = []
        self._next: dict[int, int] = {}  # by a block: the one that came after it
        self._last: int | None = None
        self._hosts: list[list[torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._buffers: dict[tuple[int, int, torch.Size, torch.dtype], torch.Tensor] = {}
        self._turn = 0
        self._filled: dict[int, tuple[int, Any]] = {}  # by turn: the block, and when it is there

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Blocks are mostly called in the order in which they are added. ``parameters``: those of
        ``block`` that pass."""
        index = len(self._blocks)
        self._blocks.append(parameters)
        self._hosts.append([parameter.data for parameter in parameters])
        self._hooks += [
            block.register_forward_pre_hook(lambda *_: self._begin(index)),
            block.register_forward_hook(lambda *_: self._end(index)),
        ]

    def close(self) -> None:
        """The device's memory is free once nobody has the copy any more."""
        for hook in self._hooks:
            hook.remove()
        for index in range(len(self)):
            self._end(index)
        self._module.current_stream(self._device).wait_stream(self._lane)
        self._buffers.clear()

    def _begin(self, index: int) -> None:
        turns = [turn for turn, (block, _) in self._filled.items() if block == index]
        if not turns:
            self._fill(index)
        _, event = self._filled.pop(turns[0] if turns else self._turn)
        if self._last is not None:
            self._next[self._last] = index
        self._last = index
        after = self._next.get(index, (index + 1) % len(self))
        if after != index:
            self._fill(after)
        self._module.current_stream(self._device).wait_event(event)

    def _end(self, index: int) -> None:
        for parameter, host in zip(self._blocks[index], self._hosts[index], strict=True):
            parameter.data = host

    def _fill(self, index: int) -> None:
        self._turn = 1 - self._turn
        hosts = self._hosts[index]
        targets = [self._buffer(place, host) for place, host in enumerate(hosts)]
        # Because the buffer was read, or made, by what the caller has queued so far.
        self._lane.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._lane):
            for target, parameter, host in zip(targets, self._blocks[index], hosts, strict=True):
                quantized = getattr(parameter, "quantized", None)
                if quantized is None:
                    target.copy_(host, non_blocking=True)
                else:
                    quantized.write_to(target)
        self._filled[self._turn] = index, self._lane.record_event()
        for parameter, target in zip(self._blocks[index], targets, strict=True):
            parameter.data = target

    def _buffer(self, place: int, host: torch.Tensor) -> torch.Tensor:
        key = self._turn, place, host.shape, host.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        return self._buffers[key]
