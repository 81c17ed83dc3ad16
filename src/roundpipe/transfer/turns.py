"""Blocks whose weights are on the host, and pass through a device block by block."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn


class StreamedBlocks:
    """Blocks whose weights pass through a device.

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

    @property
    def num_bytes(self) -> int:
        """What passes when each block is called once."""
        parameters: Iterator[Any] = chain.from_iterable(self._blocks)
        quantized = ((getattr(one, "quantized", None), one) for one in parameters)
        return sum(one.nbytes if packed is None else packed.num_bytes for packed, one in quantized)

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


def buffer_bytes(own: Sequence[Sequence[nn.Parameter]]) -> int:
    """Bytes of the two buffers that blocks pass through."""
    shapes = {
        (place, one.shape, one.dtype): one.nbytes
        for block in own
        for place, one in enumerate(block)
    }
    return 2 * sum(shapes.values())
