"""Starts a function of a test in several processes, as torchrun starts a script."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
        f"from {function.__module__} import {function.__name__} as check; check(*{given!r})\n"
        # Because threads of gloo's that still hold tensors when the interpreter goes away abort the
        # process.
        "import torch.distributed as dist\n"
        "if dist.is_initialized() and dist.get_backend() == 'gloo': dist.destroy_process_group()"
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
