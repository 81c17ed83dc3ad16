"""Models that TRL's trainers are given by name: what the user is told of how they were loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from roundpipe_hf import trl
from tests.hf.trl.test_preferences import PAIRS, RATED, make_model
from tests.support.example_data import save_tokenizer, sentences

TEXTS = Dataset.from_dict({"text": sentences(4)})
QUESTIONS = Dataset.from_dict({"prompt": sentences(4)})
DATA = {"SFT": TEXTS, "DPO": PAIRS, "KTO": RATED, "Reward": PAIRS}
ROLLOUTS = {"num_generations": 4, "max_completion_length": 4, "beta": 0.1}
KINDS = [*DATA, "GRPO", "RLOO"]
FALSE = "`model_init_kwargs` will be ignored"


def make_trainer(kind: str, model: Any) -> Any:
    """The model's files have float32, and ``model_init_kwargs`` want bfloat16."""
    rolls_out = kind not in DATA
    settings = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "bf16": False}
    config = getattr(trl, f"RoundPipe{kind}Config")(
        "out",
        model_init_kwargs={"dtype": "bfloat16"},
        **settings,
        **(ROLLOUTS if rolls_out else {}),
    )
    rewards = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    return getattr(trl, f"RoundPipe{kind}Trainer")(
        model,
        args=config,
        train_dataset=DATA.get(kind, QUESTIONS),
        **(rewards if rolls_out else {}),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_told_that_options_were_ignored_that_were_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL says so of every model that it has not loaded itself; of a model that the user has made
    it still does. The reference model is loaded with them as well."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "model")
    cls = LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM
    make_model(cls).save_pretrained(tmp_path / "model")
    trainer = make_trainer(kind, "model")
    assert FALSE not in caplog.text
    assert trainer.model.dtype is torch.bfloat16
    reference = getattr(trainer, "ref_model", None)
    assert (reference is not None) == (kind not in ("SFT", "Reward"))
    assert reference is None or reference.dtype is torch.bfloat16
    assert trainer.args.model_init_kwargs == {"dtype": "bfloat16"}

    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(kind, cls.from_pretrained("model"))
    assert FALSE in caplog.text
    assert trainer.model.dtype is torch.float32
