"""An engine that looks like the user's model: names, keys, attributes and modes are the
original's."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..layers.structure import modules_of

_log = logging.getLogger("roundpipe")


class SignedByModel:
    """Decorates ``forward``: on an engine it has the signature of the original model's, which
    libraries look at to tell what a model takes. Made anew for each look, because the original may
    be another one by then."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, engine: "ForwardingModule | None", owner: type) -> Callable[..., Any]:
        return self._method if engine is None else _Signed(self._method, engine)


class _Signed:
    def __init__(self, method: Callable[..., Any], engine: "ForwardingModule") -> None:
        self._method = method
        self._engine = engine
        self.__doc__ = method.__doc__
        self.__name__ = method.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._engine, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._engine.model.forward)


class ForwardingModule(nn.Module):
    """Reads fall through to the original model, once there is one; so do writes and deletes of what
    the engine has not.

    Methods of the original see every update: ``_flush`` runs before them.
    """

    def _flush(self, what: str) -> None:
        raise NotImplementedError

    @property
    def model(self) -> nn.Module:
        """The module the user passed. Its parameters are up to date after ``synchronize()``."""
        original: nn.Module = self.__dict__["_original"]
        return original

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_original" not in own or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(own["_original"], name)
        if callable(value) and getattr(value, "__self__", None) is own["_original"]:
            return _flushing(self, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name == "forward":
            raise ConfigError(
                "assigning an engine's forward would bypass it; change the model and wrap again"
            )
        is_property = isinstance(getattr(type(self), name, None), property)
        if "_original" not in own or name in own or is_property:
            object.__setattr__(self, name, value)  # not registering what is a module
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.model, name)

    def __deepcopy__(self, memo: Any) -> "ForwardingModule":
        raise ConfigError(
            "an engine cannot be copied; copy .model after synchronize() and wrap the copy"
        )

    def __reduce__(self) -> Any:
        raise ConfigError("an engine cannot be pickled; save .model or state_dict() instead")

    @property
    def training(self) -> bool:
        """True while the original model is in training mode, which `train` and ``eval`` set."""
        return self.model.training if "_original" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self.model.training = mode

    def train(self, mode: bool = True) -> "ForwardingModule":
        """Puts the original model into training (``mode`` True) or evaluation mode."""
        modules = set(modules_of(self.model))
        # Because a call of a large model's own, in which nothing changes, takes milliseconds.
        if any(module.training is not mode or _has_own_train(module) for module in modules):
            self.model.train(mode)
        # The layers that the model does not have follow alone: a walk through the sequence would
        # switch what a `train` of the model's own leaves as it is.
        for module in modules_of(self.__dict__["_sequence"]):
            if module not in modules:
                module.training = mode
        return self

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yields the original model's modules with their names there."""
        yield from self.model.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the original model's children with their names there."""
        yield from self.model.named_children()

    def get_parameter(self, target: str, up_to_date: bool = True) -> nn.Parameter:
        """Returns the weight of that name in the original model, every update in it; as it lies
        there, without waiting, if not ``up_to_date``."""
        if up_to_date:
            self._flush("get_parameter()")
        return self.model.get_parameter(target)

    # What `nn.Module` does with its own children, parameters and buffers, of which an engine has
    # none.

    def get_submodule(self, target: str) -> nn.Module:
        """Returns the module of that name in the original model."""
        return self.model.get_submodule(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Returns the buffer of that name in the original model."""
        return self.model.get_buffer(target)

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """Replaces a module of the original model. The next call then asks to wrap it again."""
        self.model.set_submodule(target, module, strict)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a module to the original model. The next call then asks to wrap it again."""
        self.model.add_module(name, module)

    register_module = add_module

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Adds a weight to the original model. The next call then asks to wrap it again."""
        self.model.register_parameter(name, param)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Adds a buffer to the original model."""
        self.model.register_buffer(name, tensor, persistent)

    def apply(self, fn: Callable[[nn.Module], None]) -> "ForwardingModule":
        """Calls ``fn`` on every module of the original model, once every update is in it.

        Call `Engine.reload_parameters` after a ``fn`` that changes weights.
        """
        self._flush("apply()")
        self.model.apply(fn)
        return self

    def compile(self, *_: Any, **__: Any) -> None:
        """Refuses: layers are compiled one by one, when the model is wrapped.

        Raises:
            ConfigError: always; pass ``compile=True`` to `RoundPipe` instead.
        """
        raise ConfigError(
            "an engine is not compiled as a whole; pass compile=True when the model is wrapped"
        )

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Does nothing: the engine recomputes by itself."""
        _log.info(
            "%s: there is no checkpointing to enable, the engine recomputes by itself",
            type(self).__name__,
        )

    def activation_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Does nothing: it is the name in later releases of transformers."""
        self.gradient_checkpointing_enable()

    def _apply(self, *_: Any, **__: Any) -> "ForwardingModule":
        raise ConfigError(
            "an engine cannot be moved or cast: its weights stay on the host; convert the model, "
            "then wrap it. "
            "To prepare it with Accelerate, use roundpipe_hf.accelerate.RoundPipeAccelerator"
        )


def _flushing(engine: ForwardingModule, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine._flush(method.__name__)
        return method(*args, **kwargs)

    return call


def _has_own_train(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train or "train" in vars(module)
