"""How a loss comes out of its rows, by rule or by declaration, and never by trying.

[Note: two paths] A loss whose reduction is known runs *fused*: a worker computes it for each
microbatch where the outputs are, and goes backward at once. Known are transformers' causal loss and
label smoothing; that of an encoder with a decoder, where its preset knows it for a mean; a
``compute_loss_func`` that reads ``num_items_in_batch``, which Trainer hands it to divide a sum by;
and what is declared, with `loss_reduction` or as an argument of the training arguments. Every other
loss runs on *whole batches*, as the plain Trainer runs it (see whole.py). That is always right.
Rejected: to call a ``compute_loss`` fused because it takes ``num_items_in_batch``. Most do and
never look at it, and many add a mean to what they divide by it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.presets.calling import reads_parameter

from ..arguments import LossReduction, check_choice, pipeline_of
from ..compat import adds_router_loss, base_model, loss_adds_up, makes_causal_loss, valid_targets
from .round import StashedBatch, rows_of

F = TypeVar("F", bound=Callable[..., Any])


def loss_reduction(reduction: LossReduction) -> Callable[[F], F]:
    """Declares how a loss reduces its rows, so that it runs fused with the pipeline's last stage.

    For a ``compute_loss_func``, or for the ``compute_loss`` of a Trainer class.

    Args:
        reduction: ``"sum"`` for a sum over rows, divided by numbers that are the same for all rows
            of a batch (``num_items_in_batch``); ``"rows"`` for a mean over rows; ``"tokens"`` for a
            mean over the labels that are not -100 (of causal models: shifted labels).

    Raises:
        ConfigError: ``reduction`` is none of these.

    Example:
        >>> @loss_reduction("rows")
        ... def distance(outputs, labels, num_items_in_batch=None):
        ...     return torch.nn.functional.mse_loss(outputs.logits.squeeze(-1), labels)
        >>> trainer = RoundPipeTrainer(model, args, compute_loss_func=distance)
    """
    check_choice("loss_reduction", reduction, get_args(LossReduction))

    def declare(loss: F) -> F:
        loss.loss_reduction = reduction  # type: ignore[attr-defined]  # read by `reduction_of`
        return loss

    return declare


def is_users(trainer: Any) -> bool:
    """Whether the loss is code of the user's."""
    return not trainer.has_stock_loss() or trainer.compute_loss_func is not None


def reduction_of(
    trainer: Any, batches: Sequence[StashedBatch], engine: RoundPipe
) -> LossReduction | None:
    """See [Note: two paths]. None for a loss that runs on whole batches.

    Raises:
        ConfigError: a reduction is declared of a loss that has a router's in it.
    """
    if _has_router_loss(trainer, batches):
        declared = declared_reduction(trainer)
        if declared is not None:
            raise ConfigError(
                f"loss_reduction={declared!r}: a router's auxiliary loss is of all rows together, "
                "so the loss is not reduced like that. Leave loss_reduction out, or leave the "
                "auxiliary loss out (output_router_logits=False in the model's config; with TRL "
                "router_aux_loss_coef=0.0)"
            )
        return None
    if not is_users(trainer):
        known = _stock_reduction(trainer, batches, engine)
        return known or pipeline_of(trainer.args).loss_reduction
    declared = declared_reduction(trainer)
    if declared is not None or not trainer.has_stock_loss():
        return declared
    return "sum" if _has_items(batches) and reads_num_items(trainer.compute_loss_func) else None


def is_known(trainer: Any, batches: Sequence[StashedBatch], engine: RoundPipe) -> bool:
    """Whether the reduction comes from what is known of the libraries' losses, and not from a
    declaration or from the user's code."""
    return not is_users(trainer) and _stock_reduction(trainer, batches, engine) is not None


def _has_router_loss(trainer: Any, batches: Sequence[StashedBatch]) -> bool:
    """Says so not where the loss is code of the user's, which may make it of logits alone. A batch
    may ask for it by itself."""
    if trainer.router_loss is not None:
        return bool(trainer.router_loss)
    if is_users(trainer) or trainer.label_smoother is not None:
        return False
    asked = (batch.inputs.get("output_router_logits") for batch in batches)
    return any(adds_router_loss(trainer.model, one) for one in asked)


def declared_reduction(trainer: Any) -> LossReduction | None:
    """What the user has said of a loss of theirs; the decorator counts more than the argument."""
    own = trainer.compute_loss_func if trainer.has_stock_loss() else trainer.compute_loss
    declared: LossReduction | None = getattr(own, "loss_reduction", None)
    return declared or pipeline_of(trainer.args).loss_reduction


def _stock_reduction(
    trainer: Any, batches: Sequence[StashedBatch], engine: RoundPipe
) -> LossReduction | None:
    averages = trainer.label_smoother is None and engine.averages_labels
    if not (averages or loss_adds_up(trainer)):
        return None
    if _has_items(batches) and not averages:
        return "sum"
    makes_mean = averages or makes_causal_loss(base_model(trainer.model))
    is_mean = trainer.label_smoother is None and makes_mean
    has_labels = all(valid_targets(trainer, batch.inputs) is not None for batch in batches)
    return "tokens" if is_mean and has_labels else None


def _has_items(batches: Sequence[StashedBatch]) -> bool:
    return all(batch.num_items is not None for batch in batches)


def amount_of(trainer: Any, inputs: Mapping[str, Any], reduction: LossReduction) -> float:
    """How much a mean over ``reduction`` counts in a batch.

    Raises:
        ConfigError: the batch has no labels that name tokens.
    """
    if reduction == "rows":
        return float(rows_of(inputs))
    valid = valid_targets(trainer, inputs)
    if valid is None:
        raise ConfigError(
            "loss_reduction='tokens' needs integer 'labels' in every batch, and this one has "
            f"{', '.join(sorted(inputs))}; use 'rows' or 'sum', or leave it out"
        )
    return float(valid.sum())


def reads_num_items(loss: Callable[..., Any]) -> bool:
    """Whether the code of ``loss`` ever reads its parameter ``num_items_in_batch``. What does not
    cannot divide by it."""
    return reads_parameter(loss, "num_items_in_batch")
