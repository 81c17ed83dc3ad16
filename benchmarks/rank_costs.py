"""Measures what several processes of one model send and keep, against the formulas of
docs/scale-out.md.

    python benchmarks/rank_costs.py traffic --rate 200mbit  # two hosts, as network namespaces; root
    python benchmarks/rank_costs.py memory --ranks 1 2 4    # anonymous memory of each rank
    python benchmarks/rank_costs.py table                   # calculated for up to 64 nodes

`traffic` joins two namespaces by a pair of interfaces of limited rate, trains one process in each,
counts the bytes that leave, and compares the weights with those of a single process. All run on the
CPU.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

INTERFACE = "rp0"  # in both namespaces
ADDRESSES = ("10.231.77.1", "10.231.77.2")
ROWS, LR = 8, 1e-2


def sent_bytes(params: float, ranks: int, *, sum_bytes: int = 4, weight_bytes: int) -> float:
    """Returns what each rank sends, and receives, in a step."""
    return (sum_bytes + weight_bytes) * params * (ranks - 1) / ranks


def state_bytes(
    params: float, ranks: int, *, master_bytes: int = 4, moment_bytes: int = 8, weight_bytes: int
) -> float:
    """Returns what each rank keeps for masters and moments."""
    owned = (master_bytes + moment_bytes) * params / ranks
    return owned + weight_bytes * params * (ranks - 1) / ranks


def efficiency(compute_s: float, talk_s: float, update_s: float) -> tuple[float, float]:
    """The share of its time that a rank computes, with synchronous and with asynchronous steps."""
    return compute_s / (compute_s + talk_s), compute_s / max(compute_s, talk_s + update_s)


def table(
    params: float, weight_bytes: int, compute_s: float, update_s: float, gbit: float
) -> list[str]:
    """Rows of docs/scale-out.md. ``update_s``: of all masters; each rank updates its own."""
    lines = []
    for ranks in (2, 4, 16, 64):
        sent = sent_bytes(params, ranks, weight_bytes=weight_bytes)
        talk_s = sent / (gbit * 1e9 / 8)
        sync, is_async = efficiency(compute_s, talk_s, update_s / ranks)
        lines.append(
            f"| {ranks} | {sent / 1e9:.0f} GB | {talk_s:.1f} s | {sync:.0%} | {is_async:.0%} |"
        )
    return [line.replace("%", " %") for line in lines]


# One rank.


def train(options: argparse.Namespace) -> None:
    """One rank's steps on its own rows; writes what it has measured, and its weights."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import roundpipe

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    model = nn.Sequential(
        *(nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers))
    )
    for weight in model.parameters():
        nn.init.orthogonal_(weight)  # by which gradients are of the size of one
    model.to(dtype)
    before = anonymous()
    # No name for the group, because that would keep its threads when it ends.
    engine = roundpipe.RoundPipe(
        model, torch.float32, devices=1, process_group=dist.group.WORLD if ranks > 1 else None
    )
    # Against a smaller eps the rounding of a gradient near zero would be a whole step.
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=LR, eps=0.1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    own = slice(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
    steps = []
    for step in range(options.steps):
        x = torch.randn(ROWS, options.width, generator=torch.Generator().manual_seed(step))
        began, sent = time.perf_counter(), transmitted()
        engine.forward_backward(
            (x[own].to(dtype),), loss_fn=lambda out, _: out.float().square().sum() / ROWS
        )
        engine.step(update, is_async=False)
        engine.parameters()  # waits until the weights are there
        steps.append({"s": time.perf_counter() - began, "sent": transmitted() - sent})
    engine.close()  # with which its last step has ended, and let go of its gradients
    kept = anonymous() - before
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if ranks > 1:
        dist.destroy_process_group()
    torch.save(weights, f"{options.out}/weights-{rank}")
    Path(options.out, f"rank-{rank}").write_text(json.dumps({"steps": steps, "kept": kept}))


def anonymous() -> int:
    """Bytes of memory that no file has."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/smaps_rollup has no line on anonymous memory")


def transmitted() -> int:
    """Bytes that have left through the interface to the other host; 0 where there is none."""
    path = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else 0


# All of them.


def launch(
    out: Path, shape: dict[str, Any], ranks: int, prefixes: Sequence[Sequence[str]] = ()
) -> list[dict[str, Any]]:
    """Returns what each rank has measured. ``prefixes`` start a program on each one's host."""
    address = ADDRESSES[0] if prefixes else "localhost"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    given = {**shape, "out": out}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    # So that what is freed is given back, and is not counted.
    common["MALLOC_MMAP_THRESHOLD_"] = "65536"
    if prefixes:
        common["GLOO_SOCKET_IFNAME"] = INTERFACE
    started = [
        subprocess.Popen(
            [*(prefixes[rank] if prefixes else ()), sys.executable, __file__, "rank", *flags],
            env={**os.environ, **common, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}; see above")
    return [json.loads(Path(out, f"rank-{rank}").read_text()) for rank in range(ranks)]


def why_no_namespaces() -> str | None:
    """Says what this machine lacks for two hosts of network namespaces; None if it has all."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} (iproute2)"
    name = f"rp-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no right to make a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@contextmanager
def two_hosts(rate: str) -> Iterator[list[list[str]]]:
    """Yields what starts a program on either of two hosts, joined by a link of ``rate``."""
    names = [f"rp-{os.getpid()}-{host}" for host in range(2)]
    with ExitStack() as undone:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            # With its end of the link, as the last one that holds it.
            undone.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ends = ["type", "veth", "peer", "name", INTERFACE, "netns", names[1]]
        make = ["ip", "link", "add", "name", INTERFACE, "netns", names[0], *ends]
        subprocess.run(make, check=True)
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", INTERFACE], check=True)
            for link in ("lo", INTERFACE):
                subprocess.run([*inside, "link", "set", link, "up"], check=True)
            limit = ["tbf", "rate", rate, "burst", "128kb", "latency", "400ms"]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limit], check=True
            )
        yield [["ip", "netns", "exec", name] for name in names]


def traffic(rate: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Bytes and seconds of a step between two hosts, and how far their weights are from those of a
    single process."""
    import torch

    params, is_fp32 = shape["layers"] * shape["width"] ** 2, shape["dtype"] == "float32"
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder, "alone"), Path(folder, "together")
        alone.mkdir()
        together.mkdir()
        with two_hosts(rate) as prefixes:
            ranks = launch(together, shape, 2, prefixes)
        launch(alone, shape, 1)
        expected = torch.load(alone / "weights-0")
        far = 0.0
        for rank in range(2):
            for name, weight in torch.load(together / f"weights-{rank}").items():
                far = max(far, float((weight.float() - expected[name].float()).abs().max()))
    later = [step for rank in ranks for step in rank["steps"][1:]]
    return {
        "formula_bytes": sent_bytes(params, 2, weight_bytes=4 if is_fp32 else 2),
        "sent_bytes": [min(s["sent"] for s in later), max(s["sent"] for s in later)],
        "step_s": min(step["s"] for step in later),
        "weights_apart": far,
    }


def memory(counts: Sequence[int], shape: dict[str, Any]) -> list[dict[str, Any]]:
    """Anonymous bytes of a rank, what the formula says of its state, and by how much both fall
    below those of one process."""
    params, weight_bytes = shape["layers"] * shape["width"] ** 2, 2
    rows: list[dict[str, Any]] = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            kept = max(rank["kept"] for rank in launch(Path(folder), shape, count))
        formula = state_bytes(params, count, weight_bytes=weight_bytes)
        rows.append({"ranks": count, "anonymous": kept, "formula": formula})
    for row in rows:
        row["saved"] = rows[0]["anonymous"] - row["anonymous"]
        row["saved_by_formula"] = rows[0]["formula"] - row["formula"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    of = {name: commands.add_parser(name) for name in ("traffic", "memory", "table", "rank")}
    # As docs/scale-out.md has them.
    for name, dtype, layers, width, steps in (
        ("traffic", "float32", 8, 512, 3),
        ("memory", "bfloat16", 32, 1024, 2),
        ("rank", "float32", 8, 512, 3),
    ):
        of[name].add_argument("--layers", type=int, default=layers)
        of[name].add_argument("--width", type=int, default=width)
        of[name].add_argument("--steps", type=int, default=steps)
        of[name].add_argument("--dtype", choices=["float32", "bfloat16"], default=dtype)
    of["traffic"].add_argument("--rate", default="200mbit", help="as tc takes it")
    of["memory"].add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    of["rank"].add_argument("--out", required=True)
    of["table"].add_argument("--params", type=float, default=7e9)
    of["table"].add_argument("--weight-bytes", type=int, default=2)
    of["table"].add_argument("--compute-s", type=float, default=60.0, help="of a step, measured")
    of["table"].add_argument("--update-s", type=float, default=5.0, help="of all, in one process")
    of["table"].add_argument("--gbit", type=float, default=25.0)
    options = parser.parse_args()
    if options.command == "rank":
        train(options)
        return
    if options.command == "table":
        print("| ranks | sent by each | X | efficiency, sync | efficiency, async |")
        print("| --- | --- | --- | --- | --- |")
        of_table = (options.params, options.weight_bytes, options.compute_s, options.update_s)
        print("\n".join(table(*of_table, options.gbit)))
        return
    shape = {name: getattr(options, name) for name in ("layers", "width", "steps", "dtype")}
    if options.command == "memory":
        for row in memory(options.ranks, shape):
            print(json.dumps(row))
        return
    why = why_no_namespaces()
    if why is not None:
        parser.error(why)
    print(json.dumps(traffic(options.rate, shape)))


if __name__ == "__main__":
    main()
