"""``python -m roundpipe plan``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, RoundPipeError
from .estimate import estimate
from .machine import Machine
from .table import as_json, show
from .ways import MADE_FROM_DENSE, OPTIMIZERS

_ABOUT = """\
Says what training a model would take on a machine, and how long a step would be, for each way to
train that fits, best first. Of the model only its config.json is read; nothing is loaded.

A way is its quantization, whether steps are asynchronous, its optimizer and pin_model. Then come
the milliseconds of a step and its tokens a second. What it is bound by is compute, the link, the
optimizer, or memory, where devices compute again what they could not keep. Sizes are in GB, disk
that of the weights' files and of their quantized copy where one is made; up and down is what passes
the link in a step. VRAM and RAM are peaks, with 0.6 GB that
CUDA takes of a device and 1 GB that Python and its libraries take of the host. Times come from
operations and bytes at the rates that --tflops, --link, --host, --cores and --disk state: measure
yours for better ones. Checkpoints take disk on top.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 after an error, which is said on stderr."""
    given = _parser().parse_args(arguments)
    options = vars(given)
    model, wants_json = options.pop("model"), options.pop("json")
    is_full, rows = options.pop("full"), options.pop("rows")
    options.pop("command")
    options["lora"] = None if is_full else options["lora"]
    try:
        if rows < 1:
            raise ConfigError(f"--rows is {rows}; give at least 1")
        found = estimate(model, **options)
    except RoundPipeError as error:
        print(f"roundpipe plan: {error}", file=sys.stderr)
        return 2
    if wants_json:
        print(as_json(found))
    else:
        how = "all weights" if is_full else f"LoRA of rank {options['lora']}"
        title = (
            f"{model}, {how}, {options['batch']} x {options['seq']} tokens on "
            f"{options['gpus']} x {options['gpu_memory']}, {options['ram']} of RAM"
        )
        show(title, found[:rows])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m roundpipe")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="what training a model would take, before it is loaded",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("model", help="a folder with a config.json, such as that of a checkpoint")
    trains = plan.add_mutually_exclusive_group()
    trains.add_argument(
        "--lora",
        type=int,
        default=16,
        metavar="RANK",
        help="train adapters of that rank on all linear layers but the head (16)",
    )
    trains.add_argument("--full", action="store_true", help="train all weights")
    batch = plan.add_argument_group("the batch")
    batch.add_argument("--seq", type=int, default=2048, help="tokens of a row (%(default)s)")
    batch.add_argument("--batch", type=int, default=8, help="rows of a step (%(default)s)")
    batch.add_argument("--num-microbatch", type=int, help="else the number of GPUs + 1")
    _add_machine(plan.add_argument_group("the machine"))
    ways = plan.add_argument_group("only ways with", "Left out, all are tried.")
    ways.add_argument("--quantization", choices=("none", *MADE_FROM_DENSE))
    ways.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="adamw, and where all weights train its states in bf16 and 8 bits",
    )
    ways.add_argument(
        "--async",
        dest="async_optimizer",
        action=argparse.BooleanOptionalAction,
        help="whether updates run behind the next step",
    )
    ways.add_argument(
        "--pin-model", choices=("alloc", "off"), help="'off': frozen weights stay in their files"
    )
    ways.add_argument(
        "--optimizer-state-dir", metavar="FOLDER", help="optimizer state on the disk, not in RAM"
    )
    said = plan.add_argument_group("what is printed")
    said.add_argument("--rows", type=int, default=8, metavar="N", help="so many ways (%(default)s)")
    said.add_argument("--json", action="store_true", help="everything about all ways, as JSON")
    return parser


def _add_machine(group: Any) -> None:
    default = Machine()
    for name, kind, about in (
        ("gpus", int, "how many"),
        ("gpu_memory", str, "of each GPU"),
        ("ram", str, "of the host"),
        ("link", float, "GB/s to and from each GPU, page-locked"),
        ("tflops", float, "10^12 operations a second that matrix products reach"),
        ("host", float, "GB/s that an update reads and writes host memory with"),
        ("cores", int, "that an update has"),
        ("disk", float, "GB/s that files are read with"),
    ):
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, type=kind, default=getattr(default, name), help=f"{about} (%(default)s)"
        )
