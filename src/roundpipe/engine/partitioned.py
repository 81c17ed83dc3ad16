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
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..autoplan.planner import Planned
from ..config import RoundPipeRunConfig
from ..device import Device
from ..errors import ConfigError
from ..microbatch import batch_size_of
from ..microbatch.packed import RoundPipePackedData
from ..params.gradient_memory import GradientBuffers
from ..plan.actions import Passes
from ..plan.execute_plan import RunType
from ..plan.schedule import backward_passes, saved_layers
from ..presets.adapters import base_of
from ..runtime.call import Call
from .base import Engine
from .batches import Batch
from .forwarding import SignedByModel
from .parts.backward_pass import BackwardPasses
from .parts.deferred import defer, merge_deferred, packed_again
from .parts.find import Part, layers_of
from .parts.kept_inputs import KeptInputs
from .parts.loss import LossFunction, has_loss_function
from .parts.shell import Shell, make_shell
from .sequential import RoundPipe, refuse_hooks
from .state import Host, HostSettings

_UNSET = RoundPipeRunConfig()


class AutoRoundPipe(Engine):
    """A model of any shape, of which the parts that are worth it run on devices. Made by
    `wrap_model_to_roundpipe`.

    Train it as any model: ``loss = engine(...)``, ``loss.backward()``, ``engine.step(step_fn)``.
    Parameters outside of parts are trained on the CPU by the same steps.

    Args:
        parts: the modules that run on devices, from `parts.find`.
        overrides: run configs by the module they are for.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        *,
        name: str,
        model_run_config: RoundPipeRunConfig = _UNSET,
        overrides: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
        settings: HostSettings | None = None,
    ) -> None:
        super().__init__()
        _refuse_what_is_for_one_engine(model_run_config, "model_run_config")
        settings = settings or HostSettings()
        losses = [LossFunction(base_of(model))] if has_loss_function(base_of(model)) else []
        modules = [*(part.module for part in parts), *losses]
        layers = [layer for module in modules for layer in layers_of(module)]
        host = Host(layers, settings.choose_devices(), settings, on_host=list(model.parameters()))
        self._take(name, host)
        self._hold(sequence=model)
        self._config = model_run_config
        self._call_settings = _CallSettings(_for_parts(model_run_config))
        self._loss = losses[0] if losses else None
        self._backwards = BackwardPasses(host)
        self._room = KeptInputs()
        self._engines: dict[str, _PartEngine] = {}
        self._calls: dict[int, Callable[..., Any]] = {}
        first = 0
        for part in parts:
            override = (overrides or {}).get(part.module, _UNSET)
            self._add(part, range(first, first + len(layers_of(part.module))), override)
            first += len(layers_of(part.module))
        if self._loss is not None:
            loss = Part(path="loss_function", module=self._loss, config=self._loss.run_config())
            self._add(loss, range(first, first + 1), _UNSET)
        self.set_original_model(model)
        self._seal()

    def _add(self, part: Part, layers: range, override: RoundPipeRunConfig) -> None:
        name = f"{self._name}:{part.path}"
        engine = _PartEngine(name, self._host, layers, part.module, self._backwards, self._room)
        # What a user has said of this very part beats the rules.
        said = {f.name: None for f in fields(override) if getattr(override, f.name) is not None}
        rules = replace(part.config, **said)
        self._engines[part.path] = engine
        self._calls[id(part.module)] = self._caller_of(engine, rules, override)

    def _caller_of(
        self, engine: "_PartEngine", rules: RoundPipeRunConfig, override: RoundPipeRunConfig
    ) -> Callable[..., Any]:
        """What stands for the module's forward. ``rules`` beat the call, which beats ``override``,
        then the model's."""
        settings = (
            self._call_settings
        )  # not self, because an engine that holds itself would outlive its last user

        def call(*args: Any, **kwargs: Any) -> Any:
            _refuse_cache(engine, (args, kwargs))
            args, kwargs = packed_again((args, kwargs))
            config = rules.over(settings.call).over(override).over(settings.model)
            if (
                config.split_input is None
                and override.num_microbatch is None
                and not settings.are_rows(args, kwargs)
            ):
                config = replace(config, num_microbatch=1)
            output = engine(*args, roundpipe_run_config=config, **kwargs)
            is_deferred = rules.merge_output is False and isinstance(output, RoundPipePackedData)
            return defer(output) if is_deferred else output

        return call

    def set_original_model(self, model: nn.Module) -> None:
        """Names parameters as in ``model`` and forwards attributes to it; its parameters must be
        this engine's.

        Raises:
            ConfigError: some parameter of ``model`` is not.
        """
        self._look_at(model)
        for engine in self._engines.values():
            engine._name_layers(model)

    def __repr__(self) -> str:
        if self._is_closed:
            return f"AutoRoundPipe({self._name}, closed)"
        devices = ", ".join(device.name for device in self.devices)
        return (
            f"AutoRoundPipe({self._name}, {len(self._engines)} engines on {devices}, "
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
        """
        self._begin("forward()")
        _refuse_what_is_for_one_engine(roundpipe_run_config, "roundpipe_run_config")
        config = roundpipe_run_config.over(self._config)
        with_grad = (
            torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad
        )
        self._backwards.drop_failed()
        if with_grad:
            refuse_hooks(self._store)
            self._steps.wait_written_back(
                self._store.layers[-1].layer
            )  # which is written back last
        else:
            self._steps.flush()
        _refuse_what_blocks_collect(self.model, kwargs)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to("cpu"), (args, kwargs)
        )
        shell = self._shell(with_grad)
        self._call_settings.call = _for_parts(roundpipe_run_config)
        self._call_settings.rows = batch_size_of(args, kwargs)
        with torch.set_grad_enabled(with_grad):
            output = merge_deferred(shell.root(*args, **_without_cache(self.model, kwargs)))
        shell.write_back()
        if config.output_device is None:
            return output
        target = torch.device(config.output_device)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(target), output)

    def _shell(self, with_grad: bool) -> Shell:
        residents = {}
        for layer in self._store.on_host:
            parameter = layer.uses[0].parameter
            is_plain = with_grad and type(parameter) is nn.Parameter
            residents[id(parameter)] = self._backwards.resident(layer) if is_plain else parameter
        loss = self._loss if self._loss is not None and self._loss.is_usable() else None
        return make_shell(
            self.model, residents, self._calls, None if loss is None else self._calls[id(loss)]
        )

    def forward_backward(self, *_: Any, **__: Any) -> Any:
        """Not there: what comes between the parts is the model's own code, which cannot be run
        stage by stage.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self._name}: a model that is no sequence has no forward_backward(); call loss = "
            "engine(...) and "
            "loss.backward(), then step()"
        )

    # What is going on.

    @property
    def devices(self) -> list[Device]:
        """The devices that parts stage run."""
        return list(self._host.worker_pool.devices)

    @property
    def default_num_microbatch(self) -> int:
        """Microbatches per call of a part where nothing is set: the number of devices + 1."""
        return self._config.num_microbatch or len(self.devices) + 1

    def statistics(self) -> dict[str, Any]:
        """`Engine.statistics`, the layers of each part by its name in the model, and bytes of what
        is in no part."""
        inside = {id(p) for engine in self._engines.values() for p in engine.model.parameters()}
        outside = [parameter for parameter in self._store.parameters if id(parameter) not in inside]
        staged = self._store.layers[: -len(self._store.on_host)]
        return {
            **super().statistics(),
            "engines": {
                path: len(layers_of(engine.model)) for path, engine in self._engines.items()
            },
            "layers": len(staged),
            "cpu_bytes": sum(parameter.nbytes for parameter in outside),
            "layer_bytes": [layer.num_bytes for layer in staged],
        }

    # What `Engine` asks for.

    def _note_step(self, is_async: bool) -> None:
        self._backwards.drop_failed()
        for engine in self._engines.values():
            engine._note_step(is_async)

    def _free_devices(self) -> None:
        for engine in self._engines.values():
            engine._free_devices()


