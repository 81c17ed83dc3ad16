"""What else trains this workload on one GPU, each in a process of its own: plain Hugging Face with
everything on the GPU, torch's FSDP2 with CPU offload, DeepSpeed's ZeRO-2 and ZeRO-3 with optimizer
(and parameters) on the CPU.

All with gradient checkpointing and the model's own loss, as their documentation has it. What is not
installed is skipped with a message. One process is a world of its own: these systems have no other
way to run on one GPU.
"""

import argparse
import faulthandler
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
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

COLUMNS = [
    "method",
    "system",
    "tokens_per_s",
    "step_s",
    "gpu_peak_allocated_gb",
    "host_peak_rss_gb",
    "loss_last",
]

Step = Callable[[], tuple[Tensor, Any]]
"""Trains once; the loss, and the gradient's norm before it was clipped."""


def fsdp2_step(model: Any, workload: Workload, *, sums_on_device: bool) -> Step:
    """Blocks and root sharded, computed in bf16, fp32 masters and a fused AdamW on the CPU.

    Each microbatch's gradients go to the CPU and are added there, unless all of a step's but the
    last (``sums_on_device``) stay on the GPU unsharded, which its documentation names for gradient
    accumulation.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = measure.compute_device()
    model.cpu()
    for weight in trained_of(model):
        weight.data = (
            weight.data.float()
        )  # not the frozen ones, which would go up at twice their size
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    )
    causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    for block in causal_lm.model.layers:
        shard(block)
    shard(model)
    weights = trained_of(model)
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=True)
    loss_of = resident.hugging_face_loss(model, workload.predictions_per_step)
    microbatches = make_tokens(workload).to(device).chunk(workload.num_microbatch)

    def step() -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=device)
        for index, tokens in enumerate(microbatches, start=1):
            model.set_requires_gradient_sync(not sums_on_device or index == len(microbatches))
            loss = loss_of(tokens)
            loss.backward()
            total += loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(weights, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.full_tensor()

    return step


def deepspeed_step(model: Any, workload: Workload, *, stage: int) -> Step:
    """Its own CPU AdamW, which it compiles at first use; bf16 weights, fp32 masters."""
    import deepspeed

    device = measure.compute_device()
    offload = {"device": "cpu", "pin_memory": device.type == "cuda"}
    settings = {
        "train_micro_batch_size_per_gpu": workload.rows // workload.num_microbatch,
        "gradient_accumulation_steps": workload.num_microbatch,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.01},
        },  # torch's default
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": offload,
            **({"offload_param": offload} if stage == 3 else {}),
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained_of(model), config=settings
    )
    microbatches = make_tokens(workload).to(device).chunk(workload.num_microbatch)

    def step() -> tuple[Tensor, Any]:
        total = torch.zeros((), device=device)
        for tokens in microbatches:
            # It divides by the number of microbatches itself.
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / workload.num_microbatch
        return total, engine.get_global_grad_norm()

    return step


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


SYSTEMS = {
    "hf": "resident: Hugging Face, checkpointing",
    "fsdp2": "FSDP2, CPU offload",
    "fsdp2-sum": "FSDP2, CPU offload, gradients summed on the GPU",
    "zero2": "DeepSpeed ZeRO-2, CPU offload",
    "zero3": "DeepSpeed ZeRO-3, CPU offload",
}
STEPS: dict[str, Callable[[Any, Workload], Step]] = {
    "fsdp2": partial(fsdp2_step, sums_on_device=False),
    "fsdp2-sum": partial(fsdp2_step, sums_on_device=True),
    "zero2": partial(deepspeed_step, stage=2),
    "zero3": partial(deepspeed_step, stage=3),
}


class Told:
    """Says on stderr how each step went, because some rows take minutes; keeps the last gradient's
    norm."""

    def __init__(self, step: Step, title: str) -> None:
        self._step, self._title, self._count = step, title, 0
        self.gradient_norm = 0.0

    def __call__(self) -> Tensor:
        began = time.perf_counter()
        loss, norm = self._step()
        self.gradient_norm, self._count = float(norm), self._count + 1
        took = (
            f"{time.perf_counter() - began:.2f} s, loss {float(loss):.4f}, "
            f"gradient norm {self.gradient_norm:.4f}"
        )
        tell(f"{self._title}: step {self._count} took {took}")
        return loss


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """A world of one process."""
    before = os.environ.copy()
    with tempfile.TemporaryDirectory() as folder:
        here = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
        }
        os.environ.update(here)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = distributed.FileStore(f"{folder}/store", 1)
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """What takes longer ends the process, saying where each thread was: these systems wait for one
    another for ever."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(system: str, options: argparse.Namespace) -> measure.Record:
    workload = workload_of(options)
    if system == "hf":
        return resident.run(system, workload, options)
    measure.cap_gpu_memory(options.cap_gb)
    began = time.perf_counter()
    model: Any = make_model(workload, measure.compute_device())
    model.gradient_checkpointing_enable()
    about = describe(workload, model)
    with alone():
        step = Told(STEPS[system](model, workload), SYSTEMS[system])
        torch.cuda.empty_cache()  # or the whole model's place would count as reserved by the steps
        setup_s = time.perf_counter() - began
        tell(f"{SYSTEMS[system]}: set up in {setup_s:.1f} s")
        timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
    return {
        "bench": "rivals",
        "system": SYSTEMS[system],
        "tokens_per_s": workload.tokens_per_step / timed["step_s"],
        "cap_gb": options.cap_gb,
        **about,
        **timed,
        "gradient_norm_last": step.gradient_norm,
        "setup_s": setup_s,
        **measure.peaks(),
        **measure.environment(),
        **(
            {"deepspeed": importlib.metadata.version("deepspeed")}
            if needs_deepspeed(system)
            else {}
        ),
    }


def needs_deepspeed(system: str) -> bool:
    return system.startswith("zero")


def is_installed(system: str) -> bool:
    return not needs_deepspeed(system) or importlib.util.find_spec("deepspeed") is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument(
        "--limit-s", type=float, default=220, help="what one row may take (default 220 s)"
    )
    parser.set_defaults(warmup=1, steps=2)  # because some take half a minute a step
    options = parser.parse_args()
    for system in options.systems:
        if not is_installed(system):
            tell(f"skipped: {SYSTEMS[system]}, because deepspeed is not installed")
    rows = [
        (method, system)
        for method in options.methods
        for system in options.systems
        if is_installed(system)
    ]
    comment = partial(roofline.line, rates=roofline.rates_of(options.ceilings))
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--methods", a, "--systems", b] for a, b in rows], COLUMNS, comment
        )
    if not rows:
        return 0
    ((_, system),) = rows
    with limited(options.limit_s):
        record = run(system, options)
    return measure.run_row(record, COLUMNS, comment)


if __name__ == "__main__":
    sys.exit(main())
