"""What cannot be honoured is refused by the constructor, naming the option and what to use
instead."""

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import get_constant_schedule

from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.optim import LeanAdamW, Lion
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.engine.refusals import SUPPORTED_OPTIMIZERS, refuse_arguments
from tests.support.models import make_llama
from tests.support.trainers import (
    MODELS,
    assert_same,
    differ,
    make_trainer,
    run,
    token_rows,
    train_both,
    weights,
)

ROWS = token_rows(3)


def refused(message: str, model: Any = None, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(RoundPipeTrainer, model or MODELS["full"](), ROWS, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True, "async_optimizer": True}, "fp16 with async_optimizer.*bf16"),
        (
            {"torch_compile": True, "torch_compile_mode": "max-autotune"},
            "torch_compile_mode='max-autotune'",
        ),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, "activation offloading"),
        ({"debug": "underflow_overflow"}, "debug='underflow_overflow'.*leave it out"),
    ],
)
def test_arguments(settings: dict[str, Any], message: str) -> None:
    refused(message, **settings)


def test_adapters_that_peft_ties() -> None:
    """It makes the head's of the embedding's memory, transposed; each was trained for itself."""
    config = LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)
    model = get_peft_model(make_llama(tied=True), config)
    message = "lora_A.*lies in the memory of .*lora_embedding_B.*ensure_weight_tying"
    with pytest.raises(ConfigError, match=message):
        make_trainer(RoundPipeTrainer, model, ROWS).train()


def test_a_class_is_no_model() -> None:
    with pytest.raises(ConfigError, match="model is the class Linear; give a model that was made"):
        RoundPipeTrainer(torch.nn.Linear, train_dataset=ROWS)  # type: ignore[arg-type]


def test_a_model_of_which_nothing_trains_is_refused_before_its_first_step() -> None:
    """Its first backward ended in autograd's "element 0 of tensors does not require grad"; it can
    still be evaluated."""
    model = MODELS["full"]().requires_grad_(False)
    trainer = make_trainer(RoundPipeTrainer, model, ROWS)
    assert trainer.evaluate(ROWS)["eval_loss"] > 0
    with pytest.raises(ConfigError, match="nothing trains: all .* have requires_grad=False"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deepspeed", "ds.json", "deepspeed.*leave it out"),
        ("fsdp", "full_shard", "fsdp.*leave it out"),
        ("parallelism_config", object(), "parallelism_config"),
        ("activation_offloading", True, "activation offloading"),
        (
            "use_liger_kernel",
            True,
            "fused loss.*set liger_kernel_config={'fused_linear_cross_entropy': False}",
        ),
    ],
)
def test_arguments_that_need_what_is_not_installed(name: str, value: Any, message: str) -> None:
    args = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS).args
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=message):
        refuse_arguments(args)


def test_dispatched_batches_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """They were refused, though nothing is dispatched there."""
    settings: Any = {"accelerator_config": {"dispatch_batches": True}}
    with caplog.at_level(logging.INFO, "roundpipe_hf"):
        assert_same(train_both(MODELS["full"], ROWS, **settings))
    assert "dispatch_batches: no effect in one process" in caplog.text


@pytest.mark.parametrize(
    ("optim", "why"),
    [
        ("galore_adamw", "hooks"),
        ("apollo_adamw_layerwise", "hooks"),
        ("lomo", "inside backward"),
        ("schedule_free_adamw", "swaps weights"),
        ("adamw_bnb_8bit", "state on a GPU"),
        ("paged_lion_32bit", "pages its state"),
        ("stable_adamw", "nobody has tried"),
    ],
)
def test_optimizers(optim: str, why: str) -> None:
    refused(f"optim='{optim}': .*{why}.*Use one of .*adamw_torch_fused", optim=optim)
    assert optim not in {supported.value for supported in SUPPORTED_OPTIMIZERS}


@pytest.mark.parametrize(
    ("cls", "settings"), [(Lion, {}), (LeanAdamW, {"moments": "8bit"})], ids=["lion", "8bit"]
)
def test_optimizers_that_are_named_instead(cls: Any, settings: dict[str, Any]) -> None:
    """They train, as the message says."""
    given = (cls, {"lr": 1e-3} | settings)
    trainer = run(
        make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, optimizer_cls_and_kwargs=given)
    )
    before = {name: value.detach() for name, value in MODELS["full"]().named_parameters()}
    assert differ(weights(trainer), before)
    assert type(trainer.optimizer.optimizer.inner) is cls


def test_optimizers_that_cannot_be_moved_to_the_copies() -> None:
    """They would train nothing, or lose what they keep."""
    model = MODELS["full"]()
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    model.zero_grad()
    remedy = ".*optimizer_cls_and_kwargs.*engine.optim_parameters()"
    refused(f"SGD has been stepped{remedy}", model, optimizers=(stepped, None))
    elsewhere = torch.optim.SGD(MODELS["full"]().parameters(), lr=0.1)
    refused(f"SGD is over tensors that are no param{remedy}", model, optimizers=(elsewhere, None))
    cached = torch.optim.LBFGS(model.parameters())
    refused(f"LBFGS keeps .* in ._params as well{remedy}", model, optimizers=(cached, None))
    schedule = get_constant_schedule(stepped)
    refused("lr_scheduler_type", model, optimizers=(None, schedule))
    with wrap_model_to_roundpipe(model, devices=1) as engine:
        refused("engine.optim_parameters()", engine, optimizers=(stepped, None))


class StepOfTheModelItself(RoundPipeTrainer):
    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss: torch.Tensor = self.model(**inputs).loss
        loss.backward()
        return loss.detach()


class StepOfNothing(RoundPipeTrainer):
    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        return torch.tensor(0.0)


@pytest.mark.parametrize("async_optimizer", [False, True])
def test_a_training_step_past_the_pipeline(async_optimizer: bool) -> None:
    """Losses were logged as ever, and nothing was trained. A step that leaves a batch out is none
    of that."""
    with pytest.raises(ConfigError, match="call the model it is given, not self.model"):
        run(
            make_trainer(
                StepOfTheModelItself, MODELS["full"](), ROWS * 3, async_optimizer=async_optimizer
            )
        )
    run(make_trainer(StepOfNothing, MODELS["full"](), ROWS, async_optimizer=async_optimizer))


def test_models_that_lie_on_devices() -> None:
    model = MODELS["full"]()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    refused("device_map.*device_map=None", model)


def test_quantized_models() -> None:
    model = MODELS["full"]()
    model.hf_quantizer = object()
    with pytest.raises(
        ConfigError, match="weights that transformers holds quantized.*load_pretrained"
    ):
        make_trainer(RoundPipeTrainer, model, ROWS)


def test_prompt_learning_adapters() -> None:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    refused(
        "prompt-learning adapter 'default'.*LoRA", get_peft_model(make_llama(tied=False), config)
    )


def test_models_made_later_are_checked_too() -> None:
    def prompted() -> Any:
        config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
        return get_peft_model(make_llama(tied=False), config)

    trainer = make_trainer(RoundPipeTrainer, None, ROWS, model_init=prompted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompt-learning"):
        run(trainer)
