"""`RoundPipeTrainer` does what `Trainer` does: the same losses, norms, rates and weights from the
same seed."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    differ,
    token_rows,
    train_both,
    weights,
)

# 20 rows by 3 are 7 batches, the last of 2 rows: with accumulation 4 the last window has 3 batches.
ROWS = token_rows(20)


def assert_trained(pair: Pair, kind: str) -> None:
    before = {name: parameter.detach() for name, parameter in MODELS[kind]().named_parameters()}
    assert differ(weights(pair.ours), before), "nothing was trained, so nothing was compared"


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_same_as_plain(kind: str, accumulation: int, devices: int) -> None:
    pair = train_both(MODELS[kind], ROWS, devices=devices, gradient_accumulation_steps=accumulation)
    assert_same(pair)
    assert_trained(pair, kind)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_the_logged_norm_is_the_whole_models_and_clips_all_of_it(
    kind: str, max_grad_norm: float
) -> None:
    """One norm before clipping, a tied weight counted once, whether or not anything is clipped."""
    pair = train_both(
        MODELS[kind], ROWS, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2
    )
    assert_same(pair)


def test_an_infinite_gradient_without_a_scaler_does_what_torch_does() -> None:
    """Clipping by an infinite norm gives nan everywhere, not in one stage only."""

    def infinite(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.sum() * float("inf")

    pair = train_both(
        MODELS["full"], token_rows(6), compute_loss_func=infinite, logging_nan_inf_filter=False
    )
    assert_same(pair)
    assert all(bool(weight.isnan().all()) for weight in weights(pair.ours).values())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_label_smoothing_shifts_labels_for_a_causal_model(kind: str) -> None:
    assert_same(
        train_both(MODELS[kind], ROWS, label_smoothing_factor=0.1, gradient_accumulation_steps=2)
    )


@pytest.mark.parametrize(
    ("scheduler", "more"),
    [
        ("cosine", {"warmup_steps": 2}),
        ("constant", {}),
        ("reduce_lr_on_plateau", {"eval_strategy": "epoch"}),
    ],
)
def test_schedules(scheduler: str, more: dict[str, Any]) -> None:
    rows = token_rows(6)
    assert_same(
        train_both(
            MODELS["full"],
            rows,
            eval_dataset=rows,
            lr_scheduler_type=scheduler,
            num_train_epochs=3,
            **more,
        )
    )


@pytest.mark.parametrize(
    "optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "rmsprop", "adagrad"]
)
def test_optimizers_with_weight_decay(optim: str) -> None:
    """Adaptive optimizers divide by |g|, so noise of 1e-9 in a gradient shows; SGD is the exact
    comparison."""
    settings = {"optim": optim, "weight_decay": 0.1, "learning_rate": 1e-3}
    assert_same(train_both(MODELS["lora"], ROWS, **settings), atol=1e-5 if optim == "sgd" else 1e-4)


def test_groups_are_those_of_the_plain_trainer() -> None:
    """Decayed weights first, norms apart, in the model's order; both groups even where one is
    empty."""
    for kind in ("full", "lora"):
        pair = train_both(MODELS[kind], token_rows(3), weight_decay=0.1)
        shapes = [
            [
                ([p.shape for p in group["params"]], group["weight_decay"])
                for group in trainer.optimizer.param_groups
            ]
            for trainer in pair
        ]
        assert shapes[0] == shapes[1]


def test_settings_reach_the_engine() -> None:
    pair = train_both(
        MODELS["full"], ROWS, num_microbatch=2, recompute_grain="layer", pin_model="off", devices=2
    )
    assert_same(pair)
    assert len(pair.ours.model_wrapped.devices) == 2
    assert pair.ours.model_wrapped.default_num_microbatch == 2


def test_frozen_layers_stay_as_they_were() -> None:
    def half_frozen() -> nn.Module:
        model = MODELS["full"]()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith(
                ("model.embed", "model.layers.0", "model.layers.2")
            )
        return model

    pair = train_both(half_frozen, ROWS)
    assert_same(pair)
    before = {name: parameter.detach() for name, parameter in half_frozen().named_parameters()}
    assert not any(name.startswith("model.layers.2") for name in differ(weights(pair.ours), before))


def test_autocast_of_bf16_on_fp32_weights() -> None:
    """Both cast the same operations to bf16; sums over microbatches round differently."""
    assert_same(train_both(MODELS["full"], ROWS, bf16=True, devices=1), atol=2e-2)


def test_bf16_masters_follow_fp32_training() -> None:
    """fp32 masters over bf16 weights: small updates are not lost, where plain bf16 training rounds
    them away."""

    def in_bf16() -> nn.Module:
        return MODELS["full"]().bfloat16()

    pair = train_both(
        in_bf16, ROWS, learning_rate=1e-4, optim="adamw_torch", lr_scheduler_type="constant"
    )
    masters = dict(pair.ours.optim_named_parameters())
    assert {master.dtype for master in masters.values()} == {torch.float32}
    norm = masters["model.norm.weight"]
    assert bool((norm != 1.0).any())
    assert bool((weights(pair.plain)["model.norm.weight"] == 1.0).all()), (
        "plain bf16 no longer shows the difference"
    )
    assert_written_back(masters, weights(pair.ours))


def assert_written_back(masters: dict[str, nn.Parameter], working: dict[str, Tensor]) -> None:
    for name, master in masters.items():
        assert torch.equal(master.detach().to(torch.bfloat16), working[name]), name


def test_padded_batches_of_different_lengths_in_one_window() -> None:
    """Microbatches of one round differ in length when a collator pads each batch by itself."""
    rows = [
        {"input_ids": row["input_ids"][: 5 + index % 7], "labels": row["labels"][: 5 + index % 7]}
        for index, row in enumerate(ROWS)
    ]

    def pad(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = max(len(feature["input_ids"]) for feature in features)
        columns = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        for feature in features:
            feature["attention_mask"] = torch.ones_like(feature["input_ids"])
        return {
            name: torch.stack(
                [
                    nn.functional.pad(f[name], (0, length - len(f[name])), value=fill)
                    for f in features
                ]
            )
            for name, fill in columns.items()
        }

    pair = train_both(MODELS["full"], rows, data_collator=pad, gradient_accumulation_steps=4)
    assert_same(pair)
    ours, plain = (trainer.predict(rows[:7]) for trainer in pair)
    np.testing.assert_allclose(ours.predictions, plain.predictions, atol=1e-5)


def test_a_model_without_preset_runs_as_one_layer() -> None:
    """Nothing but memory is lost; GPT-2 is always tied."""
    assert_same(train_both(make_gpt2, ROWS, gradient_accumulation_steps=2))


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=3,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
