"""What makes a Trainer run through the pipeline engine: its training step, optimizer, evaluation
and saving.

`trainer.model` stays the Hugging Face model; the engine is only `trainer.model_wrapped`. Everything
else of Trainer is inherited: loop, callbacks, schedulers, data, logging, files. Hooks only; what
they do lives in the other files.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe import AutoRoundPipe, GradScaler, RoundPipe
from roundpipe.errors import ConfigError, PlanError

from .. import compat
from ..arguments import engine_settings_in, losses_on, pipeline_of
from ..engine.optimizer import SAME_BUT_FASTER, PendingNorm, PipelineOptimizer, adopted, unwrapped
from ..engine.refusals import refuse_arguments, refuse_model, refuse_optimizer
from ..engine.slot import EngineSlot, stop_checkpointing
from ..loading import model_for_trainer
from ..loss.round import StashedBatch
from ..quantization.modules import adopt_bitsandbytes, refuse_merging
from .evaluation import on_host
from .figures import StepFigures
from .own_steps import as_own_step
from .saving import SavingMixin
from .tracing import StepTraces
from .user_functions import takes_num_items, without_num_items
from .window import AccumulationWindow

logger = logging.getLogger(__name__)


class RoundPipeTrainerMixin(SavingMixin):
    """Makes a Trainer run through the pipeline. Put it before that class among the bases.

    Takes the Trainer's arguments; ``model`` may also be an engine, or a name or folder to load.

    A Trainer with a loss of its own also says how that loss is fed: ``answer`` if it asks more of
    the model than its outputs, ``has_stock_loss`` if it is known to add up like Trainer's.

    Example:
        >>> class MyTrainer(RoundPipeTrainerMixin, Trainer):
        ...     pass
    """

    optimizer: Any
    _made: torch.optim.Optimizer | None = None  # the optimizer that is this trainer's own

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, str):
            model = model_for_trainer(model, args[0] if args else kwargs.get("args"))
        engine: Any = model if isinstance(model, RoundPipe | AutoRoundPipe) else None
        self._slot = EngineSlot(engine)
        self._window = AccumulationWindow(self)
        self._figures = StepFigures(self)
        self._traces = StepTraces(self)
        self.is_in_loop = False
        super().__init__(model if engine is None else engine.model, *args, **kwargs)

    # --- for users ---

    def optim_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and the pipeline's own copies of the trainable weights, which an optimizer
        has to be made over.

        A copy has its weight's shape and the dtype that ``optim_dtype`` says.
        """
        return iter(self._engine().optim_named_parameters())

    # --- construction ---

    def create_accelerator_and_postprocess(self) -> None:
        """Refuses what cannot be honoured, then does what Trainer does. It is the first thing that
        every Trainer's constructor calls.

        Raises:
            ConfigError: what is not supported, by name.
        """
        refuse_arguments(self.args)
        if isinstance(self.model, type):
            raise ConfigError(
                f"model is the class {self.model.__name__}; give a model that was made of it, or "
                "model_init, a function that returns one"
            )
        if self.model is not None:
            adopt_bitsandbytes(self.model)
            compat.before_merging(self.model, refuse_merging)
        refuse_model(self.model)
        compat.use_one_gpu(self.args)
        unused = engine_settings_in(self.args) if self._slot.is_given else []
        if unused:
            logger.warning(
                "%s: no effect, the model came in an engine that is configured already",
                ", ".join(unused),
            )
        self.scaler = GradScaler() if self.args.fp16 else None
        super().create_accelerator_and_postprocess()
        given = self._slot.current
        if given is not None and given.ranks.count != self.args.world_size:
            raise ConfigError(
                f"the model came in an engine of {given.ranks.count} processes, and the trainer "
                f"runs in {self.args.world_size}; give the engine "
                "process_group=torch.distributed.group.WORLD"
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Accelerate shall move, cast and compile nothing: batches stay in host memory until a
        stage needs them."""
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        built.pop("dynamo_plugin", None)
        loading: Any = built.get("dataloader_config")
        if self.args.world_size == 1 and getattr(loading, "dispatch_batches", False):
            loading.dispatch_batches = None  # Accelerate refuses True where it moves no batches
        return {**built, "device_placement": False, "mixed_precision": "no"}

    def _validate_args(self) -> None:
        super()._validate_args()
        given = self._slot.current
        optimizers = self.optimizer, self.lr_scheduler
        refuse_optimizer(self.args, optimizers, self.optimizer_cls_and_kwargs, given, self.model)
        if not takes_num_items(self.compute_loss):
            # The signature of old releases. Such a loss cannot divide by the window's items, so
            # Trainer divides it by the window's batches, as those releases did.
            self.model_accepts_loss_kwargs = False
            self.compute_loss = without_num_items(self.compute_loss)  # type: ignore[method-assign]
        if type(self).training_step is not RoundPipeTrainerMixin.training_step:
            step = as_own_step(self, self._window, self.training_step)
            self.training_step = step  # type: ignore[method-assign]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays in host memory."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """The engine of the current model, whatever Trainer wrapped before."""
        is_first = self._slot.current is None
        engine = self._engine(trains=training)
        if training:
            stop_checkpointing(self.model)
            theirs = adopted(self.optimizer, engine)
            if theirs is not None:
                self.optimizer = self._stepped_by(engine, theirs)
        elif is_first:  # Trainer reports it where evaluation had to prepare the model
            self.model_preparation_time = round(self._slot.build_seconds, 4)
        return engine

    # --- optimizer ---

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Makes Trainer's optimizer over the pipeline's copies of the weights; made anew if the
        ``model`` was.

        Raises:
            ConfigError: the model has changed, and the optimizer is the caller's own; or nothing of
                the model trains.
        """
        engine = self._engine()
        if not any(True for _ in engine.optim_parameters()):
            raise ConfigError(
                f"nothing trains: all {sum(1 for _ in self.model.parameters())} parameters of "
                f"{type(self.model).__name__} have requires_grad=False. Put adapters on it "
                "(peft.get_peft_model), or let what shall train require a gradient"
            )
        made = unwrapped(self.optimizer)
        if made is None or (isinstance(made, PipelineOptimizer) and made.engine is not engine):
            if made is not None and made.inner is not self._made:
                raise ConfigError(
                    f"the model has changed since its {type(made.inner).__name__} was made, which "
                    "was not by this trainer: make it again over optim_named_parameters() and "
                    "assign it to trainer.optimizer"
                )
            self._made = self._make_inner_optimizer(engine)
            self.optimizer = self._stepped_by(engine, self._made)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _stepped_by(self, engine: RoundPipe, inner: torch.optim.Optimizer) -> PipelineOptimizer:
        is_async = pipeline_of(self.args).async_optimizer
        return PipelineOptimizer(engine, inner, self._window, is_async=is_async, scaler=self.scaler)

    def _make_inner_optimizer(self, engine: RoundPipe) -> torch.optim.Optimizer:
        """The same groups in the same order as Trainer's, so that either can load the other's
        state."""
        decay = set(self.get_decay_parameter_names(self.model))
        masters = dict(engine.optim_named_parameters())
        names = [
            name for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        groups = [
            {
                "params": [masters[n] for n in names if n in decay],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [masters[n] for n in names if n not in decay], "weight_decay": 0.0},
        ]
        cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        inner: torch.optim.Optimizer = SAME_BUT_FASTER.get(cls, cls)(groups, **kwargs)
        return inner

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Returns the param group that has the pipeline's copy of ``param``, a parameter of the
        model or its name; without one, or if none has it, the parameters of each group."""
        if param is not None and self.optimizer is not None:
            names = {id(weight): name for name, weight in self.model.named_parameters()}
            masters = dict(self._engine().optim_named_parameters())
            copy = masters.get(param if isinstance(param, str) else names.get(id(param), ""), param)
            for group in self.optimizer.param_groups:
                if any(copy is held for held in group["params"]):
                    return group
        return super().get_optimizer_group()

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Done in the optimizer's step, where the gradients are."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> PendingNorm:
        optimizer = unwrapped(self.optimizer)
        optimizer.max_grad_norm = self.args.max_grad_norm
        self._window.before_step()
        return PendingNorm(optimizer)

    # --- training ---

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        self._window.forget()
        self._slot.begin(self.model)
        if self._slot.current is not None:  # else they are shared when it is made
            self._slot.share(self.model)
        self.is_in_loop = True
        try:
            with self._figures.of_run(), self._traces.of_run():
                return super()._inner_training_loop(batch_size, *args, **kwargs)
        except BaseException:
            # What was stepped with before counts, and whoever goes on from here has to find it in
            # the model.
            with contextlib.suppress(Exception):
                self.synchronize()
            raise
        finally:
            self.is_in_loop = False
            self._rest()

    @losses_on(None)  # because a step of the user's own may call it
    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Stashes the batch; the last one of the accumulation window trains on all of them in one
        pipeline round.

        ``inputs`` stay in host memory; ``num_items_in_batch`` counts the window's items. Returns a
        0-d tensor, zero for a stashed batch. What Trainer has summed up when the window closes is
        what it would have been.
        """
        model.train()  # first, as Trainer does: GRPO makes its batches by the mode
        inputs = self._prepare_inputs(inputs)
        self._figures.batch(inputs)
        self._window.add(
            StashedBatch(
                inputs,
                on_host(num_items_in_batch),
                compat.divisor_of_losses(self, num_items_in_batch),
                self.accelerator.sync_gradients,
            )
        )
        if self.is_in_loop and not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        *earlier, last = self._run_window()
        for loss in earlier:
            compat.book_loss(self, loss)
        return last

    def counted_by_losses(self) -> Any:
        """Returns what a loss adds to beside gradients, as it is now: metrics, for example."""
        return None

    def count_again_from(self, counted: Any) -> None:
        """Losses run again: what they add to is as it was before.

        Args:
            counted: what ``counted_by_losses`` returned then.
        """

    def _run_window(self) -> list[torch.Tensor]:
        engine = self._engine()
        if self.is_in_loop and unwrapped(self.optimizer).engine is not engine:
            raise self._slot.changed_in_run()
        if self.is_in_loop and not self._window.has_run:
            self._slot.follow_writes(self.model)
        engine.train()
        try:
            losses = self._window.run(engine)
        except PlanError as error:
            if not self.args.auto_find_batch_size:
                raise
            raise torch.OutOfMemoryError(f"Planned to run out of memory. {error}") from error
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            compat.clear_device_cache()
        return [loss.to(self.args.device) for loss in losses]

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        # The epoch ended in the middle of a window: its losses count, as Trainer's do.
        if len(self._window):
            for loss in self._run_window():
                compat.book_loss(self, loss)
        self._traces.step_over()
        will_log = compat.will_log(self)
        if isinstance(grad_norm, PendingNorm):
            # Only now, because reading it waits for the update.
            grad_norm = grad_norm.item() if will_log else None
        will_pause = self.control.should_evaluate or self.control.should_save
        if will_pause:
            self.synchronize()  # both do, but an override may look at weights before they begin
        with self._figures.step(will_log=will_log, will_pause=will_pause):
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """Returns what Trainer's does, which is proportional to the elements of the main input. It
        is asked only once per engine, because it counts parameters, which takes milliseconds."""
        name = getattr(self.model, "main_input_name", "input_ids")
        # A list where the trainer makes batches of its own of what it gets.
        given = inputs.get(name) if isinstance(inputs, Mapping) else None
        compute = super().floating_point_ops
        if self._slot.current is None or not isinstance(given, torch.Tensor) or not given.numel():
            return compute(inputs)
        count = given.numel()
        return count * int(self._slot.noted("flops", lambda: compute(inputs) // count))

    def _prepare_input(self, data: Any) -> Any:
        """Batches stay in host memory."""
        return data
