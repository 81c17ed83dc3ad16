"""What else trains this workload on one GPU, each in a process of its own: plain Hugging Face with everything on the
GPU, torch's FSDP2 with CPU offload, DeepSpeed's ZeRO-2 and ZeRO-3 with optimizer (and parameters) on the CPU.

All with gradient checkpointing and the model's own loss, as their documentation has it. What is not installed is
skipped with a message. One process is a world of its own: these systems have no other way to run on one GPU.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import measure
import resident
import roofline
import torch
from torch import Tensor, distributed, nn
from workload import (
    LEARNING_RATE,
    MAX_NORM,
    Workload,
    add_workload_options,
    describe,
    make_model,
    make_tokens,
    workload_of,
)

SYSTEMS = {
    "hf": "resident: Hugging Face, checkpointing",
    "fsdp2": "FSDP2, CPU offload",
    "zero2": "DeepSpeed ZeRO-2, CPU offload",
    "zero3": "DeepSpeed ZeRO-3, CPU offload",
}
COLUMNS = ["method", "system", "tokens_per_s", "step_s", "gpu_peak_allocated_gb", "host_peak_rss_gb", "loss_last"]

Step = Callable[[], Tensor]


def fsdp2_step(model: Any, workload: Workload) -> Step:
    """Blocks and root sharded, fp32 parameters on the CPU, computed in bf16, AdamW on the CPU; all defaults."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = measure.compute_device()
    model.float().cpu()
    causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        **({"offload_policy": CPUOffloadPolicy()} if device.type == "cuda" else {}),  # on the CPU already
    )
    for block in causal_lm.model.layers:
        shard(block)
    shard(model)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    loss_of = resident.hugging_face_loss(model, workload.predictions_per_step)
    microbatches = make_tokens(workload).to(device).chunk(workload.num_microbatch)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for tokens in microbatches:
            loss = loss_of(tokens)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(weights, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def deepspeed_step(model: Any, workload: Workload, stage: int) -> Step:
    """Its own CPU AdamW; bf16 weights, fp32 masters."""
    import deepspeed

    device = measure.compute_device()
    rows = workload.rows // workload.num_microbatch
    offload = {"device": "cpu", "pin_memory": device.type == "cuda"}
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": workload.num_microbatch,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": offload,
            **({"offload_param": offload} if stage == 3 else {}),
        },
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
    microbatches = make_tokens(workload).to(device).chunk(workload.num_microbatch)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for tokens in microbatches:
            # It divides by the number of microbatches itself.
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / workload.num_microbatch
        return total

    return step


@contextmanager
def alone() -> Iterator[None]:
    """A world of one process."""
    with tempfile.TemporaryDirectory() as folder:
        here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        os.environ.update(here)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = distributed.FileStore(f"{folder}/store", 1)
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()


def run(system: str, options: argparse.Namespace) -> measure.Record:
    workload = workload_of(options)
    if system == "hf":
        return resident.run(system, workload, options)
    measure.cap_gpu_memory(options.cap_gb)
    model: Any = make_model(workload, measure.compute_device())
    model.gradient_checkpointing_enable()
    about = describe(workload, model)
    with alone():
        step = fsdp2_step(model, workload) if system == "fsdp2" else deepspeed_step(model, workload, int(system[-1]))
        timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
    return {
        "bench": "rivals",
        "system": SYSTEMS[system],
        "tokens_per_s": workload.tokens_per_step / timed["step_s"],
        "cap_gb": options.cap_gb,
        **about,
        **timed,
        **measure.peaks(),
        **measure.environment(),
    }


def is_installed(system: str) -> bool:
    return not system.startswith("zero") or importlib.util.find_spec("deepspeed") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.set_defaults(warmup=1, steps=2)  # because some take half a minute a step
    options = parser.parse_args()
    for system in options.systems:
        if not is_installed(system):
            print(f"skipped: {SYSTEMS[system]}, because deepspeed is not installed", file=sys.stderr)
    rows = [(method, system) for method in options.methods for system in options.systems if is_installed(system)]
    comment = partial(roofline.line, rates=roofline.rates_of(options.ceilings))
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice behind them.
        return measure.run_rows([[*sys.argv[1:], "--methods", a, "--systems", b] for a, b in rows], COLUMNS, comment)
    if not rows:
        return 0
    ((_, system),) = rows
    return measure.run_row(run(system, options), COLUMNS, comment)


if __name__ == "__main__":
    sys.exit(main())
