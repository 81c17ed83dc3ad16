"""Functions and methods of the user's own, as Trainer is to see them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainingArguments

from ..arguments import HOST, losses_on


def takes_num_items(compute_loss: Callable[..., Any]) -> bool:
    parameters = inspect.signature(compute_loss).parameters
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return takes_any or "num_items_in_batch" in parameters


def without_num_items(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute_loss)
    def call(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return compute_loss(*args, **kwargs)

    return call


def with_loss_on(
    args: TrainingArguments, training_step: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A step of the user's own, whose loss may be that of an engine call and so in host memory:
    Trainer adds up losses on the device that it takes for the model's."""

    @functools.wraps(training_step)
    def call(*inputs: Any, **kwargs: Any) -> torch.Tensor:
        with losses_on(HOST):
            loss = training_step(*inputs, **kwargs)
        return loss.to(args.device)

    return call
