"""What users touch: a model whose state lives on the host, and whose layers run on devices."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..autoplan.free_memory import FreeMemory
from ..autoplan.planner import Planner
from ..config import RoundPipeRunConfig
from ..device.choose import DeviceSpec
from ..memory.pinning import PinMode
from ..plan.costs import LayerCosts, Workload
from ..plan.execute_plan import ModelExecutePlan, RunType
from ..presets.preset import SplitForward, split_by_rule
from ..runtime.autograd import when_pass_ends
from ..runtime.call import LossFn
from ..trace.table import Statistics
from .base import Engine, call_site, check_model
from .batches import (
    Batch,
    CutMicrobatches,
    GivenMicrobatches,
    in_one_microbatch,
    marked_as_run,
    outputs_as_loss,
)
from .device_memory import OwnMemory
from .forwarding import SignedByModel
from .parts.find import layers_of
from .runner import BatchRunner, Request, Results
from .state import ComputeDtype, HostSettings, make_host

_UNSET = RoundPipeRunConfig()


class RoundPipe(Engine):
    """Runs and trains ``model`` with its state in host memory and its layers running on devices in
    turn.

    Args:
        model: an ``nn.Sequential`` (one layer per child) or any module (a single layer), on the
            CPU.
        optim_dtype: dtype of the optimizer's own copies (masters); None means each parameter's
            dtype.
        name: shown in logs, traces and errors; default ``file.py:line`` of the caller.
        model_run_config: settings of every call, below what a call sets itself.
        pin_model: ``"alloc"`` moves weights to page-locked memory, ``"register"`` page-locks them
            in place (clone a slice of one before you copy it to a device yourself), ``"off"``
            leaves them alone (memory-mapped ones in their file) and sends them through a small
            page-locked ring.
        devices: None for every visible accelerator, else one virtual CPU device; an int for
            the first so many accelerators, or that many virtual devices where there are none; or a
            list of devices, such as ``roundpipe.virtual(2)``. With a ``process_group`` and no list
            the visible accelerators are shared out by ``LOCAL_RANK``.
        compile: compile each repeated layer class once with ``torch.compile``.
        grad_dtype: what gradients offload in on the host; None means each parameter's dtype.
        max_gpu_memory: what the engine keeps under on each device, as ``"24GB"``, ``"900MiB"`` or a
            number of GB; a virtual device has no more.
        max_host_memory: what the process stays under in host memory, in the same form, as far as
            that is for speed only: no second working copies, and fewer inputs that wait there, for
            which plans recompute more. Less than weights, masters and gradients take is refused.
        process_group: a group of torch.distributed's, such as ``dist.group.WORLD``, whose processes
            each make this engine and train together: gradients are summed over them before each
            step, and each has a share of the optimizer's state; see `docs/scale-out.md`.
        optimizer_state_dir: a folder on a disk where masters and the optimizer's state lie in a
            file instead of in memory, for as long as the engine is there; see `docs/optimizers.md`.
        compute_dtype: ``"fp8"`` has the blocks' linear layers multiply in fp8, faster and less
            exact; see `docs/internals/fp8.md`.
        cuda_graphs: whether layers that stay on a GPU queue their kernels as CUDA graphs, which is
            what small steps wait for. None for blocks of transformers, torch and PEFT alone; True
            says that the layers do nothing but compute; see `docs/internals/device-graphs.md`.

    Raises:
        ConfigError: a bad setting, a model without parameters, weights that cannot be staged, a
            folder that cannot be written or has too little room, or fp8 where there is none.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with RoundPipe(model, devices=2) as engine:
        ...     optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        ...     x, y = torch.randn(8, 4), torch.randn(8, 1)
        ...     loss = engine.forward_backward(
        ...         (x,), label=y, loss_fn=lambda out, y: ((out - y) ** 2).sum() / 8
        ...     )
        ...     handle = engine.step(optimizer.step, is_async=False)
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = _UNSET,
        pin_model: PinMode = "alloc",
        *,
        devices: DeviceSpec = None,
        compile: bool = False,
        grad_dtype: torch.dtype | None = None,
        max_gpu_memory: str | float | None = None,
        max_host_memory: str | float | None = None,
        process_group: Any = None,
        optimizer_state_dir: str | os.PathLike[str] | None = None,
        compute_dtype: ComputeDtype | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        check_model(model)
        settings = HostSettings(
            process_group=process_group,
            optim_dtype=optim_dtype,
            pin_model=pin_model,
            devices=devices,
            compile=compile,
            grad_dtype=grad_dtype,
            max_gpu_memory=max_gpu_memory,
            max_host_memory=max_host_memory,
            optimizer_state_dir=optimizer_state_dir,
            compute_dtype=compute_dtype,
            cuda_graphs=cuda_graphs,
        )
        layers, name = layers_of(model), name if name is not None else call_site()
        host = make_host(name, layers, settings)
        super().__init__(host, model, model_run_config)
        steps, planner = host.steps, host.planner(host.store, layers, keeps_layers=True)
        self._runner = BatchRunner(
            name,
            host,
            layers,
            host.store,
            host.buffers,
            planner,
            OwnMemory(FreeMemory(planner, host.store, host.device_states), host),
            lambda call: when_pass_ends(lambda: steps.commit(call)),
        )
        self._runners.append(self._runner)
        self.set_original_model(model)

    def __repr__(self) -> str:
        if self.is_closed:
            return f"RoundPipe({self._host.name}, closed)"
        devices = ", ".join(device.name for device in self.devices)
        return (
            f"RoundPipe({self._host.name}, {len(self._store.layers)} layers on {devices}, "
            f"{self._steps!r})"
        )

    # Running.

    @SignedByModel
    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = _UNSET, **kwargs: Any
    ) -> Any:
        """Splits the inputs, runs the pipeline and merges the outputs.

        Without grad, pending updates are flushed first. With grad the outputs support
        ``backward()``; that raises RuntimeError if ``step`` ran in between.

        Args:
            args, kwargs: what the original model takes. Tensors may be anywhere; those whose first
                dimension is as long as the batch, (rows, ...), are cut along it, everything else
                goes to every microbatch.
            roundpipe_run_config: settings of this call.

        Returns:
            What the model returns, its tensors joined along their first dimension, (rows, ...),
            and tensors without one averaged, each by the rows of its microbatch; on
            ``output_device``.
        """
        self._begin("forward()")
        config = roundpipe_run_config.over(self._config)
        if not config.builds_graph:
            self._steps.flush()  # because evaluation is never stale
        return self._runner.forward(args, kwargs, config)

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | None = None,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = _UNSET,
        *,
        microbatches: GivenMicrobatches | CutMicrobatches | None = None,
        is_last: bool = False,
    ) -> Any:
        """Runs every microbatch forward, through ``loss_fn(outputs, label)``, and backward.

        Args:
            input_args, input_kwargs: what the first layer is called with, whole. Tensors of shape
                (rows, ...) are cut along their first dimension, as `forward` does.
            label: what ``loss_fn`` gets beside the outputs, (rows, ...) likewise; a container of
                tensors may be one.
            loss_fn: called once per microbatch, on a worker thread and with tensors of its device;
                returns a 0-d tensor or a sequence of such. Default: the outputs are the loss. Once
                more if the call is made again because a device was out of memory.
            return_outputs: return the outputs too.
            run_config: settings of this call.
            microbatches: ``(args, kwargs, label)`` for each microbatch, in place of the batch: they
                are split already, and need not have the same shapes. Or a function that gives them
                for a number of microbatches: it is asked for more where a device runs out of
                memory, so it says that the sum of losses stays the same.
            is_last: no gradients are to come any more before the next ``step``. In a process group
                they are then added up while the backward runs; where it turns out not to be so,
                once more in the step. Changes no number.

        Returns:
            The **sum** of the microbatches' losses, a detached 0-d CPU tensor (a list if
            ``loss_fn`` returns a sequence); with ``return_outputs`` a pair of that and the merged
            outputs. A mean over the batch divides by the batch's rows or tokens in ``loss_fn``.
            Returns once these are known: remaining backward stage runs run on, and what fails there
            is raised by the next call.

        Where only all rows together have a loss (the auxiliary one of routers), all microbatches go
        forward before the first goes backward; with a ``loss_fn`` the batch is one microbatch.

        Raises:
            What a layer or ``loss_fn`` raised, with a note that says where. The call then has had
            no effect.

        Example:
            >>> def loss_fn(logits, labels):  # (rows, tokens, vocabulary), (rows, tokens)
            ...     summed = nn.functional.cross_entropy(
            ...         logits.flatten(0, 1), labels.flatten(), reduction="sum"
            ...     )
            ...     return summed / num_tokens  # of the whole batch
            >>> loss = engine.forward_backward((ids,), label=labels, loss_fn=loss_fn)
        """
        request = Request(
            what="forward_backward()",
            run_type="fused",
            loss_fn=loss_fn,
            returns_outputs=return_outputs,
            only_loss=loss_fn is None and not return_outputs,
            is_last=is_last,
        )
        self._begin(request.what)
        results = self._run(request, input_args, input_kwargs, label, run_config, microbatches)
        return tuple(results) if return_outputs else results.losses

    def forward_loss(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | None = None,
        run_config: RoundPipeRunConfig = _UNSET,
        *,
        microbatches: GivenMicrobatches | CutMicrobatches | None = None,
    ) -> Any:
        """The losses of ``forward_backward`` without its backward, at the newest weights: for
        evaluation.

        Outputs stay on their device and are dropped after ``loss_fn``. Takes (``input_args``,
        ``input_kwargs``, ``label``, ``loss_fn``, ``run_config``, ``microbatches``) and returns what
        ``forward_backward`` does. Waits for pending updates first.
        """
        request = Request(
            what="forward_loss()",
            run_type="infer",
            loss_fn=loss_fn,
            returns_outputs=False,
            only_loss=loss_fn is None,
        )
        self._begin(request.what)
        self._steps.flush()
        return self._run(request, input_args, input_kwargs, label, run_config, microbatches).losses

    def _run(
        self,
        request: Request,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        label: Any,
        config: RoundPipeRunConfig,
        microbatches: GivenMicrobatches | CutMicrobatches | None,
    ) -> Results:
        config, default = config.over(self._config), self.default_num_microbatch
        count, cut = config.num_microbatch or default, config.split_input
        if (
            microbatches is None
            and count > 1
            and isinstance(cut, SplitForward)
            and cut.is_joint(args, kwargs)  # it has a loss that no sum over microbatches gives
        ):
            if request.loss_fn is None:
                return self._run_jointly(request, args, kwargs, config)
            config = in_one_microbatch(config)
        batch = Batch.of(args, kwargs, label, microbatches, default, config)
        return self._runner.run(batch, replace(request, loss_fn=request.loss_fn or outputs_as_loss))

    def _run_jointly(
        self,
        request: Request,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        config: RoundPipeRunConfig,
    ) -> Results:
        """All microbatches go forward before the first goes backward, if any does."""
        trains = request.run_type == "fused"
        config = replace(config, requires_grad=trains)
        only_loss = not request.returns_outputs
        outputs = self._runner.forward(args, kwargs or {}, config, only_loss=only_loss)
        if not trains:
            return Results(outputs.loss.cpu(), None)
        outputs.loss.backward()
        loss = marked_as_run(outputs.loss.detach().to("cpu", copy=True))
        if only_loss:
            return Results(loss, None)
        return Results(loss, tree_map_only(torch.Tensor, torch.Tensor.detach, outputs))

    def split_rows(self, inputs: Mapping[str, Any], num_microbatch: int) -> list[dict[str, Any]]:
        """Cuts what a forward is given by name as a call would, without a look at losses.

        Args:
            inputs: tensors of shape (rows, ...), and images, which go with their rows where the
                model has a preset that knows whose they are.
            num_microbatch: how many parts there are to be; fewer where there are fewer rows.

        Returns:
            The parts in order, each with the names of ``inputs``.

        Raises:
            ConfigError: images and their placeholders differ.
        """
        how = self._config.split_input
        if isinstance(how, SplitForward):
            return how.split_rows(how.model, dict(inputs), num_microbatch)
        return split_by_rule(None, dict(inputs), num_microbatch)

    @property
    def averages_labels(self) -> bool:
        """True if the model's own loss is known to be a mean over its labels that are not -100."""
        how = self._config.split_input
        return isinstance(how, SplitForward) and how.averages_labels

    # What is going on.

    @property
    def planner(self) -> Planner:
        """Costs and limits that plans are made from."""
        return self._runner.planner

    def planning_problem(self, run_type: RunType) -> tuple[LayerCosts, Workload]:
        """Gives the costs of the layers and of a round of ``default_num_microbatch`` microbatches,
        by what is known now, in milliseconds and bytes.

        ``run_type`` is as in `ModelExecutePlan.auto`, which calls this.
        """
        return self._runner.planner.problem(run_type, self.default_num_microbatch)

    @property
    def execute_plan(self) -> ModelExecutePlan:
        """The plan that ``forward_backward`` uses by default. It changes as layers are measured."""
        grain = self._config.recompute_grain or "stage"
        return self._runner.planner.next_plan(
            "fused", self.default_num_microbatch, self._config.execute_plan, grain=grain
        )

    def statistics(self) -> dict[str, Any]:
        """Gives `Engine.statistics`, and the number of ``layers`` with the ``layer_bytes`` of each
        on a device."""
        return Statistics(
            **super().statistics(),
            layers=len(self._store.layers),
            layer_bytes=[layer.num_bytes for layer in self._store.layers],
        )
