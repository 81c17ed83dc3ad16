"""How long planning takes: `python benchmarks/planning.py [layers]`.

For a model of equal blocks: the first plan of a shape, which a call waits for, and a call whose
plan is known, which pays only for looking it up.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from math import inf

from torch import nn

from roundpipe.autoplan.planner import Planner
from roundpipe.device import VirtualDevice
from roundpipe.memory.pinning import HostMemory
from roundpipe.params.working import ParameterStore
from roundpipe.plan.best import plan_for
from roundpipe.plan.costs import LayerCosts, Workload

MIB = 2**20


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of some runs, in time of this thread: what else the machine does is left out."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(1e3 * (time.thread_time() - start))
    return min(times)


def blocks(count: int) -> LayerCosts:
    """As an 8B model's at 8,192 tokens a microbatch."""
    return LayerCosts(
        forward=(18.5,) * count,
        backward=(41.2,) * count,
        weight_bytes=(416 * MIB,) * count,
        gradient_bytes=(832 * MIB,) * count,
        offloaded_bytes=(416 * MIB,) * count,
        saved_bytes=(1100 * MIB,) * count,
        passing_bytes=(220 * MIB,) * count,
        input_bytes=(64 * MIB,) * count,
        up_ms_per_byte=1 / 50e6,
        down_ms_per_byte=1 / 50e6,
    )


def known_plan_ms(count: int) -> float:
    """A call whose shapes are known, of a model with ten parameters in each layer."""
    layers = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))) for _ in range(count)]
    store = ParameterStore(layers, HostMemory("off", accelerated=False))
    planner = Planner(store, [VirtualDevice(0)], layers=layers)

    def call() -> None:
        planner.plan("fused", 4, None)
        planner.reconsider()

    call()
    return milliseconds(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", type=int, nargs="?", default=100)
    count = parser.parse_args().layers
    print(f"{count} layers: a known plan takes {known_plan_ms(count):.2f} ms; a new one, ms:")
    print("devices  shares  memory  steps  plan")
    for devices, may_share, limit, overlaps in product(
        (1, 2, 8), (False, True), (inf, 20e9), (False, True)
    ):
        if may_share and devices == 1:
            continue
        workload = Workload(
            num_devices=devices,
            num_microbatches=16,
            overlaps=overlaps,
            limit_bytes=limit,
            may_share=may_share,
        )
        ms = milliseconds(
            lambda workload=workload: plan_for("fused", blocks(count), workload), repeats=3
        )  # type: ignore[misc]
        memory, steps = "ample" if limit == inf else "20 GB", "async" if overlaps else "sync"
        print(f"{devices:7}  {'yes' if may_share else 'no':6}  {memory:6}  {steps:5}  {ms:6.1f}")


if __name__ == "__main__":
    main()
