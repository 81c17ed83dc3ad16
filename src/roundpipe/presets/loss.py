"""A model's own loss, called in the last layer. The rule it serves: the losses of microbatches *add
up*.

A mean over the batch becomes a sum over microbatches by dividing each by the *batch's* count: given
as ``num_items_in_batch`` where the loss takes it, else by weighting each microbatch's own mean
(``loss_weight``).
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..layers.modes import has_hooks
from ..microbatch import merge
from .calling import reads_parameter

_LOSS_KWARGS = ("num_items_in_batch", "shift_labels", "ignore_index", "readout")


class Loss:
    """The model's ``loss_function`` as it is when called, so that assigning another one takes
    effect.

    Not a module, on purpose: a last layer that registered the model would own every layer's
    parameters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """What the model calls with logits and labels."""
        function: Callable[..., torch.Tensor] = self._model.loss_function
        return function

    def takes_num_items(self) -> bool:
        """Whether the loss can be told by how much to divide (every loss of transformers for causal
        LMs can): one that names the parameter and never reads it cannot."""
        takes = "num_items_in_batch" in inspect.signature(self.function).parameters
        return takes and reads_parameter(self.function, "num_items_in_batch")

    def heeds_num_items(self) -> bool:
        """Tells if the loss divides by the number that it is given, as does one that hands its
        ``**kwargs`` on, to a loss of transformers, say."""
        named = inspect.signature(self.function).parameters.values()
        rest = [one.name for one in named if one.kind is inspect.Parameter.VAR_KEYWORD]
        return self.takes_num_items() or any(reads_parameter(self.function, one) for one in rest)

    def is_token_mean(self) -> bool:
        """Whether it is transformers' own for causal language models: the mean cross-entropy of
        shifted labels."""
        return self.function is ForCausalLMLoss


def chunked(
    hidden_states: torch.Tensor, head: Any, labels: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """What `ForCausalLMLoss` makes of ``head(hidden_states)``, a plain linear layer, without making
    all the logits."""
    ignored = kwargs.get("ignore_index", -100)
    targets = kwargs.get("shift_labels")
    if targets is None:
        targets = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    items = kwargs.get("num_items_in_batch")
    return linear_cross_entropy(
        hidden_states,
        head.weight,
        targets,
        head.bias,
        ignore_index=ignored,
        num_items_in_batch=targets.ne(ignored).sum() if items is None else items,
    )


def is_plain_linear(head: nn.Module) -> bool:
    """Whether its weight is all there is to it: no adapter, no hook, no patched forward."""
    return type(head) is nn.Linear and not has_hooks(head) and "forward" not in vars(head)


def weighted(
    logits: torch.Tensor, weight: float | None, loss: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """``loss`` times the microbatch's share of a mean over the batch; as it is if None, because
    then it adds up."""
    if weight == 0.0:  # a mean over nothing is nan, and nan times zero too
        return logits.float().sum() * 0.0
    return loss() if weight is None else loss() * weight


def take_loss_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Moves what only the loss reads out of ``kwargs``: blocks ignore it, and compiled ones would
    recompile for it."""
    return {name: kwargs.pop(name) for name in _LOSS_KWARGS if name in kwargs}


def merge_outputs(outputs: Sequence[Any], rows: Sequence[int], apart: Collection[str] = ()) -> Any:
    """Logits (or what else there is) row by row; the losses' sum, which `split_batch` or the caller
    made exact. What is named in ``apart`` is left out where there are several."""
    if len(outputs) == 1:
        return outputs[0]
    losses = [output.loss for output in outputs if output.loss is not None]
    by_row = {
        name: merge([output[name] for output in outputs], rows)
        for name in outputs[0]
        if name != "loss" and name not in apart
    }
    return type(outputs[0])(loss=sum(losses[1:], losses[0]) if losses else None, **by_row)
