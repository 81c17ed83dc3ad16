"""What is saved loads in plain transformers and PEFT, holds every update, and resumes as if nothing
had happened."""

import errno
import logging
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.device.virtual import VirtualDevice
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.trainer.checkpointing import whole_folder
from tests.support import ROOT
from tests.support.models import make_llama
from tests.support.preset_models import VOCABULARY, make_model
from tests.support.trainers import (
    MODELS,
    assert_same_logs,
    assert_same_weights,
    differ,
    logged,
    make_trainer,
    run,
    token_rows,
    train_both,
    trained,
    weights,
)

ROWS = token_rows(18)
FOR_GPT2 = [
    {name: column.clamp(max=VOCABULARY - 1) for name, column in row.items()} for row in ROWS
]
EVERY_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def reloaded(folder: Path) -> nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


@pytest.mark.parametrize("kind", ["full", "tied", "gpt2"])
def test_a_saved_model_loads_in_plain_transformers(kind: str) -> None:
    """The plain Trainer's keys (tied once, frozen included, no prefixes), and bitwise the same
    logits."""
    make: Any = MODELS.get(kind, lambda: make_model(kind))

    def half_frozen() -> nn.Module:
        model = make()
        (model.transformer.h if kind == "gpt2" else model.model.layers)[:2].requires_grad_(False)
        return model

    pair = train_both(half_frozen, FOR_GPT2)
    for trainer, folder in zip(pair, ("ours", "plain"), strict=True):
        trainer.save_model(folder)
    assert load_file("ours/model.safetensors").keys() == load_file("plain/model.safetensors").keys()
    model = reloaded(Path("ours"))
    ids = ROWS[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, pair.ours.model.eval()(ids).logits)
    if kind != "full":
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    make().load_state_dict(pair.ours.model.state_dict(), strict=True)


