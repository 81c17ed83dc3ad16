"""SmolLM2-135M learns a preference by DPO and a reward that can be checked by GRPO, with TRL's own
trainers and with RoundPipe's: the same weights, data, seeds and settings.

    OMP_NUM_THREADS=1 python benchmarks/preference.py dpo
    OMP_NUM_THREADS=1 python benchmarks/preference.py grpo --trainers roundpipe --seeds 0 1

dpo: of two one-sentence answers to "Tell me about X.", the one about X in lower case is preferred
to one about something else, or to its own original (`--rejected`). What counts is the share of
held-out pairs whose preferred answer gained more probability than the other one (TRL's reward), and
of those whose preferred answer has the higher probability for each token.
grpo: the model is to go on after "a + b =" with the sum of two digits and a line break behind it.
The reward is 1 for exactly that, else 0.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import measure
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from fetch_assets import smollm2_folder, wiki_summaries
from roundpipe_hf.trl import (
    RoundPipeDPOConfig,
    RoundPipeDPOTrainer,
    RoundPipeGRPOConfig,
    RoundPipeGRPOTrainer,
)

COLUMNS = ["what", "value", "unit", "setting"]
HELD_OUT = 24  # pairs
LONGEST = 120  # characters of an answer
AVERAGED = 10  # steps of GRPO, at its beginning and its end


def answer_pairs(rejected: str) -> Dataset:
    """Questions, preferred answers and others, in an order of their own."""
    short = [summary for summary in wiki_summaries() if len(summary.extract) < LONGEST]
    random.Random(0).shuffle(short)
    others = short if rejected == "original" else short[1:] + short[:1]
    rows = [
        {
            "prompt": f"Tell me about {asked.title}.\n",
            "chosen": asked.extract.lower(),
            "rejected": other.extract,
        }
        for asked, other in zip(short, others, strict=True)
    ]
    return Dataset.from_list(rows)


def sums() -> Dataset:
    """All sums of two digits."""
    return Dataset.from_list(
        [
            {"prompt": f"Sums\n{one} + {other} =", "answer": str(one + other)}
            for one in range(10)
            for other in range(10)
        ]
    )


def is_the_sum(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where a completion's first line is the answer and has an end, else 0."""
    return [
        float("\n" in completion and completion.partition("\n")[0].strip() == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


@torch.no_grad()
def share_likelier(model: Any, tokenizer: Any, rows: Dataset) -> float:
    """The share of pairs whose preferred answer has the higher probability for each token, by a
    plain forward of the model where it is."""
    model.eval()
    right = [
        _mean_nll(model, tokenizer, row["prompt"], row["chosen"])
        < _mean_nll(model, tokenizer, row["prompt"], row["rejected"])
        for row in rows
    ]
    return fmean(right)


def _mean_nll(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    begun = len(tokenizer(prompt)["input_ids"])
    ids = torch.tensor([tokenizer(prompt + answer)["input_ids"]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, begun - 1 : -1]
    return float(cross_entropy(logits.float(), ids[0, begun:]))


def load_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)


def arguments(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Settings that both trainers of both methods are given."""
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": f"outputs/{options.method}",
        "max_steps": options.steps,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": options.rows,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def adapters() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")


def train(trainer: Any) -> tuple[list[dict[str, float]], float]:
    """The log of the steps, and seconds for each."""
    trainer.remove_callback(PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return steps, seconds / len(steps)


def dpo(options: argparse.Namespace, name: str, seed: int) -> list[measure.Record]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    pairs = answer_pairs(options.rejected)
    held_out = pairs.select(range(HELD_OUT))
    set_seed(seed)  # which the adapters are drawn from
    trainer_of, config_of, more = (
        (DPOTrainer, DPOConfig, {})
        if name == "plain"
        else (RoundPipeDPOTrainer, RoundPipeDPOConfig, {"devices": options.devices})
    )
    trainer = trainer_of(
        load_model(),
        args=config_of(
            max_length=options.length,
            per_device_eval_batch_size=HELD_OUT // 3,
            **arguments(options, seed),
            **more,
        ),
        train_dataset=pairs.select(range(HELD_OUT, len(pairs))),
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=adapters(),
    )
    before = share_likelier(trainer.model, tokenizer, held_out)
    steps, step_s = train(trainer)
    found = trainer.evaluate()
    after = share_likelier(trainer.model, tokenizer, held_out)
    shared = {"losses": [entry["loss"] for entry in steps], "step_s": step_s}
    setting = (
        f"loss {found['eval_loss']:.4f}, margin {found['eval_rewards/margins']:.4f}; "
        f"{step_s:.1f} s per step"
    )
    return [
        shared | {
            "what": "reward accuracy, held out", "value": found["eval_rewards/accuracies"],
            "setting": setting, "loss": found["eval_loss"],
            "margin": found["eval_rewards/margins"],
        },
        shared | {
            "what": "preferred answer is likelier, held out", "value": after,
            "setting": f"before: {before:.3f}", "before": before,
        },
    ]  # fmt: skip


def grpo(options: argparse.Namespace, name: str, seed: int) -> list[measure.Record]:
    set_seed(seed)
    trainer_of, config_of, more = (
        (GRPOTrainer, GRPOConfig, {})
        if name == "plain"
        else (RoundPipeGRPOTrainer, RoundPipeGRPOConfig, {"devices": options.devices})
    )
    trainer = trainer_of(
        load_model(),
        reward_funcs=is_the_sum,
        args=config_of(
            num_generations=8, max_completion_length=5, **arguments(options, seed), **more
        ),
        train_dataset=sums(),
        processing_class=AutoTokenizer.from_pretrained(smollm2_folder()),
        peft_config=adapters(),
    )
    steps, step_s = train(trainer)
    rewards = [entry["reward"] for entry in steps]
    first, last = fmean(rewards[:AVERAGED]), fmean(rewards[-AVERAGED:])
    return [
        {
            "what": f"mean reward of the last {AVERAGED} steps", "value": last,
            "setting": f"of the first {AVERAGED}: {first:.3f}; {step_s:.1f} s per step",
            "first": first, "step_s": step_s, "rewards": rewards,
            "losses": [entry["loss"] for entry in steps],
        }
    ]  # fmt: skip


METHODS: dict[str, Callable[[argparse.Namespace, str, int], list[measure.Record]]] = {
    "dpo": dpo,
    "grpo": grpo,
}
DEFAULTS = {
    "dpo": {"steps": 20, "rows": 4, "learning_rate": 2e-4},
    "grpo": {"steps": 24, "rows": 16, "learning_rate": 2e-4},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--trainers", nargs="+", choices=["plain", "roundpipe"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="pairs, or completions, in a step")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--length", type=int, default=48, help="tokens of question and answer")
    parser.add_argument("--rejected", choices=["original", "other"], default="other")
    parser.add_argument(
        "--devices", type=int, help="the first so many GPUs; without a GPU: virtual devices"
    )
    options = parser.parse_args()
    for key, value in DEFAULTS[options.method].items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    records = []
    for name in options.trainers or ["plain", "roundpipe"]:
        for seed in options.seeds:
            for record in METHODS[options.method](options, name, seed):
                record["what"] += f": {options.method}, {name}, seed {seed}"
                records.append(
                    {"bench": "preference", "unit": "", **record, **measure.environment()}
                )
                measure.emit(records[-1])
            gc.collect()  # of one run nothing is to be left on the device
    print(f"\n{measure.table(records, COLUMNS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
