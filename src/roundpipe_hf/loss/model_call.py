"""What `compute_loss` gets in place of the model: it runs in the worker, after the pipeline has run
the model.

[Note: the model call] The engine runs the forward, and only then `compute_loss`, which expects to
call the model itself. So `compute_loss` is first run up to that call, on the user's thread, to
learn which arguments it passes (`record_call`). The engine runs the model with those, and `Replay`
answers the call in the worker with what came out. That holds only if the call is the same each
time, which `Replay` checks: a batch's tensor must arrive as it was.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from roundpipe.errors import ConfigError
from roundpipe.microbatch.sizes import tensor_leaves

from ..compat import base_model
from ..errors import UnknownModelCall

ComputeLoss = Callable[..., Any]
_NEVER_CALLED = (
    "compute_loss never called the model it was given; the pipeline trains through that call only. "
    "Call its `model` argument, not `self.model`, nor a module of it such as `model.model`"
)


class ModelAnswer:
    """How the pipeline answers the model call of `compute_loss`.

    A Trainer whose loss wants more of the model than its outputs sets one of its own
    (`RoundPipeTrainerMixin.answer`). Shared by workers: to be without state.
    """

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns what the pipeline runs with, of what `compute_loss` calls the model with.

        Raises:
            ConfigError: the call is one of TRL's that only the trainers of `roundpipe_hf.trl`
                answer.
        """
        if "fused_lm_head" in given:
            raise ConfigError(
                "the loss of one of TRL's trainers calls the model with fused_lm_head, which "
                "RoundPipeTrainerMixin does not answer. Put the trainer of roundpipe_hf.trl "
                "(RoundPipeSFTTrainer, RoundPipeDPOTrainer, ...) in place of both among the bases"
            )
        return given

    def outputs(self, outputs: Any, given: Mapping[str, Any]) -> Any:
        """What the call returns, of what the pipeline did. Runs where `compute_loss` does: in
        training on a worker, with gradients."""
        return outputs

    def repeat(self) -> None:
        """`compute_loss` calls the model once more, with what the pipeline ran with; raises unless
        the outputs that are there may answer that, too."""
        raise UnknownModelCall(
            "compute_loss calls the model a second time, and a loss with a loss_reduction gets one "
            "forward. Leave loss_reduction out, and it may call the model as often as it likes"
        )


class LossAnswer(ModelAnswer):
    """For a `compute_loss` that reads nothing but the model's own loss: the presets' last layer
    makes no logits."""

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "skip_logits": True}


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of ``model``, by their names.

    Raises:
        ConfigError: one of them is a model or another module.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, nn.Module | ModelStandIn):
            raise UnknownModelCall(
                f"compute_loss hands the model a module ({value._get_name()}) in place of a batch, "
                "as code does that has put a function of its own into the model's forward. The "
                "pipeline runs the model's layers, not that function: call `model(**inputs)` and "
                "compute the loss of what it returns"
            )
    if not args:
        return kwargs
    called = base_model(model)
    if type(called).forward is nn.Sequential.forward:
        called = called[0]  # because a sequence's engine hands its arguments to the first layer
    return dict(inspect.signature(called.forward).bind_partial(*args).arguments) | kwargs


