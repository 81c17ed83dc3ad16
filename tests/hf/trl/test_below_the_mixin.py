"""TRL's trainers that have no counterpart do below `RoundPipeTrainerMixin` what they do alone: the
same losses, weights, metrics and logged keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer import DistillationConfig, DistillationTrainer

from roundpipe_hf import RoundPipeTrainerMixin
from roundpipe_hf.compat import use_one_gpu
from roundpipe_hf.errors import UnknownModelCall
from tests.hf.trl.test_preferences import CHOSEN, LORA, PAIRS, PROMPTS, make_model
from tests.support.example_data import save_tokenizer
from tests.support.trainers import QUIET_SGD, Pair, assert_same, run, weights

ANSWERS = Dataset.from_dict(
    {
        "messages": [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            for asked, said in zip(PROMPTS, CHOSEN, strict=True)
        ]
    }
)
TEACHER: dict[str, Any] = {"lmbda": 0.0, "seq_kd": False}  # rows of the data, none generated
CASES: dict[str, tuple[type, type, Dataset, dict[str, Any]]] = {
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS, {}),
    "cpo": (CPOTrainer, CPOConfig, PAIRS, {}),
    "simpo": (CPOTrainer, CPOConfig, PAIRS, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "gkd": (GKDTrainer, GKDConfig, ANSWERS, TEACHER),
}
_OF_TRAINER = ("peft_config", "eval_dataset", "teacher_model")


def make_one(cls: type, config: type, rows: Dataset, folder: Path, **settings: Any) -> Any:
    given = {
        "output_dir": f"out-{cls.__name__}",
        "per_device_train_batch_size": 4,
        **QUIET_SGD,
        "num_train_epochs": 1,
        "bf16": False,
    } | settings
    of_trainer = {name: given.pop(name) for name in _OF_TRAINER if name in given}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
    args = config(**given)
    use_one_gpu(args)
    torch.manual_seed(1)  # which adapters are drawn from
    return cls(
        make_model(), args=args, train_dataset=rows, processing_class=tokenizer, **of_trainer
    )


def below(theirs: type) -> type:
    return type(f"Mixed{theirs.__name__}", (RoundPipeTrainerMixin, theirs), {})


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_alone(case: str, with_adapter: bool, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    theirs, config, rows, settings = CASES[case]
    more: dict[str, Any] = {"eval_dataset": rows, "eval_strategy": "epoch"}
    more["gradient_accumulation_steps"] = 2
    more |= {"peft_config": LORA} if with_adapter else {}

    def one(cls: type) -> Any:
        teacher = {"teacher_model": make_model(seed=3)} if case == "gkd" else {}
        return run(make_one(cls, config, rows, tmp_path, **settings, **more, **teacher))

    assert_same(Pair(one(below(theirs)), one(theirs)))


def test_a_loss_that_calls_the_backbone_is_refused(tmp_path: Path) -> None:
    """It puts a function of its own into the model's forward, which was called with the model in
    place of tokens, deep inside the first stage."""
    save_tokenizer(tmp_path)
    rows = Dataset.from_dict({"prompt": PROMPTS})
    settings: dict[str, Any] = {"teacher_model": make_model(seed=3), "max_completion_length": 4}
    trainer = make_one(below(DistillationTrainer), DistillationConfig, rows, tmp_path, **settings)
    before = weights(trainer)
    with pytest.raises(UnknownModelCall, match=r"hands the model a module \(LlamaForCausalLM\)"):
        run(trainer)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weights(trainer)[name], value) for name, value in before.items())
