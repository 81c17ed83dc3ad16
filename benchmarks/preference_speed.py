"""Seconds that TRL's methods take over the engine on the shared workload's shapes.

    python benchmarks/preference_speed.py dpo --compile --model llama-3-8b --methods lora
    python benchmarks/preference_speed.py grpo --compile --model llama-3-8b --methods lora \\
        --max-gpu-memory 23 --length 384 --prompt 128 --rows 32 --warmup 1 --steps 2

dpo: ``--rows`` sequences are half as many pairs. It is held against the same arithmetic done by
SFT: a step over the same rows, and an evaluation of them, which is what a reference costs.
grpo: ``--rows`` sequences of ``--length`` tokens, of which ``--prompt`` are given; 8 for a prompt.
Its step is told apart into the rollouts and all the rest, each with its bound by rates that are
measured first: of a rollout, that weights which pass go over the link, and the others through the
device's memory, once for every token of all rows. It says how far each rollout is, because one
takes a tenth of a second for a token and more. Rewards are random.
"""

import argparse
import contextlib
import functools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import roofline
import torch
from ceilings import matmul, seconds, transfers
from datasets import Dataset
from engine import plan_of
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback
from workload import (
    LEARNING_RATE,
    MAX_NORM,
    Workload,
    add_workload_options,
    describe,
    make_model,
    workload_of,
)

from roundpipe.engine import generation
from roundpipe.transfer.turns import StreamedBlocks
from roundpipe_hf.trl import (
    RoundPipeDPOConfig,
    RoundPipeDPOTrainer,
    RoundPipeGRPOConfig,
    RoundPipeGRPOTrainer,
    RoundPipeSFTConfig,
    RoundPipeSFTTrainer,
)

COLUMNS = [
    "method", "what", "step_s", "tokens_per_s", "of_sft", "rollout_s", "rollout_bound_s",
    "update_s", "update_bound_s", "decoded_per_s", "gpu_peak_allocated_gb", "host_peak_rss_gb",
]  # fmt: skip
GENERATIONS = 8


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Word ``w17`` is token 17."""
    words = {f"w{index}": index for index in range(3, vocabulary)}
    made = Tokenizer(WordLevel({"<unk>": 0, "<pad>": 1, "<eos>": 2} | words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def words(rng: random.Random, count: int, vocabulary: int) -> str:
    return " ".join(f"w{rng.randrange(3, vocabulary)}" for _ in range(count))


def make_arguments(
    options: argparse.Namespace, workload: Workload, folder: str, **more: Any
) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": folder,
        "per_device_train_batch_size": workload.rows,
        "per_device_eval_batch_size": workload.rows,
        "max_steps": options.warmup + options.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_NORM,
        "logging_steps": options.warmup + options.steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "torch_compile": options.compile,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "async_optimizer": options.modes == ["async"],
        "num_microbatch": workload.num_microbatch,
        "max_gpu_memory": options.max_gpu_memory,
        "dataloader_num_workers": 0,
    } | more


def timed_training(trainer: Any, warmup: int, steps: int) -> float:
    """Seconds of a step, from the first one behind the warm-up until the last one's end."""
    trainer.remove_callback(PrinterCallback)
    begun: list[float] = []
    train_step = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        if len(begun) == warmup:
            measure.reset_peaks()
        begun.append(time.perf_counter())
        return train_step(*args, **kwargs)

    trainer.training_step = training_step
    trainer.train()
    trainer.synchronize()
    measure.wait_device()
    return (time.perf_counter() - begun[warmup]) / steps


