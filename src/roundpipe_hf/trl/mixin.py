"""What TRL's trainers with losses of their own share over the pipeline engine.

[Note: TRL's model calls] Their loss runs on whole batches (see loss/whole.py). Besides the model
that it is given it calls ``self.model`` with the adapter off, and a reference model, both with
``fused_lm_head=True``. TRL has patched that argument into their forward; here the patch is replaced
by one that hands such a call to an engine. A call without it, as generation makes them, runs on the
host's weights as ever. The reference model has an engine of its own.
"""

import copy
import functools
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import TrainingArguments

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError

from ..compat import base_model
from ..engine.out_of_memory import Footprint
from ..engine.slot import EngineSlot, has_readable_head
from ..loss.model_call import ModelAnswer, by_name
from ..loss.whole import loss_device
from ..trainer.mixin import RoundPipeTrainerMixin
from .answers import Answers
from .by_name import load_by_name, references_on_host, without_false_warning
from .heads import FusedAnswer, Head, LogitsAnswer
from .refusals import refuse_data_and_model


class TRLMixin(RoundPipeTrainerMixin):
    """Put it before one of TRL's trainers among the bases."""

    # What the trainer's loss asks of the logits; None if it asks for the logits themselves.
    head_fields: tuple[str, ...] | None = None
    ref_model: Any = None
    _ref_slot: EngineSlot | None = None

    def __init__(self, model: Any = None, *others: Any, **kwargs: Any) -> None:
        args = next((one for one in (*others, kwargs.get("args")) if _is_arguments(one)), None)
        if getattr(args, "sync_ref_model", False):
            raise ConfigError(
                f"{type(self).__name__} does not support sync_ref_model: the reference model's "
                "engine would not see what is written to it; leave it out"
            )
        is_named = isinstance(model, str)
        if is_named:
            model = load_by_name(model, args, kwargs)
        self._answers = Answers()
        with references_on_host(args), without_false_warning(type(self), is_loaded=is_named):
            super().__init__(model, *others, **kwargs)
        refuse_data_and_model(self)
        self._route_calls()

    @property
    def answer(self) -> ModelAnswer:  # type: ignore[override]  # chosen anew for every model
        """See [Note: fused head]."""
        return self._answer_of(self.model, self._engine(trains=False))

    def has_stock_loss(self) -> bool:
        """TRL's losses here are of whole batches: pairs, or means over them."""
        return False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, whose metrics are gathered from all processes in it."""
        if self.args.world_size == 1 or not self.model.training:
            return super().compute_loss(*args, **kwargs)
        with self._answers.kept(self.accelerator):
            return super().compute_loss(*args, **kwargs)

    def counted_by_losses(self) -> Any:
        """TRL's metrics until they are logged, the tokens it has seen, and how GRPO adapts its
        entropy's coefficient."""
        self._answers.forget()
        counts = {name: getattr(self, name) for name in _COUNTS if hasattr(self, name)}
        return copy.deepcopy(counts)

    def count_again_from(self, counted: Any) -> None:
        self._answers.give_again()
        for name, value in copy.deepcopy(counted).items():
            setattr(self, name, value)

    def _answer_of(self, model: nn.Module, engine: RoundPipe) -> ModelAnswer:
        if self.head_fields is None:
            return ModelAnswer()
        head = self._head(self.head_fields)
        return FusedAnswer(head) if has_readable_head(model, engine) else LogitsAnswer(head)

    def _head(self, fields: tuple[str, ...]) -> Head:
        return Head(fields=fields)

    def _outputs_device(self, engine: RoundPipe) -> torch.device | None:
        """Where the trainer has its batches, in evaluation, too: TRL brings them there itself."""
        return loss_device(engine)

    def _rest(self) -> None:
        super()._rest()
        if self._ref_slot is not None:
            self._ref_slot.rest()

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Called by TRL's constructor, before ours can go on."""
        refuse_data_and_model(self)
        self._route_calls()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]  # of TRL's

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        device = self._outputs_device(self._engine(trains=False))
        return super().prediction_step(model, to_device(inputs, device), *args, **kwargs)

    # --- calls of the models themselves ---

    def _route_calls(self) -> None:
        """See [Note: TRL's model calls]."""
        if self.head_fields is None:
            return
        _route(self.model, _OnEngine(self, "_call_policy"))
        if self.ref_model is not None and self._ref_slot is None:
            self.ref_model.requires_grad_(False)
            self._ref_slot = EngineSlot()
            _route(self.ref_model, _OnEngine(self, "_call_reference"))

    def _call_policy(self, given: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            engine = self._engine()
            return self.call_engine(engine, given, _PLAIN, loss_device(engine))
        return self._run_forward(None, **given)

    def _call_reference(self, given: dict[str, Any]) -> Any:
        assert self._ref_slot is not None
        engine = self._ref_slot.engine_for(self.ref_model, self.args, trains=False)
        engine.train(self.ref_model.training)
        answer = self._answer_of(self.ref_model, engine)
        with torch.no_grad(), self.precision().in_model():
            config = RoundPipeRunConfig(output_device=self._outputs_device(engine))
            outputs = engine(roundpipe_run_config=config, **answer.arguments(given))
        return answer.outputs(self.precision().finish(outputs), given)


# What TRL's losses add to.
_COUNTS = (
    "_metrics",
    "_total_train_tokens",
    "entropy_coef",
    "_last_world_entropy",
    "_entropy_window_stats",
)
_PLAIN = Footprint(num_microbatch=1, recompute_grain="stage", is_joined=True, keeps_graphs=True)


class _OnEngine:
    """A call of a trainer's, which it does not keep alive."""

    def __init__(self, trainer: TRLMixin, name: str) -> None:
        self._trainer = weakref.ref(trainer)
        self._name = name

    def __call__(self, given: dict[str, Any]) -> Any:
        trainer = self._trainer()
        if trainer is None:
            raise ConfigError("fused_lm_head=True: the trainer of this model is gone")
        return getattr(trainer, self._name)(given)


def _route(model: nn.Module, call: _OnEngine) -> None:
    base = base_model(model)

    @functools.wraps(type(base).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return type(self).forward(self, *args, **kwargs)
        return call(by_name(self, args, kwargs) | {"fused_lm_head": True})

    forward.calls_engine = True  # type: ignore[attr-defined]  # the preset is not to warn of it
    base.forward = types.MethodType(forward, base)


def to_device(values: Any, device: torch.device | None) -> Any:
    """All tensors in ``values`` there; None for where they are."""
    if device is None:
        return values
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)


def _is_arguments(value: Any) -> bool:
    return isinstance(value, TrainingArguments)
