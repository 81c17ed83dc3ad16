"""Drop-in optimizers. torch's own, with its fused CPU kernels switched on: masters live on the host."""

from typing import Any

import torch


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` with ``fused=True`` by default. Construct it over ``optim_parameters()``."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **_fused_by_default(kwargs))


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with ``fused=True`` by default. Construct it over ``optim_parameters()``."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **_fused_by_default(kwargs))


class SGD(torch.optim.SGD):
    """``torch.optim.SGD`` with ``fused=True`` by default. Construct it over ``optim_parameters()``."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **_fused_by_default(kwargs))


def _fused_by_default(kwargs: dict[str, Any]) -> dict[str, Any]:
    chosen = any(kwargs.get(name) for name in ("foreach", "differentiable", "capturable"))
    return kwargs if chosen else {"fused": True, **kwargs}