def test_a_saved_adapter_loads_in_plain_peft() -> None:
    trainer = trained(RoundPipeTrainer, MODELS["lora"](), ROWS, devices=3)
    trainer.save_model("adapter")
    assert {path.name for path in Path("adapter").iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    model = PeftModel.from_pretrained(make_llama(tied=False), "adapter")
    ids = ROWS[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model.eval()(ids).logits)


class Watcher(TrainerCallback):
    """Remembers the weights each hook saw."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.seen.append({name: p.detach().clone() for name, p in model.named_parameters()})


def test_step_end_and_checkpoints_hold_the_update_just_made() -> None:
    """Hooks and files of step k hold all k updates and none later."""
    watchers = [Watcher(), Watcher()]
    plain = trained(Trainer, MODELS["full"](), ROWS, callbacks=[watchers[0]], max_steps=4)
    trained(
        RoundPipeTrainer,
        MODELS["full"](),
        ROWS,
        callbacks=[watchers[1]],
        max_steps=4,
        devices=3,
        **EVERY_STEP,
    )
    assert len(watchers[1].seen) == 4
    for step, (expected, seen) in enumerate(
        zip(watchers[0].seen, watchers[1].seen, strict=True), start=1
    ):
        assert_same_weights(seen, expected)
        saved = load_file(f"out-ours/checkpoint-{step}/model.safetensors")
        assert differ(saved, {name: value for name, value in seen.items() if name in saved}) == []
    assert_same_weights(watchers[1].seen[-1], weights(plain))


def in_dtype(kind: str, dtype: torch.dtype) -> nn.Module:
    """Adapters stay fp32, as PEFT makes them over a bf16 base."""
    model = MODELS[kind]()
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, dtype: torch.dtype) -> None:
    """Bitwise, masters of bf16 weights included, on another number of devices."""
    settings: dict[str, Any] = {
        "optim": "adamw_torch",
        "num_microbatch": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
    }
    whole = trained(
        RoundPipeTrainer,
        in_dtype(kind, dtype),
        ROWS,
        devices=1,
        save_steps=4,
        save_strategy="steps",
        **settings,
    )
    resumed = make_trainer(
        RoundPipeTrainer, in_dtype(kind, dtype), ROWS, devices=3, output_dir="resumed", **settings
    )
    run(resumed, resume_from_checkpoint="out-ours/checkpoint-4")
    assert differ(weights(resumed), weights(whole)) == []
    masters = dict(whole.optim_named_parameters())
    assert differ(dict(resumed.optim_named_parameters()), masters) == []
    assert logged(resumed)[:-1] == logged(whole)[:-1]


def test_dropout_resumes_where_it_was() -> None:
    """Random streams come from the usual generator, which the checkpoint holds."""

    def dropping() -> nn.Module:
        model = MODELS["full"]()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model

    settings: dict[str, Any] = {"num_microbatch": 2, "max_steps": 4}
    whole = trained(RoundPipeTrainer, dropping(), ROWS, devices=1, **settings, **EVERY_STEP)
    resumed = make_trainer(
        RoundPipeTrainer, dropping(), ROWS, devices=3, output_dir="resumed", **settings
    )
    run(resumed, resume_from_checkpoint="out-ours/checkpoint-2")
    assert differ(weights(resumed), weights(whole)) == []


def test_resuming_in_another_plan_with_dropout_and_late_updates() -> None:
    """GPT-2 that drops out, an asynchronous optimizer flushed by every save; layer by layer on two
    devices instead of as planned on one. Losses and weights are bitwise those of the run that was
    not interrupted."""

    def dropping() -> Any:
        model = make_model("gpt2")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return model

    settings: dict[str, Any] = {
        "num_microbatch": 2,
        "max_steps": 5,
        "async_optimizer": True,
        "optim": "adamw_torch",
    }
    whole = trained(RoundPipeTrainer, dropping(), FOR_GPT2, devices=1, **settings, **EVERY_STEP)
    plan = ModelExecutePlan(
        fwd_plan=[range(index, index + 1) for index in range(4)],
        bwd_plan=[range(index, index + 1) for index in reversed(range(5))],
    )
    run_config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=2)
    with wrap_model_to_roundpipe(
        dropping(), optim_dtype=torch.float32, devices=2, model_run_config=run_config
    ) as engine:
        resumed = make_trainer(
            RoundPipeTrainer, engine, FOR_GPT2, output_dir="resumed", **settings, **EVERY_STEP
        )
        run(resumed, resume_from_checkpoint="out-ours/checkpoint-2")
        assert differ(weights(resumed), weights(whole)) == []
        assert logged(resumed)[:-1] == logged(whole)[:-1]


class OwnGenerator(VirtualDevice):
    """A device that, like an accelerator, has a generator of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.state = torch.full((4,), index, dtype=torch.uint8)

    def rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()

    def shares_generator(self) -> bool:
        return False


def test_every_devices_generator_is_saved() -> None:
    """Trainer's own file holds one device's; those of other devices resume by name, new devices
    stay as they are."""
    saved, resumed = [OwnGenerator(0), OwnGenerator(1)], [OwnGenerator(1), OwnGenerator(2)]
    for devices, how in (
        (saved, {}),
        (resumed, {"resume_from_checkpoint": "out-ours/checkpoint-1"}),
    ):
        engine = wrap_model_to_roundpipe(
            MODELS["full"](), optim_dtype=torch.float32, devices=devices
        )
        if devices is saved:
            saved[1].state.fill_(77)
        trainer = make_trainer(
            RoundPipeTrainer, engine, ROWS, max_steps=1 if devices is saved else 2, **EVERY_STEP
        )
        run(trainer, **how)
        engine.close()
    assert [int(device.state[0]) for device in resumed] == [77, 2]


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    """A failure while a checkpoint is written leaves what was there; what a killed process left is
    cleared."""
    path = tmp_path / "checkpoint-3"

    def write(text: str, fuse: type[BaseException] | None = None) -> None:
        with whole_folder(path) as folder:
            (Path(folder) / "checkpoint-3").mkdir(parents=True)
            (Path(folder) / "checkpoint-3" / "optimizer.pt").write_text(text)
            if fuse is not None:
                raise fuse

    write("old")
    with pytest.raises(KeyboardInterrupt):
        write("half of the n", KeyboardInterrupt)
    assert (path / "optimizer.pt").read_text() == "old"
    (tmp_path / "_unfinished" / "checkpoint-2").mkdir(parents=True)
    write("new")
    assert (path / "optimizer.pt").read_text() == "new"
    assert [child.name for child in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_disk_that_is_full_is_told_of_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was torch's, of a position in a file."""
    usage: Any = shutil._ntuple_diskusage(2000, 1993, 7)
    path = tmp_path / "checkpoint-3"
    path.mkdir()

    def write() -> None:
        with whole_folder(path) as folder:
            (Path(folder) / "checkpoint-3").mkdir(parents=True)
            (Path(folder) / "checkpoint-3" / "optimizer.pt").write_bytes(bytes(300))
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
            raise RuntimeError("unexpected pos 576 vs 534")

    with pytest.raises(OSError, match=r"when 300 bytes of checkpoint-3 .*\(7 are free") as raised:
        write()
    assert raised.value.errno == errno.ENOSPC
    assert [child.name for child in tmp_path.iterdir()] == ["checkpoint-3"]


# Forks a child for each moment before any thread exists. It resumes from what the one before has
# left, trains one step, saves and is killed at its moment.
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch._dynamo
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint
from tests.support.trainers import MODELS, make_trainer, run, token_rows
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.trainer import checkpointing, saving

torch.set_num_threads(1)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def before(module, name):
    setattr(module, name, lambda *args, **kwargs: killed())


def half_of_a_file():
    original = torch.save

    def half(obj, file, *args, **kwargs):
        original(obj, file, *args, **kwargs)
        if str(file).endswith("optimizer.pt"):
            os.truncate(file, os.stat(file).st_size // 2)
            killed()

    torch.save = half


MOMENTS = {
    "weights written": lambda: before(RoundPipeTrainer, "_save_optimizer_and_scheduler"),
    "half way through a file": half_of_a_file,
    "all but the masters written": lambda: before(saving, "save_masters"),
    "all but the state written": lambda: before(TrainerState, "save_to_json"),
    "all written, not on the disk": lambda: before(checkpointing, "_put_on_disk"),
    "on the disk, not in its place": lambda: before(os, "rename"),
    "in its place": lambda: before(saving, "rotate_checkpoints"),
    "not at all": lambda: None,
}


def child(steps, arm):
    if os.fork() == 0:
        model = MODELS["full"]().bfloat16()
        settings = dict(
            save_strategy="steps",
            save_steps=1,
            max_steps=steps,
            save_total_limit=2,
            optim="adamw_torch",
        )
        trainer = make_trainer(RoundPipeTrainer, model, token_rows(30), **settings)
        last = get_last_checkpoint("out-ours") if os.path.isdir("out-ours") else None
        arm()
        run(trainer, resume_from_checkpoint=last)
        os._exit(0)
    status = os.wait()[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


assert not child(1, lambda: None)
step = 1
for moment, arm in MOMENTS.items():
    assert child(step + 1, arm) == (moment != "not at all"), moment
    step += moment in ("in its place", "not at all")
    assert get_last_checkpoint("out-ours") == f"out-ours/checkpoint-{step}", moment
assert sorted(os.listdir("out-ours")) == ["checkpoint-2", "checkpoint-3"], os.listdir("out-ours")
print("moments:", len(MOMENTS))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_killed_at_every_moment_of_a_save(tmp_path: Path) -> None:
    """What `get_last_checkpoint` finds afterwards is a whole one, from which the next process
    resumes."""
    command = [sys.executable, "-c", KILLED, str(ROOT)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "moments: 8" in done.stdout


def test_masters_lie_beside_an_optimizer_state_that_a_plain_trainer_loads() -> None:
    trained(
        RoundPipeTrainer,
        in_dtype("full", torch.bfloat16),
        ROWS,
        optim="adamw_torch",
        max_steps=1,
        **EVERY_STEP,
    )
    assert Path("out-ours/checkpoint-1/roundpipe_masters.pt").is_file()
    plain = make_trainer(
        Trainer, in_dtype("full", torch.bfloat16), ROWS, optim="adamw_torch", max_steps=2
    )
    run(plain, resume_from_checkpoint="out-ours/checkpoint-1")
    assert plain.state.global_step == 2


def test_fp32_weights_need_no_masters_file() -> None:
    """They are the masters; a plain Trainer's checkpoint resumes here exactly, too."""
    settings: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3}
    plain = trained(Trainer, MODELS["full"](), ROWS, **settings, **EVERY_STEP)
    ours = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, **settings, **EVERY_STEP)
    run(ours, resume_from_checkpoint="out-plain/checkpoint-3")
    assert_same_logs(logged(ours)[:-1], logged(plain)[:-1])
    assert_same_weights(weights(ours), weights(plain))
    assert not list(Path("out-ours").glob("*/roundpipe_masters.pt"))


def test_a_plain_optimizer_state_loads_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Over bf16 weights its masters are lost: they come from the weights."""
    trained(
        Trainer,
        in_dtype("full", torch.bfloat16),
        ROWS,
        optim="adamw_torch",
        max_steps=1,
        **EVERY_STEP,
    )
    ours = make_trainer(
        RoundPipeTrainer, in_dtype("full", torch.bfloat16), ROWS, optim="adamw_torch", max_steps=2
    )
    with caplog.at_level(logging.WARNING, logger="roundpipe_hf"):
        run(ours, resume_from_checkpoint="out-plain/checkpoint-1")
    assert "no roundpipe_masters.pt" in caplog.text


def test_masters_of_other_parameters_are_refused() -> None:
    trained(
        RoundPipeTrainer,
        in_dtype("full", torch.bfloat16),
        ROWS,
        optim="sgd",
        max_steps=1,
        **EVERY_STEP,
    )
    path = Path("out-ours/checkpoint-1/roundpipe_masters.pt")
    masters = torch.load(path)
    masters.pop("model.norm.weight")
    torch.save(masters, path)
    ours = make_trainer(RoundPipeTrainer, in_dtype("full", torch.bfloat16), ROWS, max_steps=2)
    with pytest.raises(ConfigError, match="lacks 1 of .*model.norm.weight"):
        run(ours, resume_from_checkpoint="out-ours/checkpoint-1")


def test_save_only_model_resumes_with_what_there_is() -> None:
    settings = {"max_steps": 2, "save_only_model": True}
    trained(RoundPipeTrainer, in_dtype("full", torch.bfloat16), ROWS, **settings, **EVERY_STEP)
    assert not list(Path("out-ours").glob("*/*.pt"))
    run(
        make_trainer(RoundPipeTrainer, in_dtype("full", torch.bfloat16), ROWS),
        resume_from_checkpoint="out-ours/checkpoint-1",
    )


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_resuming_on_the_same_trainer_uses_the_loaded_weights(kind: str) -> None:
    """The live engine's masters follow, instead of overwriting what was loaded."""
    settings: dict[str, Any] = {"max_steps": 4, "devices": 3, "optim": "adamw_torch"}
    trainer = trained(RoundPipeTrainer, MODELS[kind](), ROWS, **settings, **EVERY_STEP)
    expected = weights(trainer)
    shutil.rmtree("out-ours/checkpoint-4")
    run(trainer, resume_from_checkpoint="out-ours/checkpoint-2")
    assert differ(weights(trainer), expected) == []


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_best_model_is_loaded_and_stays(kind: str) -> None:
    """A large rate makes the evaluation loss rise, so that the best model is not the last."""
    settings: dict[str, Any] = {
        "eval_dataset": ROWS[:4],
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "learning_rate": 3.0,
        "max_grad_norm": 0.0,
    }
    pair = train_both(MODELS[kind], ROWS, **settings, **EVERY_STEP)
    ours = pair.ours
    best = int(ours.state.best_model_checkpoint.rsplit("-", 1)[1])
    assert (
        best
        == int(pair.plain.state.best_model_checkpoint.rsplit("-", 1)[1])
        < ours.state.global_step
    )
    ours.synchronize()
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, abs=1e-6)


def test_saving_while_an_update_is_in_flight_waits_for_it() -> None:
    """With the asynchronous optimizer, too, the file of step k holds k updates."""
    watcher = Watcher()
    trainer = trained(
        RoundPipeTrainer,
        MODELS["full"](),
        ROWS,
        callbacks=[watcher],
        async_optimizer=True,
        max_steps=3,
        **EVERY_STEP,
    )
    saved = [load_file(f"out-ours/checkpoint-{step}/model.safetensors") for step in (1, 2, 3)]
    assert differ(weights(trainer), saved[2]) == []
    assert all(len(differ(later, earlier)) == len(earlier) for earlier, later in pairwise(saved))
