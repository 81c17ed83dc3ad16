"""The part of the mixin that computes losses and predictions without training. Hooks only."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import Trainer

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.engine.generation import generate_on

from ..arguments import HOST, losses_on
from ..compat import note_rows, refuse_multiplied, returns_loss, should_reduce_batch_size
from ..engine.calls import run_config
from ..engine.out_of_memory import EvaluationOutOfMemory, Footprint
from ..engine.precision import Precision, full_eval_of, precision_of
from ..engine.slot import EngineSlot, runs_by_preset
from ..generation import route_generation
from ..loss.model_call import EngineStandIn, ModelAnswer, ModelStandIn
from ..loss.round import rows_of
from .window import AccumulationWindow

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class EvaluationMixin(_Base):
    model: Any  # wider than Trainer's: never None once it is constructed
    answer: ModelAnswer = ModelAnswer()
    _slot: EngineSlot
    _window: AccumulationWindow
    _full_eval: torch.dtype | None = None  # while an evaluation loop runs in it
    is_in_loop: bool  # while `train()` runs
    _is_evaluating = False

    @property
    def router_loss(self) -> bool | None:
        """True where a loss of TRL's asks for that of the routers; None: as the model's config
        says."""
        return getattr(self, "aux_loss_enabled", False) or None

    def _engine(self, *, trains: bool = True) -> RoundPipe:
        engine = self._slot.engine_for(self.model, self.args, trains=trains)
        route_generation(self.model, self._generate_by_engine)
        return engine

    def _generate_by_engine(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``model.generate`` does, with the newest weights. See [Note: routed generation]."""
        self.synchronize()
        engine: Any = self._slot.current
        if engine is None or engine.model is not model:
            return type(model).generate(model, *args, **kwargs)
        with self.precision().in_model():
            return generate_on(engine, engine.devices[0], *args, **kwargs)

    def synchronize(self) -> None:
        """Waits for the update in flight, if any, and writes it into ``trainer.model``."""
        self._slot.synchronize(self.model, is_in_run=self.is_in_loop)

    def _rest(self) -> None:
        """No run is going on."""
        self._slot.rest()

    def precision(self) -> Precision:
        """Returns the precision that the engine computes in now."""
        dtypes = self._slot.dtypes(self.model)
        return precision_of(self.args, dtypes, full_eval=self._full_eval)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Computes Trainer's loss; where ``model`` is the engine, its call runs through that,
        without gradients."""
        try:
            return super().compute_loss(
                self._stand_in_for(model),
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
            )
        except TypeError as error:
            refuse_multiplied(error)
            raise

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Adds to Trainer's context that outputs come to the host, where it computes the loss."""
        contexts = super().compute_loss_context_manager()
        contexts.enter_context(losses_on(HOST))
        return contexts

    def has_stock_loss(self) -> bool:
        """Returns True if the loss is Trainer's own, so that what is known about that need not be
        asked."""
        owners = {cls for cls in type(self).__mro__ if "compute_loss" in vars(cls)}
        return owners <= {EvaluationMixin, Trainer} and "compute_loss" not in vars(self)

    def stand_in(self, *, num_microbatch: int | None = None) -> EngineStandIn:
        """Makes a model for `compute_loss` whose call runs through the engine, without gradients.

        ``num_microbatch`` microbatches are made of a batch; None lets the engine choose.
        """
        run = functools.partial(self._run_forward, num_microbatch)
        return EngineStandIn(self.model, run, self._outputs_device(self._engine(trains=False)))

    @losses_on(None)  # because it is a loss that calls it
    def _run_forward(self, num_microbatch: int | None, **given: Any) -> Any:
        engine, precision = self._engine(trains=False), self.precision()
        if num_microbatch is None and not runs_by_preset(engine):
            num_microbatch = 1  # because nobody knows how to merge its loss
        arguments = self.answer.arguments(given)

        def attempt(footprint: Footprint) -> Any:
            count = num_microbatch or footprint.num_microbatch
            with precision.in_model():
                config = RoundPipeRunConfig(
                    num_microbatch=count, output_device=self._outputs_device(engine)
                )
                return engine(roundpipe_run_config=config, **arguments)

        outputs = self._window.evaluating(
            engine, attempt, lambda: num_microbatch or rows_of(arguments)
        )
        return self.answer.outputs(precision.finish(outputs), given)

    def _outputs_device(self, engine: RoundPipe) -> torch.device | None:
        """Where a call without gradients puts its outputs: to the host."""

    @losses_on(None)  # because it is a loss that calls it
    def call_engine(
        self,
        engine: RoundPipe,
        given: dict[str, Any],
        footprint: Footprint,
        device: torch.device | None,
    ) -> Any:
        """Runs a call of the model through the engine, as part of the caller's graph.

        Args:
            engine: the engine of the model.
            given: what the model is called with, by name; tensors of shape (rows, ...).
            footprint: how the call uses memory.
            device: where the outputs go; None for the host.
        """
        precision = self.precision()
        config = run_config(engine, footprint, device)
        with precision.in_model():
            outputs = engine(roundpipe_run_config=config, **self.answer.arguments(given))
        return self.answer.outputs(precision.finish(outputs), given)

    def _stand_in_for(self, model: Any) -> Any:
        return (
            self.stand_in()
            if model is self._slot.current and not isinstance(model, ModelStandIn)
            else model
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Predicts one batch, on the newest weights also where no loop of Trainer's calls it. Where
        only the loss is wanted it is computed where the outputs are; else outputs come to the
        host."""
        if self.args.world_size == 1:
            note_rows(self, inputs)
        with contextlib.nullcontext() if self._is_evaluating else self._newest_weights():
            return self._predicted(model, inputs, prediction_loss_only, *args, **kwargs)

    def _predicted(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if prediction_loss_only and model is self._slot.current and returns_loss(self, inputs):
            inputs = self._prepare_inputs(inputs)
            num_items = on_host(self._get_num_items_in_batch([inputs], self.args.device))
            loss = self._window.evaluate(self._engine(trains=False), inputs, num_items)
            if loss is not None:
                return self._to_gather((loss, None, None))
        found = super().prediction_step(
            self._stand_in_for(model), inputs, prediction_loss_only, *args, **kwargs
        )
        return self._to_gather(found)

    def average_over_processes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes each ``.grad`` of ``parameters`` the mean over processes. All call it."""
        if self.args.world_size > 1:
            self._engine().ranks.average(parameters)

    def _to_gather(self, found: Any) -> Any:
        """Where several processes can gather them: their backend may only know tensors of its
        device."""
        if self.args.world_size == 1:
            return found
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.args.device), found)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Runs Trainer's loop on the newest weights. A batch that is too large for a device raises
        an error that says what to lower."""
        with self._newest_weights():
            return self._evaluated(*args, **kwargs)

    @contextlib.contextmanager
    def _newest_weights(self) -> Iterator[None]:
        """An evaluation, or a part of one: of what is in the model, and what comes after it has
        what is there then."""
        self.synchronize()
        self._slot.send_again()  # because PEFT merges adapters through ``.data``
        before, self._is_evaluating = self._is_evaluating, True
        try:
            yield
        finally:
            self._is_evaluating = before
            self._slot.send_again()  # because averaged weights are put back through ``.data``

    def _evaluated(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "model_preparation_time"):
            # Because Trainer subtracts it from every evaluation's time, and it was one's alone.
            self.model_preparation_time = 0.0
        given = self.args.bf16_full_eval, self.args.fp16_full_eval
        if not self.is_in_train:
            self._full_eval = full_eval_of(self.args)
        # Trainer would cast the model for good, and masters with it.
        self.args.bf16_full_eval = self.args.fp16_full_eval = False
        try:
            return super().evaluation_loop(*args, **kwargs)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            raise EvaluationOutOfMemory(str(error), "lower per_device_eval_batch_size") from error
        finally:
            self._full_eval = None
            self.args.bf16_full_eval, self.args.fp16_full_eval = given
            if not self.is_in_loop:
                self._rest()


def on_host(num_items: torch.Tensor | int | None) -> torch.Tensor | int | None:
    return num_items.cpu() if isinstance(num_items, torch.Tensor) else num_items
