"""The longest sequence that trains at microbatch 1 within a limit of GPU memory: doubling, then
bisection.

A length passes if full steps on it do (forward, backward, update), in a process that has trained
other lengths before and run out of memory on some. The first step of a length is planned from
guesses, the second from what that showed.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import measure
import torch
from engine import Training, add_engine_options, plan_of, settings_of, training
from workload import add_workload_options, describe, workload_of

from roundpipe.errors import PlanError

COLUMNS = ["what", "value", "unit", "setting"]
# A step that runs out of memory has shown by how much, but the next one has its plan already.
TRIES = 3


def longest(
    passes: Callable[[int], bool | None], start: int, resolution: int
) -> tuple[int, int | None]:
    """The longest length known to pass (0: none) and the shortest known not to (None: none was
    found).

    Lengths are ``start`` times or divided by powers of two, then multiples of ``resolution``
    between two of them until those are neighbours. ``passes`` may say None: time is up.
    """
    good, bad, length = 0, None, start
    while True:
        passed = passes(length)
        if passed is None:
            return good, bad
        if passed:
            good = length
        else:
            bad = length
        if bad is None:
            length = 2 * good
        elif good == 0:
            length = bad // 2 if bad > resolution else 0
        else:
            length = good + (bad - good) // 2 // resolution * resolution
        if length in (0, good):
            return good, bad


class Attempts:
    """Tries lengths, one after the other, until the time is up."""

    def __init__(self, trained: Training, vocabulary: int, options: argparse.Namespace) -> None:
        self._trained = trained
        self._vocabulary = vocabulary
        self._steps = options.steps
        self._deadline = time.monotonic() + options.limit_s
        self.made: list[measure.Record] = []

    def passes(self, length: int) -> bool | None:
        began = time.monotonic()
        if began > self._deadline:
            return None
        errors: list[str] = []
        while len(errors) < TRIES and (error := self._error_of(length)) is not None:
            errors.append(error)
            self._recover()
        passed = len(errors) < TRIES
        attempt = {
            "length": length,
            "passed": passed,
            "s": time.monotonic() - began,
            "plan": plan_of(self._trained.engine) if passed else None,
            "errors": errors,
            **measure.peaks(),
        }
        self.made.append(attempt)
        shown = f"passed, plan {attempt['plan']}" if passed else "did not pass"
        print(f"{length:,} tokens, {attempt['s']:.1f} s: {shown}", *errors, sep="\n  ", flush=True)
        return passed

    def _error_of(self, length: int) -> str | None:
        """What kept steps of this length from passing, if it is memory. Keeps nothing of the error,
        whose frames hold tensors."""
        measure.reset_peaks()
        tokens = torch.randint(self._vocabulary, (1, length))
        try:
            for _ in range(self._steps):
                self._trained.step(tokens)
            self._trained.engine.synchronize()
        except (torch.OutOfMemoryError, PlanError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return None

    def _recover(self) -> None:
        """Afterwards nothing of the failed step is left on the device."""
        with suppress(torch.OutOfMemoryError):
            self._trained.engine.synchronize()  # because what failed late is raised once more
        self._trained.engine.zero_grad()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> measure.Record:
    torch._dynamo.config.recompile_limit = 64  # because each length is compiled anew
    workload = workload_of(options)
    with training(workload, "sync", options) as trained:
        attempts = Attempts(trained, workload.config["vocab_size"], options)
        best, too_long = longest(attempts.passes, options.start, options.resolution)
        about = describe(workload, trained.model) | settings_of(trained, options)
    passed = {attempt["length"]: attempt for attempt in attempts.made if attempt["passed"]}.get(
        best, {}
    )
    known = "none longer was tried" if too_long is None else f"{too_long:,} did not pass"
    cap = "all GPU memory" if options.cap_gb is None else f"{options.cap_gb:g} GB"
    grain = f"grain {options.recompute_grain}{', compiled' if options.compile else ''}"
    return {
        "bench": "max_length",
        "what": f"longest sequence: {about['workload']}, {about['method']}",
        "value": best,
        "unit": "tokens",
        "setting": f"{cap}, microbatch 1, {grain}, plan {passed.get('plan', '-')}; {known}",
        **about,
        "length": best,
        "tokens_per_step": best,
        "attempts": attempts.made,
        **{name: value for name, value in passed.items() if name.endswith("_gb")},
        **measure.environment(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_machine_options(parser)
    add_workload_options(parser)
    add_engine_options(parser)
    parser.add_argument("--start", type=int, default=32768, help="the first length tried")
    parser.add_argument(
        "--resolution", type=int, default=8192, help="lengths this near to each other count as one"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps on each length (default 2)")
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="no attempt begins after so many seconds"
    )
    parser.set_defaults(rows=1, num_microbatch=1, recompute_grain="layer")
    options = parser.parse_args()
    if len(options.methods) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--methods", method] for method in options.methods], COLUMNS
        )
    return measure.run_row(run(options), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
