"""Models that are no sequence: their own forward runs on the CPU and calls an engine wherever a
part was wrapped.

[Note: one host] All engines share one host: one store, one master for each parameter, one optimizer
thread, one worker pool of device workers. So a weight tied across engines, or read by the model's
own code, has one master and one sum of gradients. Every parameter has a use on the host as well,
because the model's own code may read any of them. It computes with the same version of the weights
as the engines: it waits until that is written back, and the next update is written back only by the
job of the next step.

::

    forward   shell(model) -- engine A -- own operations -- engine B --> outputs, one autograd graph
    backward  commit all  <-- A's round <- residents' gradients <- B's round <-- loss.backward()
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..autoplan.free_memory import FreeMemory
from ..config import RoundPipeRunConfig
from ..errors import ConfigError
from ..microbatch import batch_size_of
from ..microbatch.packed import RoundPipePackedData
from ..params.gradient_buffers import GradientBuffers
from ..presets.adapters import base_of
from ..trace.table import Statistics
from .base import Engine
from .device_memory import KeptInputs, SharedMemory
from .forwarding import SignedByModel
from .parts.backward_pass import BackwardPasses
from .parts.deferred import defer, merge_deferred, packed_again
from .parts.find import ModelPart, layers_of
from .parts.loss import LossFunction, has_loss_function
from .parts.rows import BatchRows, PartInputs
from .parts.shell import EngineCall, Ran, Shell
from .runner import BatchRunner
from .state import HostSettings, make_host

_UNSET = RoundPipeRunConfig()


class AutoRoundPipe(Engine):
    """A model of any shape, of which the parts that are worth it run on devices. Made by
    `wrap_model_to_roundpipe`.

    Train it as any model: ``loss = engine(...)``, ``loss.backward()``, ``engine.step(step_fn)``.
    Parameters outside of parts are trained on the CPU by the same steps.

    Args:
        model: the whole model, on the CPU.
        parts: the modules that run on devices, from `parts.find`.
        name: shown in logs, traces and errors.
        model_run_config: settings of every call of every part, below what a call sets itself.
        overrides: run configs by the module they are for.
        settings: devices, dtypes and limits, as `RoundPipe` takes them.

    Example:
        >>> engine = wrap_model_to_roundpipe(unet)
        >>> optimizer = roundpipe.optim.AdamW(engine.optim_parameters())
        >>> loss = nn.functional.mse_loss(engine(images), targets)
        >>> loss.backward()
        >>> engine.step(optimizer.step)
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[ModelPart],
        *,
        name: str,
        model_run_config: RoundPipeRunConfig = _UNSET,
        overrides: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
        settings: HostSettings | None = None,
    ) -> None:
        _refuse_what_is_for_one_engine(model_run_config, "model_run_config")
        settings = settings or HostSettings()
        base = base_of(model)
        own_loss = LossFunction(base) if has_loss_function(base) else None
        parts = list(parts)
        if own_loss is not None:
            parts.append(
                ModelPart(path="loss_function", module=own_loss, config=own_loss.run_config())
            )
        layers = [layer for part in parts for layer in layers_of(part.module)]
        host = make_host(name, layers, settings, on_host=list(model.parameters()))
        super().__init__(host, model, model_run_config)
        self._rows = BatchRows(name)
        self._loss = own_loss
        self._backwards = BackwardPasses(host)
        self._parts: dict[str, BatchRunner] = {}
        self._calls: dict[int, Callable[..., Ran]] = {}  # with the settings of the model's call
        kept = KeptInputs()
        for part in parts:
            override = (overrides or {}).get(part.module, _UNSET)
            runner = self._parts[part.path] = self._make_runner(part, kept)
            # What a user has said of this very part beats the rules.
            said = {f.name: None for f in fields(override) if getattr(override, f.name) is not None}
            rules = replace(part.config, **said)
            self._calls[id(part.module)] = self._caller_of(part.module, runner, rules, override)
        self._runners += self._parts.values()
        self.set_original_model(model)

    def _make_runner(self, part: ModelPart, kept: KeptInputs) -> BatchRunner:
        host, layers, backwards = self._host, layers_of(part.module), self._backwards
        first = sum(len(runner.layers) for runner in self._parts.values())
        store = host.store.part(range(first, first + len(layers)))
        planner = host.planner(store, layers, keeps_layers=False)
        return BatchRunner(
            f"{host.name}:{part.path}",
            host,
            layers,
            store,
            # Of its own, because gradients of another part have another layout.
            GradientBuffers(host.memory, host.rules),
            planner,
            SharedMemory(part.path, FreeMemory(planner, store, host.device_states), kept),
            lambda call: backwards.current().add_call(call, store),
        )

    def _caller_of(
        self,
        module: nn.Module,
        runner: BatchRunner,
        rules: RoundPipeRunConfig,
        override: RoundPipeRunConfig,
    ) -> Callable[..., Ran]:
        """What stands for the module's forward. ``rules`` beat the call, which beats ``override``,
        then the model's."""
        # Not self, because an engine that holds itself would outlive its last user.
        rows, below = self._rows, override.over(_for_parts(self._config))
        part, default = PartInputs(runner.name, runner.layers), self.default_num_microbatch
        makes_cache = has_loss_function(module) and takes_use_cache(module)

        def call(
            of_call: RoundPipeRunConfig,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            whole: str | None,
        ) -> Ran:
            _refuse_cache(runner, (args, kwargs))
            if makes_cache:  # a whole model of transformers' inside of another
                kwargs = {"use_cache": False, **kwargs}
            config = rules.over(of_call).over(below)
            is_said = config.split_input is not None or override.num_microbatch is not None
            count = config.num_microbatch or default
            why = None if is_said else whole or rows.why_whole(part, args, kwargs, count)
            if why is None:
                args, kwargs = packed_again((args, kwargs))
            else:
                if count != 1:
                    rows.tell(part, why)
                config = replace(config, num_microbatch=1)
                args, kwargs = merge_deferred((args, kwargs))
            output = runner.forward(args, kwargs, config)
            is_deferred = rules.merge_output is False and isinstance(output, RoundPipePackedData)
            return (defer(output) if is_deferred else output), runner.lost_attributes

        return call

    def __repr__(self) -> str:
        if self.is_closed:
            return f"AutoRoundPipe({self._host.name}, closed)"
        devices = ", ".join(device.name for device in self.devices)
        return (
            f"AutoRoundPipe({self._host.name}, {len(self._parts)} engines on {devices}, "
            f"{self._steps!r})"
        )

    # Running.

    @SignedByModel
    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = _UNSET, **kwargs: Any
    ) -> Any:
        """Runs the model's own forward on the CPU, where inputs are brought, and its parts on
        devices.

        Without grad, pending updates are flushed first. With grad the outputs support
        ``backward()``; that raises RuntimeError if ``step`` ran in between. Each part cuts the
        batch by itself.

        Args:
            args, kwargs: what the model takes; tensors may be anywhere.
            roundpipe_run_config: settings of this call, for every part. Those that describe the
                inputs or layers of one part belong into ``override_config`` of
                `wrap_model_to_roundpipe`.

        Returns:
            What the model returns, on the CPU or on ``output_device``.

        Raises:
            ConfigError: such a setting, a key-value cache, or outputs that transformers collects
                from inside of blocks.
        """
        self._begin("forward()")
        _refuse_what_is_for_one_engine(roundpipe_run_config, "roundpipe_run_config")
        config = roundpipe_run_config.over(self._config)
        with_grad = config.builds_graph
        if with_grad:
            self._store.refuse_hooks()
            last = self._store.layers[-1]  # also to be written back
            self._steps.wait_written_back(last.layer)
        else:
            self._steps.flush()
        _refuse_what_blocks_collect(self.model, kwargs)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to("cpu"), (args, kwargs)
        )
        shell = self._shell(with_grad, _for_parts(roundpipe_run_config))
        self._rows.count = batch_size_of(args, kwargs)
        try:
            with torch.set_grad_enabled(with_grad):
                output = merge_deferred(shell.root(*args, **without_cache(self.model, kwargs)))
            shell.write_back()
        finally:
            shell.close()
        if config.output_device is None:
            return output
        target = torch.device(config.output_device)
        with torch.set_grad_enabled(with_grad):
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(target), output)

    def _shell(self, with_grad: bool, config: RoundPipeRunConfig) -> Shell:
        residents = {}
        for layer in self._store.on_host:
            parameter = layer.uses[0].parameter
            is_plain = with_grad and type(parameter) is nn.Parameter
            residents[id(parameter)] = self._backwards.resident(layer) if is_plain else parameter
        loss = self._loss if self._loss is not None and self._loss.is_usable() else None
        calls: dict[int, EngineCall] = {k: partial(c, config) for k, c in self._calls.items()}
        return Shell(self.model, residents, calls, None if loss is None else calls[id(loss)])

    def forward_backward(self, *_: Any, **__: Any) -> Any:
        """Refuses: what comes between the parts is the model's own code, which cannot be run stage
        by stage.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self._host.name}: a model that is no sequence has no forward_backward(); call "
            "loss = engine(...) and loss.backward(), then step()"
        )

    # What is going on.

    def statistics(self) -> dict[str, Any]:
        """Gives `Engine.statistics`, the number of layers of each part by its name in the model
        (``engines``), and bytes of the weights that are in no part (``cpu_bytes``)."""
        layers = [layer for runner in self._runners for layer in runner.layers]
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        outside = [parameter for parameter in self._store.parameters if id(parameter) not in inside]
        staged = self._store.layers[: -len(self._store.on_host)]
        return Statistics(
            **super().statistics(),
            engines={path: len(runner.layers) for path, runner in self._parts.items()},
            layers=len(staged),
            cpu_bytes=sum(parameter.nbytes for parameter in outside),
            layer_bytes=[layer.num_bytes for layer in staged],
        )


def _refuse_what_is_for_one_engine(config: RoundPipeRunConfig, whose: str) -> None:
    """Raises ConfigError for settings that describe inputs or layers of one engine."""
    for name in ("split_input", "split_label", "merge_output", "execute_plan"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{whose} sets {name}, but this model has several engines with inputs and layers "
                "of their own; give it in override_config for the module it is meant for"
            )


def _for_parts(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """What each part takes from a setting for the whole; outputs move only when the model's own
    code is done."""
    return replace(config, requires_grad=None, output_device=None)


def _refuse_what_blocks_collect(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises for outputs that transformers collects by hooks from inside of blocks, which run on
    devices."""
    config = getattr(base_of(model), "config", None)
    for name in ("output_attentions", "output_router_logits"):
        is_wanted = kwargs.get(name, getattr(config, name, False))
        if is_wanted and any(
            getattr(module, "_can_record_outputs", None) for module in model.modules()
        ):
            raise ConfigError(
                f"{name}=True: what is inside of a block is not collected by its engine; leave it "
                "False"
            )


