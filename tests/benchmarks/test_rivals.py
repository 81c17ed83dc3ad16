"""The other systems train what we train, and one that fails or hangs is said to have and leaves the
others alone."""

import os
import subprocess
import sys
from argparse import Namespace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import pytest
import rivals
import torch
from resident import hugging_face_loss
from torch import Tensor, distributed, nn
from workload import LEARNING_RATE, MAX_NORM, Workload, make_model, make_tokens

CPU = torch.device("cpu")
STEPS = 3


def tiny(method: Any) -> Workload:
    return Workload(
        model="qwen3-1.7b", method=method, rows=8, length=32, num_microbatch=4, tiny=True
    )


@cache
def trained_plainly(workload: Workload) -> list[tuple[float, float]]:
    """Losses and gradients' norms of bf16 weights with fp32 masters, on the CPU as on any
    device."""
    model = make_model(workload, CPU)
    weights = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in weights]
    adamw = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    loss_of = hugging_face_loss(model, workload.predictions_per_step)
    found = []
    for _ in range(STEPS):
        loss_sum = 0.0
        for master in masters:
            master.grad = torch.zeros_like(master)
        for tokens in make_tokens(workload).chunk(workload.num_microbatch):
            loss = loss_of(tokens)
            gradients = torch.autograd.grad(loss, weights)
            loss_sum += loss.item()
            for master, gradient in zip(masters, gradients, strict=True):
                assert master.grad is not None
                master.grad += gradient
        norm = nn.utils.clip_grad_norm_(masters, MAX_NORM)
        adamw.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        found.append((loss_sum, norm.item()))
    return found


def check(step: rivals.Step, workload: Workload) -> None:
    results = [step() for _ in range(STEPS)]
    losses, norms = zip(*trained_plainly(workload), strict=True)
    assert [float(loss) for loss, _ in results] == pytest.approx(losses, rel=1e-3)
    assert [float(norm) for _, norm in results] == pytest.approx(norms, rel=0.02)
    assert losses[-1] < losses[0]


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compute_device", lambda: CPU)


@pytest.mark.parametrize("sums_on_device", [False, True])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_fsdp2_trains_like_plain_training(method: str, sums_on_device: bool) -> None:
    workload = tiny(method)
    model: Any = make_model(workload, CPU)
    model.gradient_checkpointing_enable()
    with rivals.alone():
        check(rivals.fsdp2_step(model, workload, sums_on_device=sums_on_device), workload)
        # Frozen weights go up as they are.
        assert {p.dtype for p in model.parameters() if not p.requires_grad} <= {torch.bfloat16}
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_fsdp2_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rivals, "MAX_NORM", 1e-12
    )  # AdamW divides by far more, so that nothing moves
    workload = tiny("full")
    with rivals.alone():
        step = rivals.fsdp2_step(make_model(workload, CPU), workload, sums_on_device=False)
        losses = [float(step()[0]) for _ in range(STEPS)]
    assert losses == pytest.approx([losses[0]] * STEPS, rel=1e-4)


class Engine:
    """As DeepSpeed documents its own: it divides a loss by the accumulation steps, and steps at
    their end only."""

    def __init__(
        self, model: nn.Module, model_parameters: list[nn.Parameter], config: dict[str, Any]
    ) -> None:
        self._model, self._weights, self._config = model, model_parameters, config
        self._masters = [p.detach().float() for p in model_parameters]
        assert config["bf16"] == {"enabled": True}
        assert config["optimizer"]["type"] == "AdamW"
        self._adamw = torch.optim.AdamW(self._masters, **config["optimizer"]["params"])
        self._sums = [torch.zeros_like(master) for master in self._masters]
        self._microbatches, self._norm = 0, torch.zeros(())

    def __call__(self, **inputs: Any) -> Any:
        assert len(inputs["input_ids"]) == self._config["train_micro_batch_size_per_gpu"]
        return self._model(**inputs)

    def backward(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(
            loss / self._config["gradient_accumulation_steps"], self._weights
        )
        for total, gradient in zip(self._sums, gradients, strict=True):
            total += gradient

    def step(self) -> None:
        self._microbatches += 1
        if self._microbatches % self._config["gradient_accumulation_steps"]:
            return
        for master, total in zip(self._masters, self._sums, strict=True):
            master.grad = total.clone()
            total.zero_()
        self._norm = nn.utils.clip_grad_norm_(self._masters, self._config["gradient_clipping"])
        self._adamw.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)

    def get_global_grad_norm(self) -> Tensor:
        return self._norm


@pytest.mark.parametrize(("stage", "offloaded"), [(2, {"optimizer"}), (3, {"optimizer", "param"})])
def test_deepspeed_is_told_to_train_like_plain_training(
    stage: int, offloaded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = []

    def initialize(
        model: nn.Module, model_parameters: list[nn.Parameter], config: dict[str, Any]
    ) -> tuple[Any, ...]:
        configs.append(config["zero_optimization"])
        return Engine(model, model_parameters, config), None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    workload = tiny("full")
    check(rivals.deepspeed_step(make_model(workload, CPU), workload, stage=stage), workload)
    (config,) = configs
    assert config["stage"] == stage
    assert {
        name.removeprefix("offload_") for name in config if name.startswith("offload_")
    } == offloaded


def test_a_world_of_one_leaves_nothing_behind() -> None:
    def fail_in_the_middle() -> None:
        with rivals.alone():
            assert (distributed.get_world_size(), os.environ["WORLD_SIZE"]) == (1, "1")
            raise RuntimeError("in the middle")

    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_middle()
    assert not distributed.is_initialized()
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes more, each importing everything
def test_a_row_that_fails_is_said_to_have_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deepspeed.py").write_text(
        "def initialize(**_):\n    raise RuntimeError('no compiler here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "argv", [rivals.__file__, "--tiny", "--systems", "zero2", "fsdp2"])
    assert rivals.main() == 1
    out, err = capfd.readouterr()
    (record,) = measure.parse_records(out)
    assert (record["system"], record["loss_last"] > 0) == (rivals.SYSTEMS["fsdp2"], True)
    assert "no compiler here" in err
    assert "failed (1): --tiny --systems zero2 fsdp2 --methods full --systems zero2" in err
    assert [f"step {count} took" in err for count in (1, 2, 3, 4)] == [True, True, True, False]


def test_what_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["rivals.py", "--tiny", "--systems", "zero2", "zero3"])
    assert rivals.main() == 0
    assert capsys.readouterr().err.count("because deepspeed is not installed") == 2


@pytest.mark.slow
def test_a_row_that_hangs_ends_and_says_where() -> None:
    code = "import rivals, threading\nwith rivals.limited(0.1):\n    threading.Event().wait()\n"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(rivals.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "threading.py" in ended.stderr


def test_a_row_says_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = iter([0.5, 1.0, 1.5])

    def make(model: nn.Module, workload: Workload) -> rivals.Step:
        return lambda: (torch.tensor(2.0), next(norms))

    monkeypatch.setitem(rivals.STEPS, "fsdp2", make)
    options = Namespace(
        cap_gb=None, warmup=1, steps=2, model="qwen3-1.7b", methods=["full"], rows=8, length=32,
        num_microbatch=4, tiny=True, layers=None, quantization=None,
    )  # fmt: skip
    record = rivals.run("fsdp2", options)
    assert (record["loss_last"], record["gradient_norm_last"], record["steps"]) == (2.0, 1.5, 2)
    assert record["tokens_per_s"] == pytest.approx(8 * 32 / record["step_s"])
