"""Makes engines, closes them, and reads weights and gradients back out of them."""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import roundpipe
from tests.support.device_sets import ONE, DeviceSet
from tests.support.models import Batch
from tests.support.reference import Reference, Tensors, weights_of


class Engines:
    """Makes engines and closes them; afterwards no thread of theirs may be left."""

    def __init__(self) -> None:
        self._threads_before = set(threading.enumerate())
        self._made: list[roundpipe.RoundPipe] = []

    def __call__(
        self, model: nn.Module, devices: DeviceSet = ONE, **settings: Any
    ) -> roundpipe.RoundPipe:
        """Wrap a model: a Hugging Face or PEFT model by its preset, anything else as it is."""
        if hasattr(model, "config"):
            from roundpipe.engine.wrap import wrap_model_to_roundpipe

            engine = wrap_model_to_roundpipe(
                model, use_sequential_preset=True, devices=devices.argument, **settings
            )
        else:
            engine = roundpipe.RoundPipe(model, devices=devices.argument, **settings)
        self._made.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.close()
        started = set(threading.enumerate()) - self._threads_before
        left = sorted(thread.name for thread in started if thread.name.startswith("roundpipe"))
        assert not left, f"threads outlived close(): {left}"


def run_batch(
    engine: roundpipe.RoundPipe, batch: Batch, num_microbatch: int | None = None, **settings: Any
) -> Any:
    """`forward_backward` over a batch; `settings` are fields of the run config."""
    return engine.forward_backward(
        batch.args,
        batch.kwargs,
        label=batch.label,
        loss_fn=batch.loss_fn,
        run_config=roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch, **settings),
    )


def train_steps(
    engine: roundpipe.RoundPipe,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    num_microbatch: int,
    *,
    is_async: bool,
) -> list[Tensor]:
    """One `forward_backward` and one `step` per batch; returns the losses."""
    losses = []
    for batch in batches:
        losses.append(run_batch(engine, batch, num_microbatch))
        engine.step(optimizer.step, is_async=is_async)
    return losses


def reference_steps(
    reference: Reference, batches: Iterable[Batch], num_microbatch: int
) -> list[Tensor]:
    """The same training as `train_steps`, without an engine."""
    losses = []
    for batch in batches:
        losses.append(reference.forward_backward(batch.split(num_microbatch), batch.loss_fn))
        reference.step()
    return losses


def engine_weights(engine: roundpipe.RoundPipe) -> Tensors:
    """The original model's parameters, every update in them."""
    engine.synchronize()
    return weights_of(engine.model)


def engine_gradients(engine: roundpipe.RoundPipe) -> Tensors:
    """The accumulated gradients as they appear on the original model's parameters."""
    engine.synchronize()
    return {
        name: p.grad.detach().clone()
        for name, p in engine.model.named_parameters()
        if p.grad is not None
    }
