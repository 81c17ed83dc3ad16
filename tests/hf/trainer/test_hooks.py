"""The hooks of `Trainer` that we override still exist, with the parameters we know. A new release
fails here first."""

import inspect

import pytest
from transformers import Trainer

from roundpipe_hf import RoundPipeTrainerMixin

OWN = {
    "synchronize",
    "average_over_processes",
    "optim_named_parameters",
    "has_stock_loss",
    "stand_in",
    "precision",
    "call_engine",
    "counted_by_losses",
    "count_again_from",
}
PRIVATE = {
    "_checkpoint_in",
    "_engine",
    "_evaluated",
    "_generate_by_engine",
    "_make_inner_optimizer",
    "_newest_weights",
    "_outputs_device",
    "_predicted",
    "_rest",
    "_rng_file",
    "_run_forward",
    "_run_window",
    "_stand_in_for",
    "_stepped_by",
    "_to_gather",
}
METHODS = {
    name
    for cls in RoundPipeTrainerMixin.__mro__[:-1]
    for name, member in vars(cls).items()
    if inspect.isfunction(member)
}
OVERRIDDEN = sorted(
    name for name in METHODS - OWN if hasattr(Trainer, name) and not hasattr(object, name)
)


def test_there_are_hooks() -> None:
    assert {"training_step", "create_optimizer", "_wrap_model", "_maybe_log_save_evaluate"} <= set(
        OVERRIDDEN
    )


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_parameters_are_those_of_trainer(name: str) -> None:
    """In order; what follows a `*args` of ours is passed on as it is."""
    ours = list(inspect.signature(getattr(RoundPipeTrainerMixin, name)).parameters.values())
    theirs = list(inspect.signature(getattr(Trainer, name)).parameters.values())
    named = [
        parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert named == [parameter.name for parameter in theirs][: len(named)]
    passes_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in ours)
    assert passes_on or len(named) == len([p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD])


def test_every_method_is_a_hook_or_known_to_be_ours() -> None:
    """A hook that Trainer no longer calls would silently do nothing."""
    assert METHODS - set(OVERRIDDEN) - OWN - PRIVATE == {"__init__"}
