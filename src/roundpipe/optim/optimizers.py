"""Drop-in optimizers for masters on the host. The Adam family reads gradients as they landed, chunk by chunk."""

from typing import Any

import torch

from ..params.copies import Master
from . import context
from .chunks import ChunkBuffer


class _Chunked(torch.optim.Optimizer):
    """Steps chunk by chunk where it can, else as torch does. To be named before a class of ``torch.optim``."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **_fused_by_default(kwargs))
        self._buffer = ChunkBuffer()
        context.introduce(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                master.grad = None  # without reading it first, which would make it

    def step(self, closure: Any = None) -> Any:
        if closure is not None or not self._can_step_chunked():
            return super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for master in group["params"]:
                    self._update(master, group)
        return None

    def _can_step_chunked(self) -> bool:
        return all(
            group["fused"] and all(type(p) is Master and p.dtype is torch.float32 for p in group["params"])
            for group in self.param_groups
        )

    def _update(self, master: Master, group: dict[str, Any]) -> None:
        parts = master.landed()
        if not parts:
            return
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in self._moments(group):
                state[name] = torch.zeros_like(master.data)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        flat = [master.data.view(-1), *(state[name].view(-1) for name in self._moments(group))]
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        for where, values in self._buffer.chunks(parts, master.scale):
            weight, mean, square, *largest = ([tensor[where]] for tensor in flat)
            kernel(
                weight,
                [values],
                mean,
                square,
                largest[0] if largest else [],
                [state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )

    @staticmethod
    def _moments(group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


class Adam(_Chunked, torch.optim.Adam):
    """``torch.optim.Adam``, same arguments and state. Construct it over ``optim_parameters()``."""


class AdamW(_Chunked, torch.optim.AdamW):
    """``torch.optim.AdamW``, same arguments and state. Construct it over ``optim_parameters()``."""


class SGD(torch.optim.SGD):
    """``torch.optim.SGD`` with ``fused=True`` by default. Construct it over ``optim_parameters()``."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **_fused_by_default(kwargs))
        context.introduce(self)


def _fused_by_default(kwargs: dict[str, Any]) -> dict[str, Any]:
    chosen = any(kwargs.get(name) for name in ("foreach", "differentiable", "capturable"))
    return kwargs if chosen else {"fused": True, **kwargs}
