"""``python -m roundpipe plan``, ``doctor``, ``bench``, ``timeline`` and ``explain``."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from ..errors import ConfigError, RoundPipeError
from ..system.sizes import in_gb
from ..trace import summary, table
from ..trace.plot import figure_of, save
from .doctor import COLUMNS, examine
from .estimate import estimate
from .explain import explain
from .machine import Machine
from .measure import cells, check_writable, keep, measure, measured_machine
from .table import as_json as table_as_json
from .table import show_estimates
from .ways import MADE_FROM_DENSE, OPTIMIZERS

_ABOUT = """\
Says what training a model would take on a machine, and how long a step would be, for each way to
train that fits, best first. Of the model only its config.json is read; nothing is loaded.

A way is its quantization, whether steps are asynchronous, its optimizer and pin_model. Then come
the milliseconds of a step and its tokens a second. What it is bound by is compute, the link, the
disk, the optimizer, or memory, where devices compute again what they could not keep. More
microbatches than the default are tried too, unless --num-microbatch says how many. Sizes are in GB,
disk that of the weights' files and of their quantized copy where one is made; up and down is what
passes the link in a step. VRAM and RAM are peaks, with 0.6 GB that CUDA takes of a device and 1 GB
that Python and its libraries take of the host. Times come from operations and bytes at the rates
that --tflops, --link, --host, --cores and --disk state: left out, those that `bench` has measured
here, or modest ones. Checkpoints take disk on top.
"""
_DOCTOR = """Looks at devices, drivers, links (measured), page-locking, the compiler, cores, host
memory and its limits, and says what will be slow and why. Exit status 1 if there is something."""
_BENCH = """Measures what matrix products reach, the links to and from each device, all at once, and
an update of AdamW on the host, in less than two minutes. Plans use what it finds, kept in the
user's cache, unless options say otherwise. Without a GPU they use only what is the host's."""
_TIMELINE = """Says of an exported profile how busy each lane of each device and each thread was,
how long at most it was idle, and what bounds the step."""
_EXPLAIN = """Prints what the troubleshooting guide says about an error's name, a piece of its text
or a symptom; all of the guide where nothing is named."""

_BROKEN_PIPE = 128 + 13
_RANK = 16  # no default of argparse's, which overlooks that who names it has also said --full


def run(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 after an error, which is said on stderr in one line; 1 where the
    doctor has found something; a shell's of a broken pipe where nobody reads on."""
    if sys.stdout is None:  # closed by who has started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    name = "--help"  # ends the process, else there is a command
    try:
        with warnings.catch_warnings():
            # Libraries call each other by old names, or in vain, and who types a command cannot
            # change that.
            for kind in (FutureWarning, RuntimeWarning):
                warnings.simplefilter("ignore", kind)
            try:
                options = vars(_parser().parse_args(arguments))
                name = options.pop("command")
                return _COMMANDS[name](**options)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:  # `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left, at exit
        return _BROKEN_PIPE
    except RoundPipeError as error:
        said = " ".join(str(error).split())
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        said = "interrupted"
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}; please report it"
    print(f"roundpipe {name}: {said}", file=sys.stderr)
    return 2


def _plan(
    *, model: str, full: bool, rows: int, as_json: bool, assumed: bool, **options: Any
) -> int:
    measured = {} if assumed else measured_machine()
    for field in fields(Machine):
        if options[field.name] is None:
            options[field.name] = measured.get(field.name, field.default)
    if options["lora"] is None and not full:
        options["lora"] = _RANK
    if rows < 1:
        raise ConfigError(f"--rows is {rows}; give at least 1")
    found = estimate(model, **options)
    if as_json:
        print(table_as_json(found))
        return 0
    how = "all weights" if full else f"LoRA of rank {options['lora']}"
    title = (
        f"{model}, {how}, {options['batch']} x {options['seq']} tokens on "
        f"{options['gpus']} x {in_gb(options['gpu_memory'])}, {in_gb(options['ram'])} of RAM"
    )
    show_estimates(title, found[:rows])
    if not measured and not assumed:
        print("Rates are assumed where none is given: python -m roundpipe bench measures yours")
    return 0


