"""A Hugging Face model's ``loss_function`` as a layer, so that it runs where the logits can be
afforded."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...config import RoundPipeRunConfig
from ...microbatch import split


class LossFunction(nn.Module):
    """Calls the loss that transformers gave ``model``. Has no parameters.

    One that the user has assigned is not called here: it may need what is only on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Not registered, because the model's parameters are not this layer's.
        self.__dict__["_owner"] = model

    def is_usable(self) -> bool:
        """Whether the model still has the loss of its class."""
        return "_loss_function" not in vars(self.__dict__["_owner"])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = self.__dict__["_owner"].loss_function(*args, **kwargs)
        return loss

    def run_config(self) -> RoundPipeRunConfig:
        """A batch is cut only if its loss is a sum over rows: when the caller says by how much to
        divide it."""
        return RoundPipeRunConfig(split_input=self._split, merge_output=_sum)

    def _split(self, args: Any, kwargs: Any, count: int) -> tuple[list[Any], list[Any]]:
        name, loss = "num_items_in_batch", self.__dict__["_owner"].loss_function
        adds_up = kwargs.get(name) is not None and name in inspect.signature(loss).parameters
        parts = split(args, kwargs, None, count if adds_up else 1).inputs
        return [part[0] for part in parts], [part[1] for part in parts]


def has_loss_function(module: nn.Module) -> bool:
    """Whether it is of a class of transformers' that calls ``self.loss_function``."""
    return isinstance(getattr(type(module), "loss_function", None), property)


def _sum(losses: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return sum(losses[1:], losses[0])
