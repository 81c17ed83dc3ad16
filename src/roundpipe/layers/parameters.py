"""A layer's weights in a slot, as the parameters of its replica, and what takes their gradients."""

from collections.abc import Sequence

import torch
from torch import nn

from ..params.dtypes import GradientRules
from ..params.gradients import Accumulator
from ..params.working import LayerParameters, view_of


class ReplicaParameters:
    """For as long as the layer stays in that slot: stage runs that find it there take what the one
    before has left.

    Used by the device's worker. ``parameters`` are by the ``id`` of the working parameter;
    ``trains`` says of each use whether it trains.
    """

    def __init__(
        self,
        layer: LayerParameters,
        slot: torch.Tensor,
        trains: Sequence[bool],
        rules: GradientRules,
    ) -> None:
        self.accumulator = Accumulator(layer, rules)
        self.slot = slot
        self._trains = trains
        # ``data``, because views would share one count of writes: writing to one would spoil the
        # graphs of all.
        self._all = [
            nn.Parameter(view_of(slot, use).data, requires_grad=is_trained)
            for use, is_trained in zip(layer.uses, trains, strict=True)
        ]
        self._forms = list(map(_form, self._all))
        self._sums: torch.Tensor | None = None
        self.parameters = {
            id(use.parameter): own for use, own in zip(layer.uses, self._all, strict=True)
        }

    def look(self) -> None:
        """Before the first forward that anybody knows of: it may write through ``.data``, which
        only values tell of."""
        if self._all:
            self._sums = self._sum_up()

    def written(self) -> set[int]:
        """The ids of the working parameters of weights that a forward has written to, if only what
        was there already. Looks at values once after ``look``."""
        moved = (
            own._version > 0 or own.data_ptr() != form[0]
            for own, form in zip(self._all, self._forms, strict=True)
        )
        written = {key for key, is_moved in zip(self.parameters, moved, strict=True) if is_moved}
        if self._sums is not None:
            changed = (self._sums != self._sum_up()).tolist()
            written.update(
                key for key, is_one in zip(self.parameters, changed, strict=True) if is_one
            )
            self._sums = None
        return written

    def _sum_up(self) -> torch.Tensor:
        return torch.stack([sum_of_bytes(own.detach()) for own in self._all])

    def fit(self, slot: torch.Tensor, trains: Sequence[bool]) -> bool:
        """Whether others, made now, would be the same."""
        return slot is self.slot and trains == self._trains and self._are_as_made()

    def _are_as_made(self) -> bool:
        """Whether the layer's code has left nothing on them."""
        return list(map(_form, self._all)) == self._forms and not any(
            own.grad is not None or own._backward_hooks or own.__dict__ for own in self._all
        )


def sum_of_bytes(weight: torch.Tensor) -> torch.Tensor:
    """Returns what tells almost every change of ``weight``, also one that torch does not count.

    It is in words of 64 bits, because a sum of narrower ones first makes a wide copy of them all:
    of a head in bf16 four times its size.
    """
    flat = (torch.view_as_real(weight) if weight.is_complex() else weight).contiguous()
    held = flat.view(-1).view(torch.uint8)
    if held.storage_offset() % 8:  # where the layer's code has put other memory there
        held = held.clone()
    whole = held.numel() // 8 * 8
    return held[:whole].view(torch.int64).sum() + held[whole:].sum()


def _form(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.requires_grad
