"""The public names. A name appears or goes on purpose, and then here too."""

from importlib.resources import files
from types import ModuleType

import pytest

import roundpipe
import roundpipe.errors
import roundpipe.optim
import roundpipe_hf
import roundpipe_hf.trl

PUBLIC: dict[ModuleType, set[str]] = {
    roundpipe: {
        "AutoRoundPipe",
        "ClosedError",
        "ConfigError",
        "GradScaler",
        "InternalError",
        "ModelExecutePlan",
        "OptimizerCtx",
        "PlanError",
        "RoundPipe",
        "RoundPipeError",
        "RoundPipePackedData",
        "RoundPipeRunConfig",
        "StepHandle",
        "clip_grad_norm_",
        "consolidate_checkpoint",
        "doing_recompute",
        "errors",
        "estimate",
        "get_recompute_data",
        "load_checkpoint",
        "optim",
        "profile",
        "save_checkpoint",
        "save_for_recompute",
        "virtual",
        "wrap_model_to_roundpipe",
    },
    roundpipe.optim: {
        "SGD",
        "Adafactor",
        "Adam",
        "AdamW",
        "GradScaler",
        "LeanAdamW",
        "Lion",
        "Muon",
        "OptimizerCtx",
        "clip_grad_norm_",
    },
    roundpipe_hf: {
        "PipelineArguments",
        "RoundPipeSeq2SeqTrainer",
        "RoundPipeSeq2SeqTrainingArguments",
        "RoundPipeTrainer",
        "RoundPipeTrainerMixin",
        "RoundPipeTrainingArguments",
        "export_gguf",
        "load_pretrained",
        "load_pretrained_mmap",
        "loss_reduction",
        "merge_and_save",
        "stack_experts",
    },
    roundpipe_hf.trl: {
        "RoundPipeDPOConfig",
        "RoundPipeDPOTrainer",
        "RoundPipeGRPOConfig",
        "RoundPipeGRPOTrainer",
        "RoundPipeKTOConfig",
        "RoundPipeKTOTrainer",
        "RoundPipeRLOOConfig",
        "RoundPipeRLOOTrainer",
        "RoundPipeRewardConfig",
        "RoundPipeRewardTrainer",
        "RoundPipeSFTConfig",
        "RoundPipeSFTTrainer",
    },
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_exported_names(package: ModuleType) -> None:
    assert set(package.__all__) == PUBLIC[package]
    assert all(hasattr(package, name) for name in package.__all__)


def test_errors_say_whose_fault_it_is() -> None:
    errors = roundpipe.errors
    assert issubclass(errors.ConfigError, errors.RoundPipeError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.PlanError, errors.RoundPipeError)
    assert issubclass(errors.PlanError, ValueError)
    assert issubclass(errors.ClosedError, errors.RoundPipeError)
    assert issubclass(errors.InternalError, errors.RoundPipeError)


def test_packages_are_typed() -> None:
    for package in (roundpipe, roundpipe_hf):
        assert (files(package) / "py.typed").is_file()