@dataclass
class _CallSettings:
    """What parts are called with: below what the rules say, the settings of the call, and below
    all, the model's.

    ``rows``: of the batch that the model was called with, None if it has none.
    """

    model: RoundPipeRunConfig
    call: RoundPipeRunConfig = _UNSET
    rows: int | None = None

    def are_rows(self, args: Any, kwargs: Any) -> bool:
        """Whether the inputs of a part may be cut along their first dimension. If that is not as
        long as the batch, it may be anything: tokens of all rows together, or the sequence, of
        which no part can be left out."""
        leaves = pytree.tree_leaves((args, kwargs))
        is_cut = any(isinstance(leaf, RoundPipePackedData) for leaf in leaves)
        return is_cut or self.rows is None or batch_size_of(args, kwargs) in (None, self.rows)


class _PartEngine(RoundPipe):
    """The engine of one part. Its host, and with it steps and weights, belong to the whole."""

    def __init__(
        self,
        name: str,
        host: Host,
        layers: range,
        module: nn.Module,
        backwards: BackwardPasses,
        room: KeptInputs,
    ) -> None:
        Engine.__init__(self)
        self._take(name, host)
        self._finalizer.detach()  # because the whole ends the threads
        self._store = host.store.part(layers)
        self._backwards = backwards
        self._room = room
        buffers = GradientBuffers(
            host.memory, host.rules
        )  # because those of another part have another layout
        self._set_up(module, _UNSET, buffers, keeps_layers=False)
        self._seal()

    def _use_newest_weights(self) -> None:
        """The whole has done so; a part that runs without grad inside a forward with grad must not
        move ahead."""

    def _commit(self, call: Call) -> None:
        """Together with all other gradients of the backward pass."""
        self._backwards.current().add_call(call, self._store)

    def _plan(self, run_type: RunType, batch: Batch, *, returns: bool = False) -> Planned:
        """Other parts run between this one's forward and its backward: without room for all, kept
        inputs wait on the host."""
        planned = super()._plan(run_type, batch, returns=returns)
        if run_type == "infer" or self._room.suffices(self._name, planned.needs):
            return planned
        backward = backward_passes(planned.plan.bwd_plan, self._first_trained(batch))
        return planned._replace(spilled=saved_layers(backward))

    def _make_room(self, planned: Planned) -> None:
        """No device states, for the same reason as no residents."""

    def _resident_layers(self, planned: Planned, rounds: Sequence[Passes]) -> frozenset[int]:
        """None, because each part's planner believes that the devices' spare memory is its own."""
        return frozenset()