def without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face model's arguments with its key-value cache off: microbatches would all write
    to one cache."""
    if not takes_use_cache(base_of(model)):
        return kwargs
    if kwargs.get("use_cache") or any(
        kwargs.get(name) is not None for name in ("past_key_values", "cache")
    ):
        raise ConfigError(
            "engines keep no key-value cache; leave out past_key_values and use_cache=True"
        )
    return {**kwargs, "use_cache": False}


def takes_use_cache(model: nn.Module) -> bool:
    """Itself, or a model of transformers' that hands its ``**kwargs`` on to a decoder inside."""
    own = inspect.signature(type(model).forward).parameters
    if "use_cache" in own or not has_loss_function(model):
        return "use_cache" in own
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values())
    kinds = {type(module) for module in model.modules()} if hands_on else set()
    return any("use_cache" in inspect.signature(kind.forward).parameters for kind in kinds)


def _refuse_cache(runner: BatchRunner, inputs: Any) -> None:
    """Raises ConfigError for a key-value cache that the model's own code has made for its
    blocks."""
    cache_utils: Any = sys.modules.get("transformers.cache_utils")
    if cache_utils is None:
        return
    kind = cache_utils.Cache
    if any(
        isinstance(leaf, kind)
        for leaf in pytree.tree_leaves(inputs, lambda value: isinstance(value, kind))
    ):
        raise ConfigError(
            f"{runner.name} was given a key-value cache, to which all microbatches would write; "
            "the model's forward asks for it: have it say use_cache=False"
        )
