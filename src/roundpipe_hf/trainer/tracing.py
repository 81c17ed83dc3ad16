"""Timelines of a few steps of a run, for ``trace_dir``."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe import profile
from roundpipe.errors import ConfigError

from ..arguments import pipeline_of

if TYPE_CHECKING:
    from roundpipe.trace.profile import Profile

    from .mixin import RoundPipeTrainerMixin

logger = logging.getLogger(__name__)
# Steps before are planned from guesses, compile, and make memory.
TRACED = range(3, 6)


class StepTraces:
    """Records steps 3 to 5 of each run into ``trace_dir``. Used by the user's thread."""

    def __init__(self, trainer: "RoundPipeTrainerMixin") -> None:
        self._trainer = trainer
        self._file: Path | None = None
        self._recording = ExitStack()
        self._profile: Profile | None = None
        self._steps = self._last = 0  # of the run that are over, and what Trainer calls the last

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """A run of the Trainer's goes on inside. If it ends early, what was recorded is written.

        Raises:
            ConfigError: the folder can be neither made nor written to; no step was taken.
        """
        folder = pipeline_of(self._trainer.args).trace_dir
        if folder is None:
            yield
            return
        self._file, self._steps, self._last = self._made(Path(folder)), 0, -1
        try:
            yield
        finally:
            if self._profile is None and self._steps < TRACED.start:
                logger.warning(
                    "trace_dir: the run ended after step %d, before step %d, with which timelines "
                    "begin; none was written",
                    self._steps,
                    TRACED.start,
                )
            self._write()
            self._file = None

    def _made(self, folder: Path) -> Path:
        rank, count = self._trainer.args.process_index, self._trainer.args.world_size
        whose = f"-rank{rank}" if count > 1 else ""
        file = folder / f"steps-{TRACED[0]}-{TRACED[-1]}{whose}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(
                f"trace_dir: {file} cannot be written ({error.strerror}); give a folder that can be"
            ) from error
        return file

    def step_over(self) -> None:
        """A step was handed over, or an epoch is over."""
        if self._file is None or self._trainer.state.global_step == self._last:
            return
        self._steps, self._last = self._steps + 1, self._trainer.state.global_step
        if self._steps == TRACED.start - 1:
            self._end_update()
            self._profile = self._recording.enter_context(profile())
        elif self._steps == TRACED[-1]:
            self._end_update()
            self._write()

    def _end_update(self) -> None:
        """So that a step's own update is recorded with it. Asynchronous updates stay on their way,
        because the next step would else see newer weights than without a trace."""
        if not pipeline_of(self._trainer.args).async_optimizer:
            self._trainer.synchronize()

    def _write(self) -> None:
        profiled, self._profile = self._profile, None
        if profiled is None:
            return
        self._recording.close()
        assert self._file is not None
        profiled.export(self._file)
        logger.info("a timeline is in %s: python -m roundpipe timeline %s", self._file, self._file)
