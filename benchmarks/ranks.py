"""Several processes beside one on the same devices: tokens per second of all together.

    python benchmarks/ranks.py --ranks 2   # 2 processes x 1 GPU, beside 1 process x 2 GPUs

``ranks`` add up gradients while the backward runs, ``ranks-late`` in the step. The rows, their
microbatches and the loss are the same in all.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import measure
import torch
import torch.distributed as dist
from engine import Training, add_engine_options, inputs_of, settings_of, training
from torch import Tensor
from workload import Workload, add_workload_options, describe, make_tokens, workload_of

COLUMNS = [
    "method", "processes", "mode", "tokens_per_s", "step_s", "devices", "backend",
    "gpu_peak_allocated_gb", "host_peak_rss_gb", "loss_first", "loss_last",
]  # fmt: skip
KINDS = ["alone", "ranks", "ranks-late"]


def run(options: argparse.Namespace) -> measure.Record | None:
    """The record of this row; None on other ranks than the first."""
    (mode,), (kind,) = options.modes, options.kinds
    is_alone = kind == "alone"
    rank, ranks = (0, 1) if is_alone else _join()
    options.devices = options.ranks if is_alone else None
    options.threads = max(1, options.threads // ranks)
    workload = workload_of(options)
    own = replace(workload, num_microbatch=max(1, workload.num_microbatch // ranks))
    tokens = make_tokens(workload).chunk(ranks)[rank]
    with training(
        own, mode, options, process_group=None if is_alone else dist.group.WORLD
    ) as trained:
        timed = measure.time_steps(
            lambda: _step(trained, tokens, workload, is_last=kind == "ranks"),
            warmup=options.warmup,
            steps=options.steps,
        )
        record = {
            "bench": "ranks",
            "processes": f"{ranks}, sums in the step" if kind == "ranks-late" else str(ranks),
            "mode": mode,
            "backend": "-" if is_alone else dist.get_backend(),
            **settings_of(trained, options),
            **describe(workload, trained.model),
            **timed,
            **measure.peaks(),
            **measure.environment(),
        }
        trained.engine.synchronize()  # because until then the optimizer thread talks
        for name, combine in _OF_ALL.items():
            where = "adding up a row"
            (record[name],) = trained.engine.ranks.combined([record[name]], combine, where)
    record["tokens_per_s"] = workload.tokens_per_step / record["step_s"]
    return record if rank == 0 else None


_OF_ALL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "step_s": torch.maximum,
    "loss_first": torch.add,
    "loss_last": torch.add,
    "host_peak_rss_gb": torch.add,
}


def _join() -> tuple[int, int]:
    """Joins the group as a program that torchrun starts does."""
    if torch.cuda.is_available():
        torch.cuda.set_device(measure.local_rank())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size()


def _step(trained: Training, tokens: Tensor, workload: Workload, *, is_last: bool) -> Tensor:
    """The loss is this process's share of the mean over all predictions."""
    inputs = inputs_of(tokens) | {"num_items_in_batch": torch.tensor(workload.predictions_per_step)}
    loss: Tensor = trained.engine.forward_backward(input_kwargs=inputs, is_last=is_last)
    trained.engine.step(trained.update, is_async=trained.is_async)
    return loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    add_engine_options(parser)
    parser.add_argument("--ranks", type=int, default=2, help="processes, and devices in all")
    parser.add_argument("--modes", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--is-row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.is_row:
        record = run(options)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0 if record is None else measure.run_row(record, COLUMNS)
    rows = [
        (kind, [*sys.argv[1:], "--is-row", "--methods", method, "--modes", mode, "--kinds", kind])
        for method in options.methods
        for mode in options.modes
        for kind in options.kinds
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return measure.run_rows(
        [row for _, row in rows],
        COLUMNS,
        launchers=[[] if kind == "alone" else [*launcher, str(options.ranks)] for kind, _ in rows],
    )


if __name__ == "__main__":
    sys.exit(main())