def run_dpo(
    options: argparse.Namespace, workload: Workload, model: nn.Module, folder: str
) -> list[measure.Record]:
    vocabulary = int(model.config.vocab_size)  # type: ignore[arg-type,union-attr]
    tokenizer, rng = make_tokenizer(vocabulary), random.Random(0)
    half, pairs = workload.length // 2, workload.rows // 2
    total = (options.warmup + options.steps) * pairs
    rows = [
        {name: words(rng, half - 1, vocabulary) for name in ("prompt", "chosen", "rejected")}
        for _ in range(total)
    ]
    texts = [
        {"text": f"{row['prompt']} {row[name]}"} for row in rows for name in ("chosen", "rejected")
    ]
    common = make_arguments(options, workload, folder, max_length=workload.length)
    sft = RoundPipeSFTTrainer(
        model,
        RoundPipeSFTConfig(**common),
        train_dataset=Dataset.from_list(texts),
        eval_dataset=Dataset.from_list(texts[: workload.rows * options.steps]),
        processing_class=tokenizer,
    )
    sft_s = timed_training(sft, options.warmup, options.steps)
    sft.evaluate()
    began = time.perf_counter()
    sft.evaluate()
    forward_s = (time.perf_counter() - began) / options.steps
    sft.model_wrapped.close()
    del sft
    dpo = RoundPipeDPOTrainer(
        model,
        args=RoundPipeDPOConfig(**common | {"per_device_train_batch_size": pairs}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    dpo_s = timed_training(dpo, options.warmup, options.steps)
    plan = plan_of(dpo.model_wrapped)
    dpo.model_wrapped.close()
    tokens = workload.rows * workload.length
    return [
        {"what": "sft step", "step_s": sft_s, "tokens_per_s": tokens / sft_s},
        {"what": "forward only", "step_s": forward_s, "tokens_per_s": tokens / forward_s},
        {
            "what": "dpo step", "step_s": dpo_s, "tokens_per_s": tokens / dpo_s, "plan": plan,
            "of_sft": (sft_s + forward_s) / dpo_s,
        },
    ]  # fmt: skip


class Rollouts:
    """Says how far each rollout is, and keeps what it took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes_per_token = 0
        self._began = 0.0
        self._tokens = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Rollouts inside are by copies, as a device makes them."""
        copy_on, close = generation.copy_on, StreamedBlocks.close

        @contextlib.contextmanager
        def telling(*args: Any, **kwargs: Any) -> Iterator[nn.Module]:
            with copy_on(*args, **kwargs) as made:
                self._tell("the copy is made")
                base = next(one for one in made.modules() if isinstance(one, PreTrainedModel))
                base.register_forward_hook(lambda *_: self._token())
                yield made

        def noting(streamed: StreamedBlocks) -> None:
            self.bytes_per_token = streamed.num_bytes
            close(streamed)

        generation.copy_on, StreamedBlocks.close = telling, noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            generation.copy_on, StreamedBlocks.close = copy_on, close  # type: ignore[method-assign]

    def timed(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        self._began, self._tokens = time.perf_counter(), 0
        made = generate(*args, **kwargs)
        self._tell("done")
        self.seconds.append(time.perf_counter() - self._began)
        return made

    def _token(self) -> None:
        if self._tokens % 16 == 0:
            self._tell(f"token {self._tokens + 1}")
        self._tokens += 1

    def _tell(self, what: str) -> None:
        measure.wait_device()
        taken = time.perf_counter() - self._began
        print(f"rollout {len(self.seconds) + 1}: {what} after {taken:.2f} s", flush=True)


def measured_rates() -> dict[str, float]:
    """Measures rates as ceilings.py names them, and reading the GPU's memory in GB/s. Returns
    nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    found = [matmul(8192, 5), *transfers(2**28, 5)]
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    memory = 2 * source.nbytes / seconds(lambda: target.copy_(source), 5) / 1e9
    return {one["what"]: one["value"] for one in found} | {"memory": memory}


def rollout_bound_s(
    rates: dict[str, float], workload: Workload, model: nn.Module, prompt: int, passing: int
) -> float:
    """The copy is sent, all prompts are read, and then each token of all rows takes what passes, or
    reading all weights and half of the cache that there is at the end."""
    config: Any = model.config
    weights = sum(one.nbytes for one in model.parameters())
    width = config.num_key_value_heads * config.head_dim * 2 * 2
    cache = workload.rows * workload.length * config.num_hidden_layers * width
    in_memory = (weights + cache / 2) / rates["memory"]
    reading = 2 * workload.rows * prompt * sum(one.numel() for one in model.parameters())
    return (
        (weights - passing) / (rates["H2D"] * 1e9)
        + reading / (rates["bf16 matmul"] * 1e12)
        + (workload.length - prompt) * max(passing / rates["H2D"], in_memory) / 1e9
    )


def run_grpo(
    options: argparse.Namespace, workload: Workload, model: nn.Module, folder: str
) -> list[measure.Record]:
    vocabulary = int(model.config.vocab_size)  # type: ignore[arg-type,union-attr]
    rng = random.Random(0)
    prompts = [{"prompt": words(rng, options.prompt, vocabulary)} for _ in range(workload.rows)]
    decoded = workload.length - options.prompt
    trainer = RoundPipeGRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
        args=RoundPipeGRPOConfig(
            **make_arguments(options, workload, folder, num_generations=GENERATIONS),
            max_completion_length=decoded,
            generation_kwargs={"min_new_tokens": decoded},
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=make_tokenizer(vocabulary),
    )
    rollouts = Rollouts()
    trainer._generate_single_turn = functools.partial(  # type: ignore[method-assign]
        rollouts.timed, trainer._generate_single_turn
    )
    with rollouts.watched():
        step_s = timed_training(trainer, options.warmup, options.steps)
    rollout_s = sum(rollouts.seconds[-options.steps :]) / options.steps
    record: measure.Record = {
        "what": "grpo step", "step_s": step_s, "rollout_s": rollout_s,
        "update_s": step_s - rollout_s, "plan": plan_of(trainer.model_wrapped),
        "streamed_gb_per_token": rollouts.bytes_per_token / 1e9,
        "tokens_per_s": workload.rows * workload.length / (step_s - rollout_s),
        "decoded_per_s": workload.rows * decoded / rollout_s,
    }  # fmt: skip
    trainer.model_wrapped.close()
    if options.rates:
        bounds = roofline.bounds_of(describe(workload, model), options.rates)
        record["update_bound_s"] = max(bounds.values())
        record["rollout_bound_s"] = rollout_bound_s(
            options.rates, workload, model, options.prompt, rollouts.bytes_per_token
        )
    return [record]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=["dpo", "grpo"])
    measure.add_common_options(parser)
    add_workload_options(parser)
    parser.add_argument("--modes", nargs=1, choices=["sync", "async"], default=["sync"])
    parser.add_argument("--compile", action="store_true", help="torch_compile=True")
    parser.add_argument("--prompt", type=int, default=128, help="tokens given (default 128)")
    parser.add_argument(
        "--max-gpu-memory", type=float, metavar="GB", help="stay under this much on the GPU"
    )
    parser.add_argument("--cap-gb", type=float, help="what torch may take of the GPU, in 10^9")
    options = parser.parse_args()
    workload = workload_of(options)
    options.rates = measured_rates() if options.method == "grpo" else {}
    model = make_model(workload, measure.compute_device()).cpu()
    if isinstance(model, PeftModel):
        model.base_model.model.name_or_path = "random"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    measure.cap_gpu_memory(options.cap_gb)  # not before, because the model is made on the GPU
    run = {"dpo": run_dpo, "grpo": run_grpo}[options.method]
    with tempfile.TemporaryDirectory() as folder:
        described = describe(workload, model)
        records = run(options, workload, model, str(Path(folder) / "out"))
    shared = {
        "bench": "preference_speed", "warmup": options.warmup, "steps": options.steps,
        "mode": options.modes[0], "compile": options.compile,
        **described, **measure.peaks(), **measure.environment(),
    }  # fmt: skip
    for record in records:
        measure.emit(shared | record)
    print(f"\n{measure.table([shared | record for record in records], COLUMNS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
