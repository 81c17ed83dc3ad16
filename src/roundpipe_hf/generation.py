"""``trainer.model.generate`` on a device.

[Note: routed generation] A plain Trainer's model generates where it was trained. Ours stays on the
host, so once it has an engine its ``generate`` becomes one that asks the trainer, which generates
through the engine: see [Note: generating copy]. It is bound to the model and knows the trainer
weakly. Copies of the model, and the model whose trainer is gone, generate as their class does; so
does the model in a loss that runs on workers, where nobody may wait for the engine.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from roundpipe.threads.worker import in_worker

Generate = Callable[..., Any]
_routes: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Generate]]
_routes = weakref.WeakKeyDictionary()


def route_generation(model: Any, generate: Generate) -> None:
    """From here on ``model.generate(...)`` is ``generate(model, ...)``, a bound method of somebody
    who is not kept alive. See [Note: routed generation].

    A model that cannot generate, or has a ``generate`` that is not transformers', is left as it is.
    """
    if model in _routes:
        _routes[model] = weakref.WeakMethod(generate)
    elif _is_transformers(model) and "generate" not in vars(model):
        _routes[model] = weakref.WeakMethod(generate)
        model.generate = types.MethodType(_routed(type(model)), model)


def _is_transformers(model: Any) -> bool:
    return hasattr(type(model), "generate") and hasattr(model, "generation_config")


def _routed(kind: Any) -> Generate:
    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = _routes.get(self)
        route = None if known is None else known()
        if route is None or in_worker():
            return kind.generate(self, *args, **kwargs)
        return route(self, *args, **kwargs)

    generate.calls_engine = True  # type: ignore[attr-defined]  # which would otherwise generate
    return generate
