"""Which of the user's own parameters somebody else has written to."""

import operator
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import nn

_writes = operator.attrgetter("_version")


class Writes:
    """Notices writes to parameters that torch counts, and parameters that were given other memory.

    [Note: writes] torch counts what is written in place, also by loading a state dict and by
    initialisers. ``parameter.data = new`` shows in the address, because the memory before is kept
    until this was noticed. Writing back goes through ``.data`` and does not count; nor does what
    the user writes through ``.data`` in place or through NumPy, which nothing tells of. What is
    noticed when is in docs/internals/model-state.md.

    Args:
        parameters: of an engine.
        on_host: ids of those that only the caller's thread computes with. A forward may write to
            them, and they are written back before it does.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], on_host: Collection[int]) -> None:
        self._parameters = list(parameters)
        self._on_host = frozenset(on_host)
        self._replaced: Counter[int] = Counter()
        self._homes = [parameter.data for parameter in self._parameters]
        self._seen = self._look()

    @property
    def are_there(self) -> bool:
        """Whether any parameter was written since ``settle``. For any thread."""
        return self._look() != self._seen

    @property
    def differing(self) -> list[nn.Parameter]:
        """Those that were. For any thread."""
        before, now = zip(*self._seen, strict=True), zip(*self._look(), strict=True)
        return [p for p, a, b in zip(self._parameters, before, now, strict=True) if a != b]

    def settle(self) -> None:
        """What was written until now is known. For the caller's thread."""
        for place, (parameter, home) in enumerate(zip(self._parameters, self._homes, strict=True)):
            if parameter.data_ptr() != home.data_ptr():
                self._replaced[id(parameter)] += 1
                self._homes[place] = parameter.data
        self._seen = self._look()

    def is_on_host(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._on_host

    def mark(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Another one after each write that was settled."""
        return parameter._version, self._replaced[id(parameter)]

    def times_replaced(self, parameter: nn.Parameter) -> int:
        """How often the parameter was given other memory, as far as that was settled."""
        return self._replaced[id(parameter)]

    def forget(self) -> None:
        """The engine is closed and keeps no memory alive."""
        self._parameters, self._homes = [], []
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[int]]:
        parameters = self._parameters
        return list(map(_writes, parameters)), list(map(torch.Tensor.data_ptr, parameters))
