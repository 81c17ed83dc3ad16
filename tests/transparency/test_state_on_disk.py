"""With ``optimizer_state_dir`` nothing but the place of masters and moments is another: losses,
weights and state are those of an engine with state in memory, to the bit, and of plain PyTorch.

No state is kept in memory from step to step here, so that every step reads all of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import GradScaler, RoundPipe, load_checkpoint, optim, save_checkpoint
from roundpipe.memory.state_file import StateFile
from roundpipe.step import state_pages
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, engine_weights, reference_steps, run_batch, train_steps
from tests.support.models import make_mlp, mlp_batch
from tests.support.reference import Reference

WIDTH = 160  # weights of 100 KiB lie in the file, biases in memory
STEPS = 5
BATCHES = [mlp_batch(6, seed, WIDTH) for seed in range(STEPS)]
Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, tuple[Make, list[str]]] = {
    "torch.AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), ["exp_avg", "exp_avg_sq"]),
    "torch.AdamW, amsgrad, foreach": (
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    ),
    "torch.SGD": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), ["momentum_buffer"]),
    "torch.Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.01), ["sum"]),
    "AdamW": (lambda p: optim.AdamW(p, lr=0.01), ["exp_avg", "exp_avg_sq"]),
    "SGD": (lambda p: optim.SGD(p, lr=0.01, momentum=0.9), ["momentum_buffer"]),
    "Lion": (lambda p: optim.Lion(p, lr=0.01), ["exp_avg"]),
    "LeanAdamW": (lambda p: optim.LeanAdamW(p, lr=0.01), []),
    "LeanAdamW, fp32": (
        lambda p: optim.LeanAdamW(p, lr=0.01, moments=torch.float32),
        ["exp_avg", "exp_avg_sq"],
    ),
}


@pytest.fixture(autouse=True)
def _keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pages, "free_host_bytes", lambda: 0)


def make_model() -> nn.Sequential:
    return make_mlp(4, WIDTH)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": value
        for place, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def file_of(engine: RoundPipe) -> StateFile:
    memory = engine.optim_parameters()[0].memory
    assert isinstance(memory, StateFile)
    return memory


def check_all_in_file(
    engine: RoundPipe, optimizer: torch.optim.Optimizer, names: list[str]
) -> None:
    file = file_of(engine)
    for master in engine.optim_parameters():
        for tensor in (master, *(optimizer.state[master][name] for name in names)):
            assert (file.span_of(tensor) is not None) == (master.ndim == 2)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("make", MAKE)
def test_it_is_training_with_state_in_memory(
    make: str, devices: DeviceSet, is_async: bool, tmp_path: Path, engines: Engines
) -> None:
    made = []
    make_optimizer, names = MAKE[make]
    for folder in (None, tmp_path):
        engine = engines(
            make_model(), devices, optim_dtype=torch.float32, optimizer_state_dir=folder
        )
        optimizer = make_optimizer(engine.optim_parameters())
        losses = train_steps(engine, optimizer, BATCHES, 3, is_async=is_async)
        made.append(
            {
                **{f"loss {step}": loss for step, loss in enumerate(losses)},
                **engine_weights(engine),
                **state_of(optimizer),
            }
        )
        if folder is not None:
            check_all_in_file(engine, optimizer, names)
            assert engine.statistics()["state_file_bytes"] >= 4 * 4 * WIDTH**2
    devices.check(made[1], made[0])


@pytest.mark.parametrize("staleness", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_it_is_plain_training(
    devices: DeviceSet, staleness: int, tmp_path: Path, engines: Engines
) -> None:
    make = MAKE["torch.AdamW"][0]
    reference = Reference(make_model(), make, staleness=staleness)
    expected = reference_steps(reference, BATCHES, 3)
    engine = engines(make_model(), devices, optimizer_state_dir=tmp_path)
    optimizer = make(engine.optim_parameters())
    losses = train_steps(engine, optimizer, BATCHES, 3, is_async=bool(staleness))
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


class Run:
    """Training with clipping and a loss scale, in bf16."""

    def __init__(
        self, engines: Engines, devices: DeviceSet, make: Make, folder: Path | None, is_async: bool
    ) -> None:
        model = make_model().bfloat16()
        self.engine: RoundPipe = engines(
            model, devices, optim_dtype=torch.float32, optimizer_state_dir=folder
        )
        self.optimizer = make(self.engine.optim_parameters())
        self.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self._is_async = is_async

    def steps(self, numbers: range) -> list[Tensor]:
        losses = []
        for number in numbers:
            batch = BATCHES[number]
            cast = batch._replace(
                args=(batch.args[0].bfloat16(),),
                loss_fn=lambda o, t, b=batch: self.scaler.scale(b.loss_fn(o.float(), t)),
            )
            losses.append(run_batch(self.engine, cast, 3))
            self.engine.step(self._update, self._is_async)
            self.scaler.update()
        return losses

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        roundpipe.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("make", ["torch.AdamW", "AdamW", "LeanAdamW"])
def test_a_run_resumes_on_a_disk_what_began_in_memory_and_the_reverse(
    make: str, devices: DeviceSet, is_async: bool, tmp_path: Path, engines: Engines
) -> None:
    made = []
    for first, second in ((None, None), (None, tmp_path), (tmp_path, None), (tmp_path, tmp_path)):
        run = Run(engines, devices, MAKE[make][0], first, is_async)
        losses = run.steps(range(2))
        path = tmp_path / "saved.safetensors"
        save_checkpoint(path, run.engine, run.optimizer, run.scaler)
        resumed = Run(engines, devices, MAKE[make][0], second, is_async)
        load_checkpoint(path, resumed.engine, resumed.optimizer, resumed.scaler)
        if second is not None:
            check_all_in_file(resumed.engine, resumed.optimizer, MAKE[make][1])
        losses += resumed.steps(range(2, STEPS))
        weights = engine_weights(resumed.engine)
        made.append({"losses": torch.stack(losses), **weights, **state_of(resumed.optimizer)})
    for other in made[1:]:
        devices.check(other, made[0])


def test_loaded_state_moves_to_the_disk_unless_somebody_else_has_a_view(
    tmp_path: Path, engines: Engines
) -> None:
    """torch's ``load_state_dict`` puts the tensors that it is given into the state."""
    engine = engines(make_model(), ONE, optimizer_state_dir=tmp_path)
    make, names = MAKE["torch.AdamW"]
    optimizer = make(engine.optim_parameters())
    train_steps(engine, optimizer, BATCHES[:1], 3, is_async=False)
    saved = {
        "state": {
            place: {name: value.clone() for name, value in state.items()}
            for place, state in optimizer.state_dict()["state"].items()
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    view = saved["state"][0]["exp_avg"].view(-1)
    optimizer.load_state_dict(saved)
    train_steps(engine, optimizer, BATCHES[1:2], 3, is_async=False)
    master = engine.optim_parameters()[0]
    assert file_of(engine).span_of(optimizer.state[master]["exp_avg"]) is None
    assert torch.equal(view, optimizer.state[master]["exp_avg"].view(-1))
    del view
    train_steps(engine, optimizer, BATCHES[2:3], 3, is_async=False)
    check_all_in_file(engine, optimizer, names)


@pytest.mark.parametrize("make", ["AdamW", "LeanAdamW, fp32"])
def test_a_full_disk_keeps_a_step_from_beginning(
    make: str, tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is room again the step is the first."""
    made = []
    for fails in (False, True):
        engine = engines(make_model(), ONE, optimizer_state_dir=tmp_path)
        optimizer = MAKE[make][0](engine.optim_parameters())
        if fails:
            room = [1]  # for one moment

            def allocate(*args: Any, room: list[int] = room) -> None:
                if not room:
                    raise OSError(28, "no space")
                room.pop()

            before = engine_weights(engine)
            run_batch(engine, BATCHES[0], 3)
            with monkeypatch.context() as full:
                full.setattr("os.posix_fallocate", allocate)
                with pytest.raises(roundpipe.ConfigError, match="state needs .* bytes more"):
                    engine.step(optimizer.step, is_async=False)
            ONE.check(engine_weights(engine), before)
            engine.zero_grad()
        train_steps(engine, optimizer, BATCHES, 3, is_async=False)
        made.append(engine_weights(engine))
    ONE.check(made[1], made[0])
