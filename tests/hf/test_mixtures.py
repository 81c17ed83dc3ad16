"""Mixtures of experts and models with linear attention train as in the plain Trainer and in TRL's,
whatever their rows: padded, or packed documents, on one device and on three."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, default_data_collator
from trl import SFTTrainer

from roundpipe import AutoRoundPipe
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.trl import RoundPipeSFTTrainer
from tests.hf.trl import test_sft as sft
from tests.support.example_data import save_tokenizer
from tests.support.mixtures import CONFIGS, SIZES_OF_SFT, adapters_for
from tests.support.preset_models import TINY, make_model, packed, tokens
from tests.support.trainers import (
    Pair,
    assert_same_logs,
    assert_same_weights,
    differ,
    logged,
    make_trainer,
    run,
    train_both,
    weights,
)

ROWS, LENGTH = 8, 12
# A weight is off by the rate times what its gradients are, so these agree as closely.
RATE = {"learning_rate": 1.0, "max_grad_norm": 1.0}
GRID = [
    (name, adapts, devices, rows)
    for name in CONFIGS
    for adapts in (False, True)
    for devices in (1, 3)
    for rows in ("padded", "packed")
]
QUICK = [
    ("deepseek-v3", True, 3, "padded"),
    ("qwen3.5-moe", True, 3, "packed"),
    ("gpt-oss", False, 1, "padded"),
]
grid = pytest.mark.parametrize(
    ("name", "adapts", "devices", "rows"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in GRID],
)


def rows_of(kind: str) -> list[dict[str, torch.Tensor]]:
    """Rows of unequal length with a mask, or of documents of unequal lengths without one."""
    made = []
    for row, ids in enumerate(tokens(ROWS, LENGTH)):
        if kind == "packed":
            first = 3 + row % 5
            positions = packed(first, LENGTH - first)
            made.append({"input_ids": ids, "labels": ids, "position_ids": positions})
            continue
        mask = (torch.arange(LENGTH) < LENGTH - row % 5).long()
        labels = ids.masked_fill(mask == 0, -100)
        made.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return made


def make(name: str, sizes: dict[str, Any]) -> Any:
    return make_model(name, config=CONFIGS[name](sizes))


def assert_pair_is_same(pair: Pair) -> None:
    """PEFT registers the stacks anew in each forward, behind gpt-oss's biases, so the plain model's
    weights may come in another order than they had."""
    ours, plain = weights(pair.ours), weights(pair.plain)
    assert_same_logs(logged(pair.ours), logged(pair.plain))
    assert ours.keys() == plain.keys()
    assert_same_weights(ours, {name: plain[name] for name in ours})


@grid
def test_trainer(name: str, adapts: bool, devices: int, rows: str) -> None:
    """Adapters of experts among them; windows of two batches."""

    def build() -> Any:
        model = make(name, TINY)
        return get_peft_model(model, LoraConfig(**adapters_for(name))) if adapts else model

    pair = train_both(
        build,
        rows_of(rows),
        devices=devices,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **RATE,
    )
    engine: Any = pair.ours._engine()
    assert not isinstance(engine, AutoRoundPipe)
    assert_pair_is_same(pair)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_run_goes_on_from_a_checkpoint_with_adapters_of_experts(name: str) -> None:
    """To the bit as if it had not stopped: what PEFT saves of the stacks is all that there is."""

    def trainer() -> Any:
        torch.manual_seed(3)
        model = get_peft_model(make(name, TINY), LoraConfig(**adapters_for(name)))
        settings = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
        return make_trainer(
            RoundPipeTrainer, model, rows_of("padded"), devices=3, optim="adamw_torch", **settings
        )

    through, resumed = run(trainer()), trainer()
    run(resumed, resume_from_checkpoint=f"{through.args.output_dir}/checkpoint-2")
    assert logged(resumed)[-2] == logged(through)[-2]
    assert not differ(weights(resumed), weights(through))


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_batch_says_whether_the_routers_loss_is_added(devices: int, asks: bool) -> None:
    """Only the config was looked at, and each microbatch of a batch that asked added a loss of its
    own: 6.117 in place of 5.108."""

    def build() -> Any:
        model = make("qwen3-moe", TINY)
        model.router_aux_loss_coef = 0.5
        model.config.output_router_logits = not asks
        return model

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        return {**default_data_collator(rows), "output_router_logits": asks}

    rows = rows_of("padded")
    pair = train_both(
        build,
        rows,
        devices=devices,
        data_collator=collate,
        per_device_train_batch_size=4,
        num_microbatch=2,
        eval_dataset=rows[:5],
        eval_strategy="epoch",
        **RATE,
    )
    assert_pair_is_same(pair)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return AutoTokenizer.from_pretrained(save_tokenizer(folder))


@grid
def test_sft(name: str, adapts: bool, devices: int, rows: str, tokenizer: Any) -> None:
    """With the auxiliary loss that TRL adds where there is one."""
    settings: dict[str, Any] = {"devices": devices, "max_steps": 2, **RATE}
    if adapts:
        settings["peft_config"] = LoraConfig(**adapters_for(name))
    if rows == "packed":
        settings |= {"packing": True, "per_device_train_batch_size": 1}

    def one(cls: type) -> Any:
        model = make(name, SIZES_OF_SFT)
        return sft.make_trainer(cls, tokenizer, model=model, **settings)

    try:
        plain = run(one(SFTTrainer))
    except ValueError:
        # Later releases refuse to pack rows for linear attention without a kernel's package.
        with pytest.raises(ValueError, match="causal_conv1d"):
            run(one(RoundPipeSFTTrainer))
        return
    assert_pair_is_same(Pair(run(one(RoundPipeSFTTrainer)), plain))
