"""The part of the mixin that writes and reads checkpoints. Hooks only; the files are
checkpointing.py's."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe import GradScaler

from ..arguments import pipeline_of
from ..compat import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    rotate_checkpoints,
)
from ..engine.optimizer import unwrapped
from .checkpointing import (
    RNG_NAME,
    has_shards,
    load_device_rng,
    load_masters,
    load_shards,
    save_device_rng,
    save_masters,
    save_shards,
    whole_folder,
)
from .evaluation import EvaluationMixin


class SavingMixin(EvaluationMixin):
    scaler: GradScaler | None = None
    _unfinished: str | None = None  # where a checkpoint is being made

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the newest weights, as Trainer does."""
        self.synchronize()
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Makes the folder elsewhere and then puts it in its place, so that there is never one to
        resume from by half.

        What concerns the finished one comes afterwards: which is the best, uploads, and the end of
        older ones.
        """
        run_dir = self._get_output_dir(trial)
        path = self._checkpoint_in(run_dir, self.state.global_step)
        with whole_folder(
            path, is_owner=self.args.should_save, wait=self.accelerator.wait_for_everyone
        ) as folder:
            self._unfinished = folder
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._unfinished = None
            best = self._checkpoint_in(run_dir, self.state.best_global_step)
            if self.args.save_strategy != "no" and (best == path or os.path.isdir(best)):
                self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(
                    os.path.join(folder, os.path.basename(path), TRAINER_STATE_NAME)
                )
        if self.args.push_to_hub:
            self._push_from_checkpoint(path)
        if self.args.should_save:
            limit, kept = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(
                run_dir, save_total_limit=limit, best_model_checkpoint=kept, use_mtime=True
            )

    def _checkpoint_in(self, run_dir: str, step: int | None) -> str:
        return os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def _get_output_dir(self, trial: Any) -> str:
        return self._unfinished or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = unwrapped(self.optimizer)
        if pipeline_of(self.args).sharded_checkpoints:
            save_shards(self._engine(), optimizer.inner, output_dir)
            if self.args.should_save:
                scheduler: Any = self.lr_scheduler
                torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
            return
        with optimizer.gathered():
            super()._save_optimizer_and_scheduler(output_dir)
        save_masters(self._engine(), output_dir, is_owner=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and has_shards(checkpoint):
            load_shards(self._engine(), unwrapped(self.optimizer).inner, checkpoint)
            _load_on_host(self.lr_scheduler, checkpoint, SCHEDULER_NAME)
            return
        if self.args.world_size == 1 or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif all(
            os.path.isfile(os.path.join(checkpoint, name))
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        ):
            # Trainer would load it into the memory of a device where there are several processes.
            _load_on_host(self.optimizer, checkpoint, OPTIMIZER_NAME)
            _load_on_host(self.lr_scheduler, checkpoint, SCHEDULER_NAME)
        if checkpoint is not None:
            load_masters(self._engine(), checkpoint)

    def _save_scaler(self, output_dir: str) -> None:
        if self.scaler is not None and self.args.should_save:
            torch.save(self.scaler.state_dict(), os.path.join(output_dir, SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / SCALER_NAME
        if self.scaler is not None and checkpoint is not None and path.is_file():
            self.scaler.load_state_dict(torch.load(path, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's file holds one device's generator; ours, if there are more, all of them."""
        super()._save_rng_state(output_dir)
        save_device_rng(self._engine(), self._rng_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_device_rng(self._engine(), self._rng_file(checkpoint))

    def _rng_file(self, folder: str) -> Path:
        """Each process has one."""
        of_process = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"{RNG_NAME}{of_process}.pth"

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self.synchronize()
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._slot.reload(self.model)

    def _load_best_model(self) -> None:
        self.synchronize()
        super()._load_best_model()
        self._slot.reload(self.model)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        return super()._finalize_training(*args, **kwargs)


def _load_on_host(one: Any, folder: str, name: str) -> None:
    path = os.path.join(folder, name)
    one.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
