"""What this machine can do at most, in the four things a step is made of: matmul, transfer, host
copy, host AdamW."""

import argparse
import sys
import time
from collections.abc import Callable

import measure
import torch

from roundpipe.system.cores import usable_cores

GB = 1e9
COLUMNS = ["what", "value", "unit", "setting"]


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of three rounds of ``repeats``, after one unmeasured call: a ceiling, not an
    average."""
    work()
    rounds = []
    for _ in range(3):
        measure.wait_device()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        measure.wait_device()
        rounds.append((time.perf_counter() - start) / repeats)
    return min(rounds)


def matmul(size: int, repeats: int) -> measure.Record:
    device = measure.compute_device()
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    elapsed = seconds(lambda: a @ b, repeats)
    return {
        "what": "bf16 matmul",
        "value": 2 * size**3 / elapsed / 1e12,
        "unit": "TFLOP/s",
        "setting": f"{size}^3, random",
    }


def transfers(num_bytes: int, repeats: int) -> list[measure.Record]:
    """Pinned host memory to the device and back, alone and both at once. Nothing to measure without
    a GPU."""
    if not torch.cuda.is_available():
        return []
    host_up, host_down = (
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
    )
    card_up, card_down = (
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    up_stream, down_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def up() -> None:
        with torch.cuda.stream(up_stream):
            card_up.copy_(host_up, non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(down_stream):
            host_down.copy_(card_down, non_blocking=True)

    def both() -> None:
        up()
        down()

    setting = f"{num_bytes / GB:.2g} GB, pinned"
    return [
        {
            "what": what,
            "value": num_bytes / seconds(work, repeats) / GB,
            "unit": "GB/s",
            "setting": setting,
        }
        for what, work in (("H2D", up), ("D2H", down), ("H2D and D2H at once, each", both))
    ]


def host_copy(num_bytes: int, repeats: int) -> measure.Record:
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    elapsed = seconds(lambda: target.copy_(source), repeats)
    return {
        "what": "host copy", "value": 2 * num_bytes / elapsed / GB, "unit": "GB/s read + written",
        "setting": f"{num_bytes / GB:.2g} GB, {torch.get_num_threads()} threads",
    }  # fmt: skip


def host_adamw(num_params: int, repeats: int) -> measure.Record:
    """torch's fused CPU kernel: fp32 weight, gradient and moments, 28 bytes of traffic a
    parameter."""
    parameter = torch.zeros(num_params, requires_grad=True)
    parameter.grad = torch.ones(num_params)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    elapsed = seconds(optimizer.step, repeats)
    return {
        "what": "host AdamW (torch fused)", "value": num_params / elapsed / 1e9,
        "unit": "G params/s",
        "setting": f"{num_params / 1e6:.0f} M params fp32, {torch.get_num_threads()} threads",
    }  # fmt: skip


def main() -> int:
    cores = usable_cores()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=10, help="repeats in each of three rounds (default 10)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, cores * 3 // 4),
        help="host threads (default 3/4 of cores)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the script on a CPU"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    big, tiny = options.steps, options.tiny
    results = [
        matmul(512 if tiny else 8192, big),
        *transfers(2**20 if tiny else 2**30, big),
        host_copy(2**22 if tiny else 2**31, big),
        host_adamw(2**18 if tiny else 2**28, big),
    ]
    shared = {"workload": "tiny" if tiny else "full size", **measure.environment()}
    records = [{"bench": "ceilings", **result, **shared} for result in results]
    for record in records:
        measure.emit(record)
    print(f"\n{measure.table(records, COLUMNS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