class ModelStandIn:
    """Answers the model call of `compute_loss`; reads of anything else fall through to the
    model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_name(self) -> str:
        """`Trainer` shifts labels for smoothing by this name, and finds a PEFT model's base by
        isinstance."""
        name: str = base_model(self._model)._get_name()
        return name


class EngineStandIn(ModelStandIn):
    """Runs the call through the engine: for evaluation, where outputs come back whole before
    `compute_loss` goes on."""

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], device: torch.device | None = None
    ) -> None:
        super().__init__(model)
        self._run = run
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where the outputs come to, not the model: a loss brings tensors of its own to it."""
        of_model: Any = self._model.device if self._device is None else self._device
        return torch.device(of_model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(**by_name(self._model, args, kwargs))


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """How `compute_loss` calls the model.

    Args:
        from_batch: argument of the model -> key of the batch it is taken from.
        num_items: argument that gets the number of items in the window, if any.
        constants: arguments that are the same for every batch.
    """

    from_batch: Mapping[str, str]
    num_items: str | None
    constants: Mapping[str, Any]

    def arguments(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """The arguments of the call for one (micro)batch."""
        counted = {} if self.num_items is None else {self.num_items: num_items}
        return (
            {name: inputs[key] for name, key in self.from_batch.items()}
            | counted
            | dict(self.constants)
        )


class Replay(ModelStandIn):
    """Answers the one call with the outputs the pipeline computed. Used by one worker, for one
    microbatch.

    ``expected``: what the pipeline ran with. ``batch``: which of the round's batches the microbatch
    is part of.
    """

    def __init__(
        self,
        model: nn.Module,
        answer: ModelAnswer,
        outputs: Any,
        expected: Mapping[str, Any],
        batch: int,
    ) -> None:
        super().__init__(model)
        self.batch = batch
        self._answer = answer
        self._outputs = outputs
        self._expected = expected
        self._writes = {name: _writes_to(value) for name, value in expected.items()}
        self._is_answered = False

    @property
    def was_called(self) -> bool:
        """Whether the loss has asked."""
        return self._is_answered

    @property
    def device(self) -> torch.device:
        """Where the microbatch is, not the model: a loss brings tensors of its own, class weights,
        say, to it."""
        first, *_ = [*tensor_leaves((self._outputs, dict(self._expected))), self._model]
        return torch.device(first.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = by_name(self._model, args, kwargs)
        if self._is_answered:
            self._answer.repeat()
        self._is_answered = True
        self._check(self._answer.arguments(given))
        return self._answer.outputs(self._outputs, given)

    def _check(self, given: dict[str, Any]) -> None:
        for name in given.keys() | self._expected.keys():
            if (
                name not in given
                or name not in self._expected
                or not _is_same(given[name], self._expected[name])
                or _writes_to(given[name]) != self._writes[name]
            ):
                raise _another(name)


def record_call(
    compute_loss: ComputeLoss, model: nn.Module, inputs: Mapping[str, Any], num_items: Any
) -> ModelCall:
    """Learns how ``compute_loss`` calls the model by running it up to that call ([Note: the model
    call])."""
    copies = copied(inputs)
    try:
        # In a shallow copy of the same type, because `compute_loss` pops what it takes out.
        container: Callable[[Any], Any] = type(inputs)  # dict, BatchEncoding: as Trainer assumes
        compute_loss(_Recorder(model), container(dict(copies)), num_items_in_batch=num_items)
    except _ModelCalled as call:
        for name, value in call.arguments.items():
            if _writes_to(value) and any(value is copy for copy in copies.values()):
                raise _another(name) from None
        return _attribute(call.arguments, copies, num_items)
    raise UnknownModelCall(_NEVER_CALLED)


def refuse_loss(
    loss: Any, *, was_called: bool, is_of_rows: bool = False, is_trained: bool = True
) -> None:
    """Raises for what `compute_loss` returned if nothing can be trained with it.

    Args:
        was_called: whether it has called the model.
        is_of_rows: whether ``loss`` is that of some rows only: of a single one, a value for each
            row has one element as well.
        is_trained: whether a backward follows.
    """
    if not was_called:
        raise ConfigError(_NEVER_CALLED)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"compute_loss returned a {type(loss).__name__}; it must be a tensor")
    if loss.numel() != 1 or (is_of_rows and loss.ndim):
        raise ConfigError(
            f"compute_loss returned {loss.numel()} values of shape {tuple(loss.shape)}; it must be "
            "one number: take their sum or mean"
        )
    if is_trained and not loss.requires_grad:
        raise ConfigError(
            "compute_loss returned a loss without a gradient: it does not depend on what the model "
            "returned, or that was detached"
        )


class _ModelCalled(BaseException):
    """Leaves `compute_loss` at the model call; no `except Exception` on the way stops it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _Recorder(ModelStandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(by_name(self._model, args, kwargs))


def _attribute(arguments: dict[str, Any], inputs: Mapping[str, Any], num_items: Any) -> ModelCall:
    """Finds where each argument came from."""
    from_batch: dict[str, str] = {}
    constants: dict[str, Any] = {}
    counted: str | None = None
    for name, value in arguments.items():
        key = next((key for key in (name, *inputs) if key in inputs and inputs[key] is value), None)
        if value is num_items and value is not None:
            counted = name
        elif key is not None:
            from_batch[name] = key
        elif isinstance(value, torch.Tensor):
            raise UnknownModelCall(
                f"compute_loss hands the model a tensor {name!r} that is not in the batch, and the "
                "forward of a loss with a loss_reduction runs before it. Make it in the data "
                "collator, or leave loss_reduction out"
            )
        else:
            constants[name] = value
    return ModelCall(from_batch=from_batch, num_items=counted, constants=constants)


def _is_same(given: Any, expected: Any) -> bool:
    """Identity for what holds tensors: comparing values would make every worker wait for its
    device."""
    if given is expected:
        return True
    return isinstance(expected, str | int | float | bool | None) and bool(given == expected)


def _another(name: str) -> UnknownModelCall:
    return UnknownModelCall(
        f"compute_loss calls the model with another {name!r} than the pipeline ran with. The "
        "forward of a loss with a loss_reduction runs before it, so it must pass the batch's "
        "tensors on unchanged and call the model the same way each time; change the batch in the "
        "data collator, or leave loss_reduction out"
    )


def _writes_to(value: Any) -> int:
    """How often a tensor was written to in place."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch for a loss that may write to it: it is called more than once for the same batch."""
    copies: dict[str, Any] = tree_map_only(torch.Tensor, torch.clone, dict(inputs))
    return copies