def _doctor() -> int:
    found = examine()
    table.show("This machine", COLUMNS, [each.cells for each in found])
    slow = [each.what for each in found if each.slow]
    print(f"To look at: {', '.join(slow)}" if slow else "Nothing to look at")
    return 1 if slow else 0


def _bench() -> int:
    path = check_writable()
    found = measure()
    keep(found, path)
    table.show("This machine", ("what", "measured"), cells(found))
    print(f"Plans use this by default; it is in {path}")
    return 0


def _timeline(*, trace: str, plot: str | None) -> int:
    blocks = summary.read(trace)
    if plot is not None:
        save(figure_of(blocks), plot)
    found = summary.summarize(blocks)
    table.show(f"{trace}: {found.title}", summary.COLUMNS, found.rows)
    print(found.verdict())
    return 0


def _explain(*, text: list[str]) -> int:
    print(explain(" ".join(text)))
    return 0


_COMMANDS: dict[str, Callable[..., int]] = {
    "plan": _plan,
    "doctor": _doctor,
    "bench": _bench,
    "timeline": _timeline,
    "explain": _explain,
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every command does, without all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help says more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m roundpipe")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    commands.add_parser("doctor", help="what of this machine is slow, and why", description=_DOCTOR)
    commands.add_parser("bench", help="measures this machine, for plans", description=_BENCH)
    timeline = commands.add_parser(
        "timeline", help="what a step waited for, by an exported profile", description=_TIMELINE
    )
    timeline.add_argument("trace", help="a file that roundpipe.profile() has exported")
    timeline.add_argument("--plot", metavar="FILE", help="draw it, for example into a .png")
    about = commands.add_parser(
        "explain", help="what an error means, and what to do", description=_EXPLAIN
    )
    about.add_argument("text", nargs="*", help="such as ConfigError, or words of its text")
    return parser


def _add_plan(commands: Any) -> None:
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
        metavar="RANK",
        help=f"train adapters of that rank on all linear layers but the head ({_RANK})",
    )
    trains.add_argument("--full", action="store_true", help="train all weights")
    batch = plan.add_argument_group("the batch")
    batch.add_argument("--seq", type=int, default=2048, help="tokens of a row (%(default)s)")
    batch.add_argument("--batch", type=int, default=8, help="rows of a step (%(default)s)")
    batch.add_argument("--num-microbatch", type=int, help="else the number of GPUs + 1")
    _add_machine(plan.add_argument_group("the machine"))
    _add_ways(plan.add_argument_group("only ways with", "Left out, all are tried."))
    said = plan.add_argument_group("what is printed")
    said.add_argument("--rows", type=int, default=8, metavar="N", help="so many ways (%(default)s)")
    said.add_argument(
        "--json", dest="as_json", action="store_true", help="everything about all ways, as JSON"
    )


def _add_machine(group: Any) -> None:
    group.add_argument(
        "--assumed", action="store_true", help="as if `bench` had measured nothing here"
    )
    default = Machine(**measured_machine())
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
        value = getattr(default, name)
        said = f"{value:.1f}" if isinstance(value, float) else value
        group.add_argument(flag, type=kind, help=f"{about} ({said})")


def _add_ways(ways: Any) -> None:
    ways.add_argument("--quantization", choices=("none", *MADE_FROM_DENSE))
    ways.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="adamw, and where all weights train its states in bf16 and 8 bits",
    )
    when = ways.add_mutually_exclusive_group()
    for flag, is_async, about in (
        ("--async", True, "updates run behind the next step"),
        ("--no-async", False, "updates run before the next step"),
    ):
        when.add_argument(
            flag, dest="async_optimizer", action="store_const", const=is_async, help=about
        )
    ways.add_argument(
        "--pin-model", choices=("alloc", "off"), help="'off': frozen weights stay in their files"
    )
    ways.add_argument(
        "--optimizer-state-dir", metavar="FOLDER", help="optimizer state on the disk, not in RAM"
    )
