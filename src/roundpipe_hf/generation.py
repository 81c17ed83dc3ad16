"""Generation on a device, by a copy of the model that lives as long as the generation.

[Note: generating copy] The engine runs whole batches of whole sequences; a decoder needs one token
at a time, with a key-value cache. So the model is copied once for many tokens: weights that fit go
to the device and stay there, and those of the other blocks pass through two buffers, each block's
on its way while the one before computes. The cache stays on the device. The copy shares the host's
weights, which nobody may write meanwhile.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


@contextmanager
def copy_on(model: nn.Module, device: torch.device, num_bytes: float) -> Iterator[nn.Module]:
    """A copy of ``model`` to call on ``device``; of its weights ``num_bytes`` at most stay there,
    but for those outside of its blocks, which all do.

    Where all stay, adapters of LoRA are merged into the copy, as far as its dtype holds them.
    """
    with torch.no_grad():
        made = _sharing(model)
        for module in made.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        blocks = _blocks_of(made)
        streamed = _Streamed(device)
        passing = {parameter for block in blocks for parameter in block.parameters()}
        resident = [one for one in made.parameters() if one not in passing]
        left = num_bytes - sum(one.nbytes for one in resident)
        sizes = [sum(one.nbytes for one in block.parameters()) for block in blocks]
        if sum(sizes) > left:
            left -= 2 * max(sizes, default=0)  # the buffers that others pass through
        for block, size in zip(blocks, sizes, strict=True):
            left -= size
            if left < 0:
                streamed.add(block)
            else:
                resident += block.parameters()
        for parameter in resident:
            # A copy on the CPU too, because adapters may be merged into it.
            parameter.data = parameter.data.to(device, copy=True)
        if not len(streamed):
            _merge(made)
        else:
            logger.info("%d of %d blocks are streamed to generate", len(streamed), len(blocks))
        try:
            yield made
        finally:
            streamed.close()


def generated(
    model: nn.Module, device: torch.device, num_bytes: float, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What ``model.generate(*args, **kwargs)`` returns, made on ``device``: tokens, of shape (rows,
    length). With fewer rows at a time where its memory does not hold the caches of all; greedy
    tokens are the same then, drawn ones are drawn in another order.

    Raises:
        torch.OutOfMemoryError: one row alone does not fit.
    """
    kwargs = {name: _to(value, device) for name, value in kwargs.items()}
    cache = _cache_bytes(model, kwargs)
    with copy_on(model, device, num_bytes - cache) as made:
        return _in_parts(made, [_to(value, device) for value in args], kwargs)


def _in_parts(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    try:
        made: torch.Tensor = model.generate(*args, **kwargs)
        return made
    except torch.OutOfMemoryError as error:
        rows = len(kwargs["input_ids"]) if "input_ids" in kwargs else 1
        if rows < 2:
            raise
        logger.warning(
            "generating %d rows ran out of memory; it goes on with half: %s", rows, error
        )
    halves = (slice(None, rows // 2), slice(rows // 2, None))
    parts = [
        _in_parts(model, args, {name: _cut(value, rows, half) for name, value in kwargs.items()})
        for half in halves
    ]
    config = kwargs.get("generation_config") or model.generation_config
    padding = config.pad_token_id if config.pad_token_id is not None else 0
    length = max(part.shape[1] for part in parts)
    return torch.cat(
        [
            nn.functional.pad(part, (0, length - part.shape[1]), value=float(padding))
            for part in parts
        ]
    )


def _cut(value: Any, rows: int, half: slice) -> Any:
    is_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows
    return value[half] if is_batch else value


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _sharing(model: nn.Module) -> nn.Module:
    """A copy whose parameters are other objects over the same memory."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for parameter in model.parameters()
    }
    made: nn.Module = copy.deepcopy(model, memo)
    return made


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest part of a model that is a list of blocks of a kind."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    most = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=None)
    return [] if most is None else list(most)


def _merge(model: nn.Module) -> None:
    config = getattr(model, "peft_config", None)
    if config and all(str(one.peft_type).endswith("LORA") for one in config.values()):
        model.merge_adapter()  # type: ignore[operator]  # a PEFT model's


def _cache_bytes(model: Any, kwargs: dict[str, Any]) -> float:
    """About what keys, values and logits take on the way."""
    config = model.config.get_text_config()
    rows, length = kwargs["input_ids"].shape if "input_ids" in kwargs else (1, 0)
    asked = kwargs.get("generation_config") or model.generation_config
    new = asked.max_new_tokens if asked.max_new_tokens is not None else asked.max_length
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * heads * width * (length + (new or 0))
    per_row: float = values * model.dtype.itemsize + 16 * config.vocab_size
    return rows * per_row


class _Streamed:
    """Blocks whose weights are on the host, and pass through a device block by block.

    Two buffers take turns. A lane of its own fills one while the block in the other computes, and
    fills it again only behind that block, because it reads it until then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._lane = self._module.Stream(**({} if device.type == "cpu" else {"device": device}))
        self._blocks: list[nn.Module] = []
        self._hosts: list[list[torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._buffers: dict[tuple[int, int, torch.Size, torch.dtype], torch.Tensor] = {}
        self._turn = 0
        self._filled: dict[int, tuple[int, Any]] = {}  # by turn: the block, and when it is there

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: nn.Module) -> None:
        """Blocks are mostly called in the order in which they are added."""
        index = len(self._blocks)
        self._blocks.append(block)
        self._hosts.append([parameter.data for parameter in block.parameters()])
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
        if len(self) > 1:
            self._fill((index + 1) % len(self))
        self._module.current_stream(self._device).wait_event(event)

    def _end(self, index: int) -> None:
        for parameter, host in zip(
            self._blocks[index].parameters(), self._hosts[index], strict=True
        ):
            parameter.data = host

    def _fill(self, index: int) -> None:
        self._turn = 1 - self._turn
        hosts = self._hosts[index]
        targets = [self._buffer(place, host) for place, host in enumerate(hosts)]
        # Because the buffer was read, or made, by what the caller has queued so far.
        self._lane.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._lane):
            for target, host in zip(targets, hosts, strict=True):
                target.copy_(host, non_blocking=True)
        self._filled[self._turn] = index, self._lane.record_event()
        for parameter, target in zip(self._blocks[index].parameters(), targets, strict=True):
            parameter.data = target

    def _buffer(self, place: int, host: torch.Tensor) -> torch.Tensor:
        key = self._turn, place, host.shape, host.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(host, device=self._device)
        return self._buffers[key]
