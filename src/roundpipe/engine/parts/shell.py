"""The user's model as one forward on the CPU sees it: shallow copies in which some modules call
engines.

The model itself is never changed, so its names, keys and methods stay its own. A shell is made for
every forward, because hooks, modes and attributes of the user's modules may change between them.
"""

import copy as copying
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import ConfigError
from ...layers.modes import HOOKS, Modes
from ...layers.replica import pairs, replicate
from ...layers.structure import Structure
from ...microbatch.sizes import tensor_leaves
from .find import is_sequence
from .loss import has_loss_function
from .twins import LostTensor, Sides, Twin

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Whether transformers has put its hooks on the modules below that collect hidden states for whoever
# asks.
_COLLECTS = "_output_capturing_hooks_installed"

# What each side of a twin has for itself.
_OF_EACH = frozenset({"_parameters", "_buffers", "_modules", "forward", _COLLECTS, *HOOKS})
# What a forward returned, and tensors that it has set as attributes, which stay on a device.
Ran = tuple[Any, Sequence[tuple[nn.Module, str]]]
# Called with the arguments of a module's forward, and why those are not to be cut, if so.
EngineCall = Callable[[tuple[Any, ...], dict[str, Any], str | None], Ran]


class Shell:
    """Copies of ``model``'s modules, of which ``root`` is called in its place, for one forward. See
    [Note: one owner].

    Args:
        residents: what stands for each parameter, by the ``id`` of the working copy.
        engines: what to call instead of a module's forward, by the ``id`` of the module.
        loss: what to call instead of a Hugging Face model's ``loss_function``.
    """

    def __init__(
        self,
        model: nn.Module,
        residents: Mapping[int, nn.Parameter],
        engines: Mapping[int, EngineCall],
        loss: EngineCall | None,
    ) -> None:
        modes = Modes.of(Structure([model]))
        self.root = replicate(model, dict(residents), lambda tensor: tensor, modes)
        both = pairs(model, self.root)
        configs = _without_cache(pair for pair in both if id(pair[0]) not in engines)
        self._twins: dict[int, list[Twin]] = {}  # by the id of what they are of
        for module, copy in both:
            if copy.__dict__.get("gradient_checkpointing"):
                copy.__dict__["gradient_checkpointing"] = False  # engines recompute already
            _drop_collecting_hooks(copy)
            engine = engines.get(id(module))
            if engine is not None:
                inside = [id(part) for part in module.modules()]
                copy.__dict__["forward"] = self._in_step(engine, inside, configs)
                if not is_sequence(module):  # whose own hooks its layers do not know
                    copy.__dict__.update((name, OrderedDict()) for name in _HOOKS)
            if loss is not None and has_loss_function(module):
                loss_function = self._in_step(loss, [id(module)], configs)
                copy.__dict__["_loss_function"] = loss_function
        used = (p for module, _ in both for p in module._parameters.values())
        weights = {id(p): (p, residents[id(p)]) for p in used if id(p) in residents}
        sides = Sides([*both, *configs, *weights.values()])
        for module, copy in both:
            self._twins[id(module)] = [
                Twin(vars(module), vars(copy), _OF_EACH, sides),
                Twin(module._buffers, copy._buffers, frozenset(), sides),
            ]
        for own, copy in configs:
            self._twins[id(own)] = [Twin(vars(own), vars(copy), frozenset({"use_cache"}), sides)]

    def _in_step(
        self, engine: EngineCall, inside: Sequence[int], configs: Sequence[tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Calls ``engine`` with what it runs, by ``id``, in step with the copies before and
        after."""
        # Not self, which is held by whoever made it only while the forward runs.
        ids, all_twins = [*inside, *(id(own) for own, _ in configs)], self._twins
        whole: str | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal whole
            twins = [twin for key in ids for twin in all_twins.get(key, ())]
            for twin in twins:
                whole = _whole_because_of(twin.push()) or whole
            output, lost = engine(args, kwargs, whole)
            for twin in twins:
                twin.pull()
            for module, name in lost:
                for twin in all_twins.get(id(module), ())[:1]:
                    twin.lose(name, LostTensor(f"{type(module).__name__}.{name}"))
            return output

        return run

    def write_back(self) -> None:
        """The forward has succeeded: what it has set goes to the user's model."""
        for twins in self._twins.values():
            for twin in twins:
                twin.push()

    def close(self) -> None:
        """Lets go of the copies, which refer to each other by this."""
        self._twins.clear()


def _whole_because_of(set_here: Mapping[str, Any]) -> str | None:
    """Why an engine's inputs are not to be cut after the model's own code has set that in one of
    its modules.

    Raises:
        ConfigError: a tensor among it carries a gradient, which ends where a module holds it.
    """
    for name, value in set_here.items():
        for leaf in tensor_leaves(value):
            if isinstance(leaf, nn.Parameter):
                continue
            if leaf.requires_grad:
                raise ConfigError(
                    f"the model's forward sets {name!r} inside of a module that an engine runs to "
                    "a tensor that requires grad, whose gradient would be lost there; give it to "
                    "the module's forward as an argument, or leave the module on the CPU "
                    "(skip_modules)"
                )
            if leaf.dim() > 0:
                return f"the model's forward has just set its {name!r}, of all rows"
    return None


def _without_cache(both: Iterable[tuple[nn.Module, nn.Module]]) -> list[tuple[Any, Any]]:
    """Has models of transformers among the copies build no key-value cache, to which all
    microbatches would write.

    By their configs, because code around a decoder seldom says ``use_cache=False`` and drops the
    cache it gets. Returns each config and what its copies have in its place.
    """
    transformers: Any = sys.modules.get("transformers")
    made: dict[int, tuple[Any, Any]] = {}
    for _, copy in both if transformers is not None else ():
        config = copy.__dict__.get("config")
        if isinstance(copy, transformers.PreTrainedModel) and getattr(config, "use_cache", False):
            if id(config) not in made:
                made[id(config)] = config, copying.copy(config)
                made[id(config)][1].use_cache = False
            copy.__dict__["config"] = made[id(config)][1]
    return list(made.values())


def _drop_collecting_hooks(copy: nn.Module) -> None:
    """Has transformers put them on this forward's copies, if it wants them: on a worker they
    collect for nobody."""
    copy.__dict__.pop(_COLLECTS, None)
    hooks = copy._forward_hooks.items()
    copy.__dict__["_forward_hooks"] = OrderedDict(
        (key, hook)
        for key, hook in hooks
        if getattr(hook, "__name__", "") != "output_capturing_hook"
    )
