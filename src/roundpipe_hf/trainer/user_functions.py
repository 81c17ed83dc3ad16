"""Functions and methods of the user's own, as Trainer is to see them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


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
