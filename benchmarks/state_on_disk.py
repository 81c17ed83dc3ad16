"""Full fine-tuning with optimizer state on a disk, also where it is larger than the memory allowed.

    python benchmarks/state_on_disk.py --folder /nvme --millions 270          # 3.2 GB of state
    python benchmarks/state_on_disk.py --folder /nvme --memory-gb 2.5         # in a memory cgroup
    python benchmarks/state_on_disk.py --folder none                          # state in memory

Trains square layers of bf16 weights with AdamW. For each step: seconds, bytes read and written, the
bound (bytes over what the disk reads and writes, measured before), anonymous memory, and pages of
the file that this process has in use. --memory-gb puts the process into a memory cgroup of that
size, which takes root and cgroup v1 or v2 with the memory controller; a process that needed more
of its own would be killed. --room-gb is what the engine takes for free memory, of which state may
keep a half: 0 keeps none.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import roundpipe
from roundpipe.step import state_pages

MEASURED_BYTES = 1 << 30
CHUNK_BYTES = 16 << 20


@contextmanager
def confined(gigabytes: float | None) -> Iterator[None]:
    """This process may have so much memory, its pages of files included."""
    if gigabytes is None:
        yield
        return
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), None)
    root = Path("/sys/fs/cgroup") if v1 is None else Path("/sys/fs/cgroup/memory")
    parent = root / (lines[-1][2] if v1 is None else v1).lstrip("/")
    group = parent / f"roundpipe-{os.getpid()}"
    group.mkdir()
    limit = "memory.max" if v1 is None else "memory.limit_in_bytes"
    (group / limit).write_text(str(int(gigabytes * 1e9)))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second read and written, past the cache."""
    path = folder / f"roundpipe-rates-{os.getpid()}"
    chunk = torch.randint(256, (CHUNK_BYTES,), dtype=torch.uint8).numpy()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(MEASURED_BYTES // CHUNK_BYTES):
                file.write(chunk)
            os.fsync(file.fileno())
            written = MEASURED_BYTES / (time.perf_counter() - began)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with path.open("rb", buffering=0) as file:
            began = time.perf_counter()
            while file.readinto(chunk):
                pass
            read = MEASURED_BYTES / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
    return read, written


def counters() -> dict[str, int]:
    """Bytes: read and written so far, anonymous and of files at this moment."""
    found = {}
    for line in Path("/proc/self/io").read_text().splitlines():
        name, number = line.split(": ")
        found[name] = int(number)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Rss"):
            name, number, _ = line.split()
            found[name.rstrip(":")] = 1024 * int(number)
    return found


def train(options: argparse.Namespace, rates: tuple[float, float]) -> None:
    if options.room_gb is not None:
        state_pages.free_host_bytes = lambda: int(options.room_gb * 1e9)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    count = max(1, round(options.millions * 1e6 / options.width**2))
    model = nn.Sequential(
        *(nn.Linear(options.width, options.width, bias=False) for _ in range(count))
    )
    torch.set_default_dtype(torch.float32)
    libraries = counters()["RssFile"]
    began = time.perf_counter()
    with roundpipe.RoundPipe(
        model,
        devices=1,
        optim_dtype=torch.float32,
        pin_model="off",
        optimizer_state_dir=None if options.folder == "none" else options.folder,
    ) as engine:
        made = roundpipe.optim.AdamW if options.optimizer == "ours" else torch.optim.AdamW
        optimizer = made(engine.optim_parameters(), lr=1e-3)
        setting = {
            "state_gb": round(12e-9 * sum(p.numel() for p in model.parameters()), 2),
            "disk_reads_gb_s": round(rates[0] / 1e9, 2),
            "disk_writes_gb_s": round(rates[1] / 1e9, 2),
            "making_masters_s": round(time.perf_counter() - began, 2),
        }
        print(json.dumps(setting), flush=True)
        x = torch.randn(2, options.width).bfloat16()
        # Because what a virtual device holds is in this process's memory.
        stages = [range(layer, layer + 1) for layer in range(count)]
        plan = roundpipe.ModelExecutePlan(fwd_plan=stages[:-1], bwd_plan=stages[::-1])
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
        for step in range(options.steps):
            loss = engine.forward_backward(
                (x,),
                label=x,
                loss_fn=lambda out, y: (out - y).float().square().mean(),
                run_config=config,
            )
            before, began = counters(), time.perf_counter()
            engine.step(optimizer.step, is_async=False)
            engine.synchronize()
            seconds, after = time.perf_counter() - began, counters()
            read, written = (after[key] - before[key] for key in ("read_bytes", "write_bytes"))
            row = {
                "step": step,
                "loss": float(loss),
                "update_s": round(seconds, 2),
                "bound_s": round(read / rates[0] + written / rates[1], 2),
                "read_gb": round(read / 1e9, 2),
                "written_gb": round(written / 1e9, 2),
                "anonymous_gb": round(after["RssAnon"] / 1e9, 2),
                "of_files_gb": round((after["RssFile"] - libraries) / 1e9, 2),
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="outputs/state", help="on a disk, or none")
    parser.add_argument("--millions", type=float, default=270, help="of parameters")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optimizer", choices=["ours", "torch"], default="ours")
    parser.add_argument("--memory-gb", type=float, help="of a memory cgroup for this process")
    parser.add_argument("--room-gb", type=float, help="what the engine takes for free memory")
    options = parser.parse_args()
    is_on_disk = options.folder != "none"
    rates = disk_rates(Path(options.folder)) if is_on_disk else (float("inf"), float("inf"))
    with confined(options.memory_gb):
        train(options, rates)


if __name__ == "__main__":
    main()
