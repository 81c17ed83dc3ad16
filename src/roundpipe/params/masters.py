"""The optimizer's own copies: masters are made on first use, follow loaded weights, and are written
back."""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..memory.state_file import Memory
from .dtypes import GradientRules
from .ranks import Ranks
from .window import Master
from .working import LayerParameters, ParameterStore


class Masters:
    """One master per trainable parameter, tied weights once.

    Owned by the optimizer thread while a step runs; the caller reads them only in an optimizer
    context, which waits.

    Args:
        memory: where they are made.
        ranks: the processes of which each has the masters that it owns; see [Note: ranks].
    """

    def __init__(
        self,
        store: ParameterStore,
        rules: GradientRules,
        memory: Memory = Master.memory,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self._store = store
        self._memory = memory
        self._rules = rules
        self.by_parameter: dict[int, Master] = {}  # by the id of the working copy
        self._ids: set[int] = set()  # of the masters themselves
        self._spread_in: object = None  # the step whose masters were spread last
        self._spread_keys = set[int]()
        # Marks of parameters when masters last followed; see [Note: writes].
        self._marks: dict[int, tuple[int, int]] = {}

    def of(self, parameter: nn.Parameter) -> Master:
        """The master of a trainable parameter, made from its working copy on first use."""
        master = self.by_parameter.get(id(parameter))
        if master is None:
            is_owned = self.ranks.owns(parameter)
            dtype = self._rules.master(parameter) if is_owned else parameter.dtype
            master = Master(self._memory.empty(parameter.shape, dtype).copy_(parameter.detach()))
            master.is_owned, master.is_shared_out = is_owned, self.ranks.count > 1
            if self._memory is not Master.memory:
                master.memory = self._memory
            self.by_parameter[id(parameter)] = master
            self._ids.add(id(master))
            self._store.stepped.add(id(parameter))
            self._is_written(parameter)
        return master

    def has_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there are masters of this engine among them."""
        return not self._ids.isdisjoint(map(id, tensors))

    def existing(self) -> Iterator[tuple[nn.Parameter, Master]]:
        """Pairs of working parameter and master."""
        for parameter in self._store.parameters:
            if id(parameter) in self.by_parameter:
                yield parameter, self.by_parameter[id(parameter)]

    def outline(self) -> str:
        """Tells them from those of another rank, if that has masters of other parameters."""
        have = bytes(id(parameter) in self.by_parameter for parameter in self._store.parameters)
        return f"{sum(have)} masters ({zlib.crc32(have):08x})"

    def take_gradients(self) -> None:
        """The step is over."""
        for _, master in self.existing():
            master.close()

    def spread(self, layers: Iterable[LayerParameters], step: object) -> None:
        """Sends what this rank owns to the others, each master once in a ``step`` and layer by
        layer, because ranks may differ in where they write it and when."""
        if self.ranks.count == 1:
            return
        if self._spread_in is not step:
            self._spread_in, self._spread_keys = step, set[int]()
        for layer in layers:
            keys = {id(use.parameter): use.parameter for use in layer.uses}
            self.ranks.spread(
                (parameter, self.by_parameter[key])
                for key, parameter in keys.items()
                if key in self.by_parameter and key not in self._spread_keys
            )
            self._spread_keys |= keys.keys()

    def mark_ahead(self) -> None:
        """Masters were (or may have been) updated: working copies are behind until written back."""
        self._store.ahead.update(self.by_parameter)

    @property
    def are_ahead(self) -> bool:
        """Whether the user's own parameters are without some update."""
        return bool(self._store.ahead) or not all(
            whereabouts.is_home for whereabouts in self._store.whereabouts
        )

    def offloaded_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Of the gradients of one call."""
        return sum(
            self._rules.dtypes(parameter).offloaded.itemsize * parameter.numel()
            for parameter in parameters
        )

    def follow_load(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """After a load: the master takes the loaded value at its own precision, if that is where
        the weight came from, else whatever the weight is now.

        Of a weight to which nobody is known to have written, and that is what the master has
        written back, it keeps its own precision."""
        is_written = self._is_written(parameter)
        if not parameter.requires_grad and id(parameter) not in self.by_parameter:
            return
        working = parameter.detach()
        is_source = isinstance(value, torch.Tensor) and value.shape == working.shape
        if value is not None and is_source and torch.equal(value.to(working.dtype), working):
            self.of(parameter)  # because only a master can hold what the working dtype rounds away
            self.follow(parameter, value)
            return
        master = self.by_parameter.get(id(parameter))
        if master is not None and (
            is_written or not torch.equal(master.detach().to(working.dtype), working)
        ):
            self.follow(parameter)

    def follow(self, parameter: nn.Parameter, value: torch.Tensor | None = None) -> None:
        """Makes the master equal to ``value`` (default: the working copy), at the value's
        precision."""
        master = self.by_parameter.get(id(parameter))
        if master is not None:
            with torch.no_grad():
                master.copy_(parameter.data if value is None else value)
            self._store.ahead.discard(id(parameter))

    def follow_others(self) -> None:
        """Another engine has written to the user's parameters, through ``.data``. With nothing
        ahead."""
        for parameter, _ in self.existing():
            self.follow_load(parameter, None)

    def leave_written(self) -> None:
        """What somebody else has written to the user's parameters in place is not to be overwritten
        by older updates: masters, and second working copies, take it over."""
        for parameter, _ in self.existing():
            if not self._is_written(parameter):
                continue
            self.follow(parameter)
            home = self._store.uses[id(parameter)][0]
            second = self._store.whereabouts[home.layer].second
            if second is not None and home.place in second.tensors:
                second.tensors[home.place].copy_(parameter.data)

    def follow_written(self) -> None:
        """Somebody has written to the user's parameters between steps: masters take over what is
        other than they have written back, and keep their own precision of the rest. With nothing
        ahead."""
        for parameter, master in self.existing():
            if not self._is_written(parameter):
                continue
            working = parameter.detach()
            with torch.no_grad():
                is_other = master.to(working.dtype) != working
                if bool(is_other.any()):
                    master.copy_(torch.where(is_other, working.to(master.dtype), master))

    def _is_written(self, parameter: nn.Parameter) -> bool:
        """Whether somebody is known to have written to it since this was last asked."""
        mark = self._store.writes.mark(parameter)
        before, self._marks[id(parameter)] = self._marks.get(id(parameter)), mark
        return mark != before

    def statistics(self) -> dict[str, Any]:
        seconds = (whereabouts.second for whereabouts in self._store.whereabouts)
        return {
            "masters": len(self.by_parameter),
            "master_bytes": sum(master.nbytes for master in self.by_parameter.values()),
            "state_file_bytes": getattr(self._memory, "num_bytes", 0),
            "second_buffer_bytes": sum(each.image.nbytes for each in seconds if each is not None),
            "device_state_bytes": sum(
                device_state.num_bytes for device_state in list(self._store.device_states.values())
            ),
        }
