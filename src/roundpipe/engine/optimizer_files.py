"""The state of optimizers as a checkpoint has it: by the names of parameters, in its own dtype."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..memory.state_file import Memory
from ..optim.state import KERNEL_CHOICES, is_owned
from ..params.window import Master

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def refuse_other_names(path: str, whose: str, saved: set[str], wanted: Any) -> None:
    missing, unexpected = sorted(set(wanted) - saved), sorted(saved - set(wanted))
    if missing or unexpected:
        raise ConfigError(
            f"{path} does not fit {whose}: it lacks {len(missing)} ({_some(missing)}) and has "
            f"{len(unexpected)} unexpected ({_some(unexpected)})"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"


def as_sequence(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _groups(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Each param group with the names of its parameters."""
    names = {id(master): name for name, master in masters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"this {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not "
                    "one of the engine's; make it over RoundPipe.optim_parameters()"
                )
        yield group, [names[id(parameter)] for parameter in group["params"]]


def describe(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is no tensor of a parameter, and what is."""
    groups, values = [], {}
    tensors: dict[str, torch.Tensor] = {}
    for group, names in _groups(optimizer, masters):
        groups.append(
            {**{key: value for key, value in group.items() if key != "params"}, "names": names}
        )
        for name in names:
            state = optimizer.state.get(masters[name], {}) if is_owned(masters[name]) else {}
            values[name] = {
                key: value for key, value in state.items() if not isinstance(value, torch.Tensor)
            }
            tensors |= {
                f"optimizer/{name}/{key}": v
                for key, v in state.items()
                if isinstance(v, torch.Tensor)
            }
    return {"class": type(optimizer).__name__, "groups": groups, "values": values}, tensors


def together(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What ``describe`` says of each optimizer, as one process alone would say it."""
    return [
        {
            **parts[0],
            "values": {
                name: next((part["values"][name] for part in parts if part["values"][name]), {})
                for name in parts[0]["values"]
            },
        }
        for parts in zip(*of_ranks, strict=True)
    ]


def check_optimizers(
    path: str,
    saved: Sequence[dict[str, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[str, torch.Tensor],
) -> None:
    if [each["class"] for each in saved] != [type(each).__name__ for each in optimizers]:
        raise ConfigError(
            f"{path} has the state of {_some([each['class'] for each in saved])}, to be loaded "
            f"into {_some([type(each).__name__ for each in optimizers])}"
        )
    for described, optimizer in zip(saved, optimizers, strict=True):
        groups = [names for _, names in _groups(optimizer, masters)]
        if len(groups) != len(described["groups"]):
            raise ConfigError(
                f"{path} has {len(described['groups'])} param groups, this "
                f"{type(optimizer).__name__} has {len(groups)}"
            )
        for index, (names, group) in enumerate(zip(groups, described["groups"], strict=True)):
            refuse_other_names(
                path,
                f"param group {index} of {type(optimizer).__name__}",
                set(group["names"]),
                names,
            )


def restore(
    optimizer: torch.optim.Optimizer,
    described: dict[str, Any],
    masters: Mapping[str, torch.Tensor],
    file: Any,
    keys: Mapping[str, list[str]],
) -> None:
    """Not through torch's ``load_state_dict``, which casts moments to the parameter's dtype.

    Args:
        keys: those of the file, by the parameter's name.
    """
    for group, saved in zip(optimizer.param_groups, described["groups"], strict=True):
        group.update(
            {key: value for key, value in saved.items() if key not in KERNEL_CHOICES | {"names"}}
        )
    for name, values in described["values"].items():
        if not is_owned(masters[name]):
            continue
        tensors = {key.rpartition("/")[2]: file.get_tensor(key) for key in keys.get(name, ())}
        old = optimizer.state.pop(masters[name], {})
        memory = getattr(masters[name], "memory", Master.memory)
        state = {key: _into(old.get(key), tensor, memory) for key, tensor in tensors.items()}
        state |= values
        if state:
            optimizer.state[masters[name]] = state


def _into(old: Any, saved: torch.Tensor, memory: Memory) -> torch.Tensor:
    """In the memory that is there already, if it fits; else in new memory, as ``saved`` is the
    file's."""
    if isinstance(old, torch.Tensor) and (old.dtype, old.shape) == (saved.dtype, saved.shape):
        return old.copy_(saved)
    return memory.empty(saved.shape, saved.dtype).copy_(saved)