def _refuse_what_is_for_one_engine(config: RoundPipeRunConfig, whose: str) -> None:
    """Raises ConfigError for settings that describe inputs or layers of one engine."""
    for name in ("split_input", "split_label", "merge_output", "execute_plan"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{whose} sets {name}, but this model has several engines with inputs and layers "
                "of their own; give "
                "it in override_config for the module it is meant for"
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


def _without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face model's arguments with its key-value cache off: microbatches would all write
    to one cache."""
    if not _takes_use_cache(base_of(model)):
        return kwargs
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise ConfigError(
            "engines keep no key-value cache; leave out past_key_values and use_cache=True"
        )
    return {**kwargs, "use_cache": False}


def _takes_use_cache(model: nn.Module) -> bool:
    """Itself, or a model of transformers' that hands its ``**kwargs`` on to a decoder inside."""
    own = inspect.signature(type(model).forward).parameters
    if "use_cache" in own or not has_loss_function(model):
        return "use_cache" in own
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values())
    kinds = {type(module) for module in model.modules()} if hands_on else set()
    return any("use_cache" in inspect.signature(kind.forward).parameters for kind in kinds)


def _refuse_cache(engine: Engine, inputs: Any) -> None:
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
            f"{engine!r} was given a key-value cache, to which all microbatches would write; the "
            "model's forward asks "
            "for it: have it say use_cache=False"
        )
