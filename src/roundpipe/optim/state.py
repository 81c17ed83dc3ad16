"""Optimizer state that is read and written between steps, never during one."""

from typing import Any

import torch

from ..step import context

# In param groups, yet no state.
KERNEL_CHOICES = frozenset(("capturable", "differentiable", "foreach", "fused"))


class SteadyState(torch.optim.Optimizer):
    """``state_dict`` and ``load_state_dict`` wait for pending steps. To be named before a class of
    ``torch.optim``."""

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict, every step called so far in it."""
        with context.OptimizerCtx():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict``, also of torch's optimizer of the same name, whose choice of a
        kernel stays behind."""
        own = [
            {key: group[key] for key in KERNEL_CHOICES if key in group}
            for group in self.param_groups
        ]
        with context.OptimizerCtx():
            super().load_state_dict(state_dict)
            for group, choices in zip(self.param_groups, own, strict=True):
                group.update(choices)
