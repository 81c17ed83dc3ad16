"""Every architecture with a preset trains, logs and evaluates through the trainer as it does in the
plain one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import EvalPrediction

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from tests.support.preset_models import VOCABULARY, images, make_model, make_vit
from tests.support.trainers import assert_same, logged, make_trainer, token_rows, train_both

LANGUAGE = ["qwen2-window", "qwen3", "gpt2"]
# 7 batches of 2 rows: windows of 3, 3 and 1.
TOKENS = [
    {name: column.clamp(max=VOCABULARY - 1) for name, column in row.items()}
    for row in token_rows(14)
]
IMAGES = [
    dict(zip(("pixel_values", "labels"), row, strict=True))
    for row in zip(*images(14).values(), strict=True)
]


def most_likely(logits: Any, _: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "eval_strategy": "epoch",
    "compute_metrics": accuracy,
    "preprocess_logits_for_metrics": most_likely,
    "include_num_input_tokens_seen": "all",
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}


def with_lora(model: Any, targets: list[str]) -> nn.Module:
    """B starts random: with B = 0 every gradient of A would be zero."""
    config = LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out="c_attn" in targets
    )
    return get_peft_model(model, config)


def maker(name: str, *, lora: bool) -> Callable[[], nn.Module]:
    make = make_vit if name == "vit" else lambda: make_model(name)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    return (lambda: with_lora(make(), targets)) if lora else make


QUICK = [("qwen3", True), ("gpt2", False), ("vit", True)]
MIXTURES = [("gpt-oss", False), ("qwen3-moe", False)]
OTHERS = [
    pytest.param(name, lora, marks=pytest.mark.slow)
    for name, lora in [
        *((name, lora) for name in [*LANGUAGE, "vit"] for lora in (False, True)),
        *MIXTURES,
    ]
    if (name, lora) not in QUICK
]


@pytest.mark.parametrize(("name", "lora"), [*QUICK, *OTHERS])
def test_same_as_plain(name: str, lora: bool) -> None:
    """Losses, norms, rates, metrics, keys, token counts and weights, with accumulation and a short
    window."""
    rows = IMAGES if name == "vit" else TOKENS
    assert_same(train_both(maker(name, lora=lora), rows, eval_dataset=rows[:5], **SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_losses_that_are_means(problem: str) -> None:
    """Heads whose losses take the number of items and ignore it; smoothing is given up for several
    labels at once."""
    rows = [
        {
            "pixel_values": row["pixel_values"],
            "labels": nn.functional.one_hot(row["labels"], 5).float(),
        }
        for row in IMAGES
    ]
    settings = SETTINGS | {"compute_metrics": None, "preprocess_logits_for_metrics": None}
    if problem.startswith("multi"):
        settings["label_smoothing_factor"] = 0.1
        with pytest.warns(UserWarning, match="Disabling label smoothing"):
            assert_same(
                train_both(
                    lambda: make_vit(problem_type=problem), rows, eval_dataset=rows[:5], **settings
                )
            )
    else:
        assert_same(
            train_both(
                lambda: make_vit(problem_type=problem), rows, eval_dataset=rows[:5], **settings
            )
        )


def routed() -> nn.Module:
    model = make_model("qwen3-moe")
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = 0.5
    return model


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3])
def test_a_routers_auxiliary_loss_is_that_of_the_batch(devices: int) -> None:
    """It is no mean over rows, so all microbatches go forward before it is made."""
    settings = SETTINGS | {
        "compute_metrics": None,
        "preprocess_logits_for_metrics": None,
        "devices": devices,
    }
    pair = train_both(routed, TOKENS, eval_dataset=TOKENS[:5], **settings)
    assert_same(pair)
    without = train_both(
        maker("qwen3-moe", lora=False), TOKENS, eval_dataset=TOKENS[:5], **settings
    )
    assert logged(without.ours)[0]["loss"] != pytest.approx(logged(pair.ours)[0]["loss"], abs=1e-3)
    assert_same(without)


def test_a_loss_with_a_routers_is_not_reduced_as_declared() -> None:
    """It was cut all the same, and every microbatch added an auxiliary loss of its own."""
    trainer = make_trainer(RoundPipeTrainer, routed(), TOKENS, loss_reduction="tokens")
    with pytest.raises(ConfigError, match="a router's auxiliary loss is of all rows together"):
        trainer.train()


@pytest.mark.slow
def test_with_the_default_optimizer() -> None:
    """AdamW divides by |g|: noise of 1e-9 in a gradient near zero moves a weight by a good part of
    the rate."""
    settings = SETTINGS | {
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-3,
        "num_train_epochs": 2,
    }
    assert_same(
        train_both(maker("qwen3", lora=False), TOKENS, eval_dataset=TOKENS[:5], **settings),
        atol=1e-4,
    )
