"""Optimizer state that is read and written between steps, never during one."""

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import ConfigError
from ..params.ranks import Ranks
from ..params.window import Master
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
        kernel stays behind.

        Raises:
            ConfigError: it has moments in 8 bits, whose codes would be taken for values.
        """
        if any("exp_avg_scale" in state for state in state_dict["state"].values()):
            raise ConfigError(
                "the state dict has moments in 8 bits; load it into LeanAdamW(moments='8bit')"
            )
        state_dict = of_owned(self, state_dict)
        own = [
            {key: group[key] for key in KERNEL_CHOICES if key in group}
            for group in self.param_groups
        ]
        with context.OptimizerCtx():
            super().load_state_dict(state_dict)
            for group, choices in zip(self.param_groups, own, strict=True):
                group.update(choices)


def listed(params: Any) -> Any:
    """Makes lists of the iterators among ``params``, so that they can be read before an optimizer
    reads them."""
    if isinstance(params, Iterator):
        params = list(params)
    for group in params if isinstance(params, list) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    return params


def has_complex(params: Any) -> bool:
    """Whether a tensor among ``params``, param groups or names with tensors, is complex."""
    if isinstance(params, torch.Tensor):
        return params.is_complex()
    if isinstance(params, dict):
        return has_complex(params.get("params", ()))
    return isinstance(params, (list, tuple)) and any(map(has_complex, params))


# Of several processes; see [Note: ranks].


def of_owned(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dict`` without the state of what other ranks own."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    foreign = {
        key
        for key, one in zip(saved, context.parameters_of(optimizer), strict=False)
        if not is_owned(one)
    }
    state = {key: value for key, value in state_dict["state"].items() if key not in foreign}
    return {**state_dict, "state": state}


def gathered_state_dict(optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """The state dict as one process alone would have it, on the first rank; on the others their own
    part. All ranks call it, with no step under way."""
    own = of_owned(optimizer, optimizer.state_dict())
    tensors, rest = dict[str, torch.Tensor](), dict[int, dict[str, Any]]()
    for index, state in own["state"].items():
        rest[index] = dict(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}/{name}"] = value
                rest[index][name] = None  # which keeps the order
    found = ranks.gathered(tensors, rest)
    if found is None:
        return own
    tensors, rests = found
    whole = {index: state for rest in rests for index, state in rest.items()}
    for key, value in tensors.items():
        index, name = key.split("/", 1)
        whole[int(index)][name] = value
    return {**own, "state": dict(sorted(whole.items()))}


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether this rank has the state of the ``parameter``."""
    return not isinstance(parameter, Master) or parameter.is_owned
