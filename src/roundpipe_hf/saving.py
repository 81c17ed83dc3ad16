"""The part of the mixin that writes and reads checkpoints. Hooks only; the files are checkpointing.py's."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe import GradScaler

from .checkpointing import load_device_rng, load_masters, save_device_rng, save_masters, whole_files
from .compat import SCALER_NAME
from .evaluation import EvaluationMixin


class SavingMixin(EvaluationMixin):
    scaler: GradScaler | None = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.synchronize()
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with whole_files(output_dir) as folder:
            super()._save_optimizer_and_scheduler(folder)
            if self.args.should_save:
                save_masters(self._engine(), folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_masters(self._engine(), checkpoint)

    def _save_scaler(self, output_dir: str) -> None:
        if self.scaler is not None and self.args.should_save:
            with whole_files(output_dir) as folder:
                torch.save(self.scaler.state_dict(), os.path.join(folder, SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / SCALER_NAME
        if self.scaler is not None and checkpoint is not None and path.is_file():
            self.scaler.load_state_dict(torch.load(path, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's file holds one device's generator; ours, if there are more, all of them."""
        with whole_files(output_dir) as folder:
            super()._save_rng_state(folder)
            save_device_rng(self._engine(), folder)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_device_rng(self._engine(), checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
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
