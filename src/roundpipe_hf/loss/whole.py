"""Losses of whole batches: `compute_loss` runs as the plain Trainer runs it, once per batch and on
the user's thread, and only the model's forward and backward are the engine's.

So it may call the model as often as it likes and in any way, switch adapters between calls, and
make one loss of all rows.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from roundpipe import RoundPipe

from ..arguments import losses_on
from ..engine.calls import cuts_batches
from ..engine.out_of_memory import Footprint
from .gradients import LossGradients
from .model_call import EngineStandIn, copied, refuse_loss
from .reduction import is_users
from .round import StashedBatch

logger = logging.getLogger(__name__)


class WholeBatchLoss:
    """Used by the user's thread only."""

    def __init__(self, trainer: Any, gradients: LossGradients) -> None:
        self._trainer = trainer
        self._gradients = gradients
        self._has_told = False

    def forget(self) -> None:
        """A new run starts."""
        self._has_told = False

    def forward_backward(
        self, engine: RoundPipe, batch: StashedBatch, footprint: Footprint
    ) -> torch.Tensor:
        """Leaves the gradients of a batch in the engine, and returns its loss, divided as Trainer
        does.

        Raises:
            ConfigError: the loss never called the model, or is no single number with a gradient.
        """
        self._tell(engine)
        trainer = self._trainer
        device = loss_device(engine)
        num_calls = 0

        def run(**given: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return trainer.call_engine(engine, given, footprint, device)

        with losses_on(device), _syncing(trainer.accelerator, batch.syncs):
            loss = trainer.compute_loss(
                EngineStandIn(trainer.model, run, device),
                self._inputs(batch, device),
                num_items_in_batch=batch.num_items,
            )
        refuse_loss(loss, was_called=num_calls > 0)
        share: torch.Tensor = loss / batch.divisor
        scaled = share if trainer.scaler is None else trainer.scaler.scale(share)
        self._gradients.backward(scaled, trainer.model)
        return share.detach()

    def _inputs(self, batch: StashedBatch, device: torch.device) -> Any:
        """The batch for the loss, in a container of its own, because `compute_loss` pops what it
        takes out. What it may write to is a copy, because it runs again where memory runs out."""
        may_write = is_users(self._trainer) and device.type == "cpu"
        given = copied(batch.inputs) if may_write else dict(batch.inputs)
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)
        container: Callable[[Mapping[str, Any]], Any] = type(batch.inputs)
        return container(moved)  # dict, BatchEncoding: as Trainer does

    def _tell(self, engine: RoundPipe) -> None:
        """Once a run."""
        if self._has_told or not isinstance(engine, RoundPipe):
            return
        self._has_told = True
        if is_users(self._trainer) and not self._trainer.router_loss:
            logger.info(
                "the loss is computed on whole batches%s, as the plain Trainer does. If it is a "
                "sum or a mean over rows or tokens, loss_reduction='sum', 'rows' or 'tokens' lets "
                "every microbatch go backward at once",
                "" if cuts_batches(engine) else ", each as one microbatch",
            )


def loss_device(engine: RoundPipe) -> torch.device:
    """Where a loss of whole batches is computed: on the engine's first device."""
    return engine.devices[0].torch_device


@contextlib.contextmanager
def _syncing(accelerator: Any, syncs: bool) -> Iterator[None]:
    """A loss finds `accelerator.sync_gradients` as it was when its batch came, because some losses
    count steps by it."""
    state = accelerator.gradient_state
    before = state.sync_gradients
    state._set_sync_gradients(syncs)
    try:
        yield
    finally:
        state._set_sync_gradients(before)
