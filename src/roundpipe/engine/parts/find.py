"""Which modules of a model that is no sequence become engines. Decides only; makes nothing."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...config import RoundPipeRunConfig
from ...layers.rebinding import CODE, mentioned


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A module that becomes an engine.

    ``path`` is its name in the model, empty for the model itself; ``config`` is what the rules say,
    below which come the user's settings.
    """

    path: str
    module: nn.Module
    config: RoundPipeRunConfig

    def __repr__(self) -> str:
        layers = layers_of(self.module)
        return (
            f"<{self.path or 'the model'}: {len(layers)} layers>"
            if len(layers) > 1
            else f"<{self.path}>"
        )


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of an engine over ``module``: the children of a sequence, else the module
    itself."""
    # Not children(), which gives a module at two places only once.
    return list(module) if isinstance(module, nn.Sequential) and is_sequence(module) else [module]


def is_sequence(module: nn.Module) -> bool:
    """Whether calling it is calling its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def default_upper_threshold(model: nn.Module, num_devices: int) -> int:
    """Bytes up to which a module is a single layer: every device and the next stage run's weights
    get an equal share."""
    return num_bytes(model) // (num_devices + 1)


def find_parts(
    model: nn.Module,
    *,
    lower_threshold: int,
    upper_threshold: int,
    skip: Collection[nn.Module] = (),
) -> list[ModelPart]:
    """The parts of ``model``, in the order of its modules; no part holds another or a skipped
    module.

    [Note: parts] A sequence becomes an engine of several layers. A module with a forward becomes
    one of a single layer if its own parameters have ``lower_threshold`` bytes or all of them at
    most ``upper_threshold``; below ``lower_threshold`` in total it is not worth cutting a batch
    for. Nor is a batch cut for torch's own modules that have it in the second dimension, be it of
    inputs (``batch_first=False``) or of what a recurrent one remembers. Elements of a module list
    become engines whatever their size; all but the last leave their outputs on the devices, for the
    next. What is none of these stays on the CPU, and its children are looked at. So does a module
    whose hooks or other code have got hold of modules with weights outside of it, because only the
    CPU has both.
    """
    return list(
        _Search(lower_threshold, upper_threshold, {id(module) for module in skip}).walk("", model)
    )


def whole(model: nn.Module, *, lower_threshold: int) -> ModelPart:
    """The model as its only part, for one in which nothing is worth an engine of its own."""
    return ModelPart(path="", module=model, config=_cut_if_large(model, lower_threshold))


def num_bytes(module: nn.Module) -> int:
    """Bytes of all its parameters, shared ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


class _Search:
    def __init__(self, lower_threshold: int, upper_threshold: int, skip: set[int]) -> None:
        self._lower = lower_threshold
        self._upper = upper_threshold
        self._skip = skip
        self._seen: set[int] = set()

    def walk(
        self, path: str, module: nn.Module, *, in_list: bool = False, is_last: bool = False
    ) -> Iterator[ModelPart]:
        if id(module) in self._skip or id(module) in self._seen or num_bytes(module) == 0:
            return
        self._seen.add(id(module))
        if self._is_part(module, in_list):
            yield ModelPart(
                path=path,
                module=module,
                config=self._config(module, feeds_next=in_list and not is_last),
            )
            return
        children = list(module.named_children())
        for index, (name, child) in enumerate(children):
            yield from self.walk(
                f"{path}.{name}".removeprefix("."),
                child,
                in_list=isinstance(module, nn.ModuleList),
                is_last=index == len(children) - 1,
            )

    def _is_part(self, module: nn.Module, in_list: bool) -> bool:
        if type(module).forward is nn.Module.forward or any(
            id(child) in self._skip for child in module.modules()
        ):
            return False
        if reaches_out(module):
            return False
        if in_list or is_sequence(module):
            return True
        own = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        return own >= self._lower or num_bytes(module) <= self._upper

    def _config(self, module: nn.Module, *, feeds_next: bool) -> RoundPipeRunConfig:
        return replace(
            _cut_if_large(module, self._lower), merge_output=False if feeds_next else None
        )


def reaches_out(module: nn.Module) -> bool:
    """Whether hooks and other code inside of a layer refer to modules with weights that are not in
    that layer."""
    for layer in layers_of(module):
        inside = {id(part) for part in layer.modules()}
        held = (code for part in layer.modules() for code in _code_of(part))
        referred = [
            value for code in held for value in mentioned(code) if isinstance(value, nn.Module)
        ]
        if any(id(other) not in inside and num_bytes(other) > 0 for other in referred):
            return True
    return False


def _code_of(module: nn.Module) -> Iterator[Any]:
    yield from (value for value in module.__dict__.values() if isinstance(value, CODE))
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        yield from hooks.values()


def _cut_if_large(module: nn.Module, lower_threshold: int) -> RoundPipeRunConfig:
    is_small = not is_sequence(module) and num_bytes(module) < lower_threshold
    return RoundPipeRunConfig(num_microbatch=1 if is_small or has_batch_second(module) else None)


def has_batch_second(module: nn.Module) -> bool:
    """Whether a layer is one of torch's own modules that take or return tensors whose batch is
    their second dimension.

    One inside of a module of the user's may be fed by code that turns its inputs round.
    """
    return any(
        isinstance(part, nn.RNNBase) or getattr(part, "batch_first", True) is False
        for layer in layers_of(module)
        if type(layer).__module__.startswith("torch.nn.")
        for part in layer.modules()
    )
