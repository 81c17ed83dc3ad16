"""`torchrun --max-restarts` starts all processes again when one was killed, and they end with the
losses and weights of a run that nobody has disturbed, to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import ROOT

PROGRAM = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import MODELS, make_trainer, token_rows

folder, is_killed = sys.argv[2], sys.argv[3] == "killed"


class Killed(TrainerCallback):
    def on_substep_end(self, args, state, control, **_):
        if is_killed and (state.global_step, args.process_index) == (2, 1):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)


trainer = make_trainer(
    RoundPipeTrainer, MODELS["full"]().bfloat16(), token_rows(24), output_dir=folder,
    optim="adamw_torch", learning_rate=1e-3, per_device_train_batch_size=1, max_steps=4,
    gradient_accumulation_steps=2, save_strategy="steps", save_steps=1, callbacks=[Killed()],
    sharded_checkpoints=is_killed,
)
os.makedirs(folder, exist_ok=True)
last = get_last_checkpoint(folder)
trainer.train(resume_from_checkpoint=last)
trainer.save_model(folder)
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    began = last and os.path.basename(last)
    with open(f"{folder}.json", "w") as file:
        json.dump([began, losses], file)
trainer.model_wrapped.close()
"""

# Else torch keeps its store over a restart: processes find there what those that ended have left,
# and join their group, or wait for half an hour, at an address where nobody is.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.slow
def test_a_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    for how in ("killed", "undisturbed"):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch += ["--max-restarts", "1" if how == "killed" else "0", "program.py"]
        (tmp_path / "program.py").write_text(PROGRAM)
        done = subprocess.run(
            [sys.executable, *launch, str(ROOT), how, how],
            cwd=tmp_path,
            env=os.environ | OWN_STORE,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (began, losses), (never, expected) = (
        json.loads((tmp_path / f"{how}.json").read_text()) for how in ("killed", "undisturbed")
    )
    assert (began, never) == ("checkpoint-2", None)
    assert losses == expected
    assert len(losses) == 4
    weights = [load_file(tmp_path / how / "model.safetensors") for how in ("killed", "undisturbed")]
    torch.testing.assert_close(*weights, atol=0, rtol=0)
    checkpoints = [f"checkpoint-{step}" for step in range(1, 5)]
    left = sorted(name for name in os.listdir(tmp_path / "killed") if "." not in name)
    assert left == checkpoints
