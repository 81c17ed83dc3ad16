"""fp16 with its scaler, and evaluation in half precision: what overflows is skipped, what is stored
loses nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from roundpipe import GradScaler
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from tests.support.models import make_lora_llama
from tests.support.trainers import (
    MODELS,
    assert_same,
    differ,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
    train_both,
    weights,
)

ROWS = token_rows(15)
SLOW = pytest.mark.slow
IN_ORDER = {"train_sampling_strategy": "sequential"}


class Overflows:
    """The loss of the second of five steps is infinite."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        return loss * float("inf") if self.state.global_step == 1 else loss  # type: ignore[attr-defined]


def plain_loop(model: nn.Module, rates: list[float], scaler: torch.amp.GradScaler) -> list[float]:
    """The scales after each step of torch's own scaler on the same batches, the second of which
    overflows."""
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.1), []
    batches = make_trainer(Trainer, MODELS["full"](), ROWS, **IN_ORDER).get_train_dataloader()
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    """Torch's trace of scales and weights; the rate stays for one step more."""
    cls: Any = type("Mixed", (Overflows, RoundPipeTrainer), {})
    trainer = make_trainer(cls, MODELS["full"](), ROWS, fp16=True, **IN_ORDER)
    trainer.scaler = GradScaler(init_scale=1024.0, growth_interval=2)
    run(trainer)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history[:-1]]
    assert rates == pytest.approx([0.1, 0.08, 0.08, 0.06, 0.04])
    model = MODELS["full"]()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    assert plain_loop(model, rates, scaler)[-1] == trainer.scaler.get_scale() == 1024.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights(trainer)[name], parameter.detach(), atol=2e-3, rtol=0)


def in_half(lora_dtype: torch.dtype | None) -> nn.Module:
    """fp16 weights; with an adapter, that in fp32 as PEFT makes it, or in fp16 too."""
    model = MODELS["full"]() if lora_dtype is None else make_lora_llama()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(
            torch.float16 if lora_dtype is None or "lora" not in name else lora_dtype
        )
    return model


@pytest.mark.parametrize(
    "lora_dtype",
    [pytest.param(None, marks=SLOW), pytest.param(torch.float16, marks=SLOW), torch.float32],
)
def test_fp16_weights_train_through_fp32_masters(lora_dtype: torch.dtype | None) -> None:
    """No gradient of an fp16 tensor is unscaled in place, frozen ones have none; as fp32 trains,
    within 1 %."""
    trainer = make_trainer(RoundPipeTrainer, in_half(lora_dtype), ROWS, fp16=True, devices=2)
    trainer.scaler = GradScaler(init_scale=1024.0)
    before = weights(trainer)
    run(trainer)
    assert trainer.scaler.get_scale() == 1024.0
    plain = run(make_trainer(Trainer, MODELS["full" if lora_dtype is None else "lora"](), ROWS))
    assert [e["loss"] for e in logged(trainer)[:-1]] == pytest.approx(
        [e["loss"] for e in logged(plain)[:-1]], rel=1e-2
    )
    changed = differ(weights(trainer), before)
    assert changed
    assert lora_dtype is None or all("lora" in name for name in changed)


@SLOW
def test_masters_in_fp16_are_told_at_the_first_step() -> None:
    trainer = make_trainer(RoundPipeTrainer, in_half(None), ROWS, fp16=True, optim_dtype="auto")
    with pytest.raises(ConfigError, match="torch.float16"):
        run(trainer)


def test_the_scaler_is_saved_and_resumed() -> None:
    settings: dict[str, Any] = {"fp16": True, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, **settings)
    trainer.scaler = GradScaler(init_scale=512.0, growth_interval=2)
    run(trainer)
    resumed = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, output_dir="resumed", **settings
    )
    run(resumed, resume_from_checkpoint="out-ours/checkpoint-2")
    assert resumed.scaler.get_scale() == trainer.scaler.get_scale() == 2048.0
    assert differ(weights(resumed), weights(trainer)) == []


@SLOW
def test_autocast_of_fp16_without_overflow_is_the_plain_trainers() -> None:
    pair = make_both(MODELS["full"], ROWS, fp16=True, devices=1)
    pair.ours.scaler = GradScaler(init_scale=64.0)
    assert_same(type(pair)(*map(run, pair)), atol=5e-3)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=SLOW)])
def test_full_evaluation_in_half_precision_changes_no_weight(dtype: str) -> None:
    """Computed as the plain Trainer does, which casts the model for it; ours stays, and training
    goes on from it."""
    pair = make_both(MODELS["full"], ROWS, eval_dataset=ROWS[:5], **{f"{dtype}_full_eval": True})
    before = weights(pair.ours)
    ours, plain = (trainer.evaluate() for trainer in pair)
    assert ours.keys() - plain.keys() <= {"eval_model_preparation_time"}
    assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], abs=2e-2)
    assert ours["eval_loss"] != pytest.approx(
        make_trainer(Trainer, MODELS["full"](), ROWS).evaluate(ROWS[:5])["eval_loss"], abs=1e-6
    )
    assert differ(weights(pair.ours), before) == []
    assert getattr(pair.ours.args, f"{dtype}_full_eval")
    untouched = train_both(MODELS["full"], ROWS)
    assert_same(untouched._replace(ours=run(pair.ours)))
