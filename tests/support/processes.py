"""Starts a function of a test in several processes, as torchrun starts a script."""

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  # because it keeps a group that is there when it comes

from tests.support import ROOT

_SECONDS = 400  # most of which a busy machine takes to import what is used


def run_in_processes(
    check: Callable[[], None] | partial[None], folder: Path, count: int = 2
) -> list[tuple[int, str]]:
    """Runs the function in ``count`` processes, in ``folder``; what it is given is spelt as in a
    program. Returns how each has ended and what it has printed."""
    function, given = (check.func, check.args) if isinstance(check, partial) else (check, ())
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch; torch.set_num_threads(1)\n"
        "from tests.support.processes import end_groups\n"
        f"from {function.__module__} import {function.__name__} as check; check(*{given!r})\n"
        "end_groups()"
    )
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [process.communicate(timeout=_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]


def check_in_processes(
    check: Callable[[], None] | partial[None], folder: Path, count: int = 2
) -> None:
    """The function raises in none of them."""
    ended = run_in_processes(check, folder, count)
    assert [code for code, _ in ended] == [0] * count, "\n".join(text for _, text in ended)


def end_groups() -> None:
    """Because threads of gloo's that still let go of tensors when the interpreter goes away abort
    the process. They end with their group, which ends when nothing refers to it any more; where
    something does, as Accelerate's state, the process ends without the interpreter's end."""
    if dist.is_initialized() and dist.get_backend() != "gloo":
        return
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if threads_of_gloo():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def threads_of_gloo() -> list[str]:
    """The names of this process's."""
    names = [entry.read_text().strip() for entry in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]
