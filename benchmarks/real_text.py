"""SmolLM2-135M on real text: held-out loss every few steps, synchronous against asynchronous, bf16
against fp8, at several learning rates, all weights or adapters.

    python benchmarks/real_text.py --modes sync async fp8 --rates 2e-5 1e-4 4e-4 --seeds 0 1

All runs of one seed see the same rows in the same order and start from the same weights. The rows
are Wikipedia summaries, packed to one length; those held out are never trained on.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from engine import inputs_of
from workload import MAX_NORM

from fetch_assets import smollm2_folder, wiki_summaries
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import AdamW, clip_grad_norm_

COLUMNS = ["what", "value", "unit", "setting"]
HELD_OUT = 64  # rows
MODES = ("sync", "async", "fp8")  # fp8 is synchronous


def rows_of(length: int) -> Tensor:
    """All text, in one order: (rows, length)."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    texts = [one.extract for one in wiki_summaries()]
    random.Random(0).shuffle(texts)
    ids = tokenizer(texts)["input_ids"]
    end = tokenizer.eos_token_id
    flat = torch.tensor([token for one in ids for token in (*one, end)])
    return flat[: len(flat) // length * length].view(-1, length)


def batches_of(rows: Tensor, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """``steps`` batches: the rows in another order in each pass over them."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        chosen, order = order[:size], order[size:]
        yield rows[chosen]


def model_of(method: str, seed: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.bfloat16)
    if method == "full":
        return model
    torch.manual_seed(seed)  # which the adapters are drawn from
    return get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    )


def run(
    mode: str, rate: float, method: str, seed: int, rows: Tensor, options: argparse.Namespace
) -> measure.Record:
    model = model_of(method, seed)
    engine: Any = wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        model_run_config=RoundPipeRunConfig(num_microbatch=2),
        optim_dtype=torch.float32,
        compute_dtype="fp8" if mode == "fp8" else None,
        max_gpu_memory=options.max_gpu_memory,
        devices=1,
    )
    held_out, trained = rows[:HELD_OUT], rows[HELD_OUT:]
    began = time.perf_counter()
    losses, evaluated = [], {}
    with engine:
        optimizer = AdamW(engine.optim_parameters(), lr=rate)

        def update() -> None:
            clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        for step, batch in enumerate(batches_of(trained, options.rows, options.steps, seed)):
            if step % options.every == 0:
                evaluated[step] = evaluate(engine, held_out, options.rows)
            losses.append(engine.forward_backward(input_kwargs=inputs_of(batch)))
            engine.step(update, is_async=mode == "async")
        engine.synchronize()
        evaluated[options.steps] = evaluate(engine, held_out, options.rows)
    seconds = time.perf_counter() - began
    curve = ", ".join(f"{step}: {loss:.4f}" for step, loss in evaluated.items())
    return {
        "bench": "real_text",
        "what": f"{method}, {rate:g}, seed {seed}, {mode}",
        "value": evaluated[options.steps],
        "unit": "held-out loss",
        "setting": f"{options.steps} steps of {options.rows} x {options.length}; {curve}",
        "mode": mode,
        "rate": rate,
        "method": method,
        "seed": seed,
        "evaluated": evaluated,
        "losses": [float(loss) for loss in losses],
        "step_s": seconds / options.steps,
        **measure.environment(),
    }


def evaluate(engine: Any, held_out: Tensor, size: int) -> float:
    return statistics.fmean(
        float(engine.forward_loss(input_kwargs=inputs_of(batch))) for batch in held_out.split(size)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sync", "async"])
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-5, 1e-4, 4e-4])
    parser.add_argument("--methods", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--rows", type=int, default=16, help="in a step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--max-gpu-memory", type=float, metavar="GB")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th run, from the K-th on")
    options = parser.parse_args()
    first, _, step = options.part.partition("/")
    cases = itertools.product(options.seeds, options.methods, options.rates, options.modes)
    rows = rows_of(options.length)
    records = []
    for seed, method, rate, mode in itertools.islice(cases, int(first), None, int(step)):
        records.append(run(mode, rate, method, seed, rows, options))
        measure.emit(records[-1])
    print(measure.table(records, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
