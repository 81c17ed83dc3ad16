"""Host bytes per parameter of full fine-tuning: bf16 weights, fp32 masters, AdamW; clipping on. For
each way to step.

    python benchmarks/host_memory.py                 # on virtual devices
    python benchmarks/host_memory.py --device cuda   # on a GPU

Each setting trains for some steps in a process of its own; what counts is the most memory it ever
had (anonymous and shared pages, looked at every few milliseconds), less what it had before the
model was made. A virtual device's slots and sums are host memory too: layers are many and visited
one by one, so that they are small beside the rest, and are left in the figure. Asynchronous figures
have up to 2 bytes more where an update is so slow that the next call's gradients offload beside
those it still reads.
"""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path

import measure
import torch
from torch import nn

import roundpipe
from roundpipe.step import write_back

MODES = {
    "sync": "synchronous",
    "async": "asynchronous, two working copies",
    "lean": "asynchronous, one working copy",
}
LIMITS = {"sync": 16.5, "async": 20.5, "lean": 18.5}
STEPS = 6


class Block(nn.Module):
    """A layer as wide as it must be for the number of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def resident_bytes() -> int:
    """Pages of this process that are no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem"))


class Peak(threading.Thread):
    """Looks every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, resident_bytes())

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.most


def peak_bytes(mode: str, device: str, num_layers: int, width: int) -> float:
    """Bytes per parameter. Called in a process that has done nothing else."""
    if mode == "lean":
        write_back.free_host_bytes = lambda: 0
    torch.set_num_threads(2)
    devices = 1 if device == "virtual" else [torch.device(device)]
    warm_up(devices)
    before = resident_bytes()
    peak = Peak()
    peak.start()
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Sequential(*(Block(width) for _ in range(num_layers)))
    torch.set_default_dtype(torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    train(model, devices, num_layers, STEPS, is_async=mode != "sync")
    return (peak.stop() - before) / count


def warm_up(devices: object) -> None:
    """What every process has once: libraries, the compiled kernel, a thread's buffers."""
    train(nn.Sequential(Block(64), Block(64)).bfloat16(), devices, 2, 2, is_async=True)


def train(
    model: nn.Sequential, devices: object, num_layers: int, steps: int, *, is_async: bool
) -> None:
    width = model[0].linear.in_features
    with roundpipe.RoundPipe(model, optim_dtype=torch.float32, devices=devices) as engine:
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-3)
        stages = [range(index, index + 1) for index in range(num_layers)]
        plan = roundpipe.ModelExecutePlan(fwd_plan=stages[:-1], bwd_plan=stages[::-1])

        def update() -> None:
            roundpipe.clip_grad_norm_(engine, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        x = torch.randn(2, width).bfloat16()
        for _ in range(steps):
            engine.forward_backward(
                (x,),
                label=x,
                loss_fn=lambda outputs, target: (outputs - target).float().square().mean() / 2,
                run_config=roundpipe.RoundPipeRunConfig(num_microbatch=2, execute_plan=plan),
            )
            engine.step(update, is_async)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="virtual", help="virtual, or for example cuda")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--mode", choices=MODES, help="one only, in this process")
    settings = parser.parse_args()
    if settings.mode is not None:
        print(f"{peak_bytes(settings.mode, settings.device, settings.layers, settings.width):.2f}")
        return
    for mode, text in MODES.items():
        sizes = [
            "--device",
            settings.device,
            "--layers",
            str(settings.layers),
            "--width",
            str(settings.width),
        ]
        command = [sys.executable, __file__, "--mode", mode, *sizes]
        # A virtual device's temporaries come from malloc, which would keep some of them for later.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        figure = done.stdout.split()[-1]
        print(f"{text:36} {figure:>6} bytes per parameter (at most {LIMITS[mode]})", flush=True)
        size = f"{settings.layers} layers of {settings.width}^2, {settings.device} device"
        measure.emit(
            {
                "bench": "host_memory", "what": text, "value": float(figure),
                "unit": "bytes per parameter", "setting": f"at most {LIMITS[mode]}; {size}",
                "workload": "full size", **measure.environment(),
            }
        )  # fmt: skip


if __name__ == "__main__":
    main()
