"""Devices that really run out: they have a size, and refuse what goes beyond it as a GPU does.

What training needs there is known to the planner but for what kernels take besides. So that is what
grows here, at one phase of a round at a time and with the rows of a microbatch, until it does not
fit. The oracle is the plain Trainer.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.device import VirtualDevice
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import PlanError
from roundpipe_hf import RoundPipeTrainer
from tests.support.injection import INJECTION, HookedDevice, reach_in
from tests.support.trainers import (
    MODELS,
    assert_same_logs,
    assert_same_weights,
    logged,
    make_trainer,
    run,
    token_rows,
    weights,
)

PLAN = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 6), range(2, 4), range(2)]
)
AMPLE = 1 << 40
# 3 steps of 2 batches of 4 rows.
ROWS = token_rows(24)
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
SITES = ["backward"]
OTHER_SITES = ["forward", "fused", "offloading", "loss", "recompute"]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    INJECTION.disarm()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that had enough memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        return run(make_trainer(Trainer, MODELS["full"](), ROWS, **SETTINGS))


def assert_is(trainer: Any, plain: Any) -> None:
    assert_same_logs(logged(trainer), logged(plain))
    assert_same_weights(weights(trainer), weights(plain))


class Scratch:
    """Memory of ``device`` that comes and goes whenever ``site`` is reached, so much for each row
    of the microbatch."""

    def __init__(self, device: VirtualDevice, site: str) -> None:
        self.bytes_per_row = 0
        self.rows = 0
        self.num_refused = 0
        self._device = device
        self._site = site
        INJECTION.arm(site, self.take, at=1)

    def take(self) -> None:
        INJECTION.arm(self._site, self.take, at=1)
        try:
            with self._device.compute.work():
                torch.empty(self.rows * self.bytes_per_row, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            self.num_refused += 1
            raise


class Grows(TrainerCallback):
    """After the first step: how a loss can be cut is found out by forwards of two rows."""

    def __init__(self, scratch: Scratch, bytes_per_row: int) -> None:
        self._scratch = scratch
        self._bytes_per_row = bytes_per_row

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._scratch.bytes_per_row = self._bytes_per_row


def engine_on(device: VirtualDevice, scratch: Scratch) -> RoundPipe:
    """Layer 1 is in a stage that is recomputed, the head in the fused one."""
    model: Any = MODELS["full"]()
    model.model.layers[1].register_forward_pre_hook(
        lambda _, args: setattr(scratch, "rows", len(args[0]))
    )
    reach_in(model)
    return wrap_model_to_roundpipe(
        model,
        optim_dtype=torch.float32,
        devices=[device],
        model_run_config=RoundPipeRunConfig(execute_plan=PLAN, num_microbatch=2),
    )


@pytest.fixture(scope="module")
def used_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The most that a device of any size has to hold, but for what grows."""
    device = HookedDevice(0, AMPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ample"))
        with engine_on(device, Scratch(device, "nothing")) as engine:
            run(make_trainer(RoundPipeTrainer, engine, ROWS, **SETTINGS)).evaluate(ROWS[:8])
    assert device.capacity is not None
    return device.capacity.peak


@pytest.mark.parametrize(
    "site", [*SITES, *(pytest.param(site, marks=pytest.mark.slow) for site in OTHER_SITES)]
)
def test_training_goes_on(
    site: str, used_bytes: int, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rows at once do not fit, one does: more microbatches, and the losses and weights of
    enough memory."""
    device = HookedDevice(0, 4 * used_bytes)
    scratch = Scratch(device, site)
    grows = Grows(scratch, int(2.2 * used_bytes))
    with engine_on(device, scratch) as engine:
        trainer = run(make_trainer(RoundPipeTrainer, engine, ROWS, callbacks=[grows], **SETTINGS))
        assert_is(trainer, plain)
    assert scratch.num_refused > 0
    assert caplog.text.count("training ran out of device memory") == 1
    assert "with num_microbatch=2; it goes on with num_microbatch=4, " in caplog.text
    assert device.faults == []


def test_evaluation_goes_on(used_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """Losses and predictions of batches of eight rows, of which two do not fit at once."""
    expected = make_trainer(Trainer, MODELS["full"](), ROWS)
    device = HookedDevice(0, 4 * used_bytes)
    scratch = Scratch(device, "forward")
    with engine_on(device, scratch) as engine:
        trainer = make_trainer(RoundPipeTrainer, engine, ROWS, **SETTINGS)
        trainer.evaluate(ROWS[:2])
        scratch.bytes_per_row = int(2.2 * used_bytes)
        loss, plain_loss = (each.evaluate(ROWS[:8])["eval_loss"] for each in (trainer, expected))
        assert loss == pytest.approx(plain_loss, abs=1e-6)
        assert scratch.num_refused > 0
        logits, plain_logits = (each.predict(ROWS[:8]).predictions for each in (trainer, expected))
        assert logits == pytest.approx(plain_logits, abs=1e-6)
    assert "evaluation ran out of device memory" in caplog.text
    assert "it goes on with num_microbatch=8, " in caplog.text


def test_where_no_footprint_fits_the_device_says_so_and_nothing_has_happened(
    used_bytes: int,
) -> None:
    device = HookedDevice(0, 4 * used_bytes)
    scratch = Scratch(device, "fused")
    with engine_on(device, scratch) as engine:
        trainer = make_trainer(
            RoundPipeTrainer,
            engine,
            ROWS,
            callbacks=[Grows(scratch, 5 * used_bytes)],
            lr_scheduler_type="constant",
        )
        with pytest.raises(
            torch.OutOfMemoryError,
            match=f"adversarial:0 is out of memory.*of its {4 * used_bytes} b",
        ):
            run(trainer)
        one_step = run(
            make_trainer(Trainer, MODELS["full"](), ROWS, max_steps=1, lr_scheduler_type="constant")
        )
        trainer.synchronize()
        assert_same_weights(weights(trainer), weights(one_step))


def as_sequence(size: int) -> dict[str, Any]:
    return {
        "model": MODELS["full"](),
        "max_gpu_memory": size / 2**30,
        "devices": 1,
        "num_microbatch": 2,
    }


def in_parts(size: int) -> dict[str, Any]:
    """Each block an engine of its own, and what is between them on the CPU."""
    return {
        "model": wrap_model_to_roundpipe(
            MODELS["full"](),
            optim_dtype=torch.float32,
            devices=[VirtualDevice(0, size)],
            use_sequential_preset=False,
            lower_threshold=100,
            upper_threshold=100,
        )
    }


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in one round": (as_sequence, {}),
    "layer by layer": (as_sequence, {"recompute_grain": "layer"}),
    "asynchronous": (as_sequence, {"async_optimizer": True}),
    "in parts": (in_parts, {}),
}


@pytest.mark.parametrize(
    "way",
    [
        name if name == "in one round" else pytest.param(name, marks=pytest.mark.slow)
        for name in WAYS
    ],
)
def test_a_device_of_any_size_trains_alike_or_is_refused(
    way: str, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing grows here: plans keep within the size, or a smaller footprint does, or it is said
    what is missing. Asynchronous updates are another run, so these only have to agree with each
    other."""
    make, settings = WAYS[way]
    outcomes, expected = [], None if settings.get("async_optimizer") else plain
    for kib in (1024, 400, 300, 240, 200, 160, 130, 100):
        caplog.clear()
        trainer = make_trainer(
            RoundPipeTrainer, rows=ROWS, **make(kib * 1024), **settings, **SETTINGS
        )
        try:
            run(trainer)
        except (PlanError, torch.OutOfMemoryError):
            outcomes.append("refused")
        else:
            trainer.synchronize()
            expected = trainer if expected is None else expected
            assert_is(trainer, expected)
            outcomes.append("recovered" if "ran out of device memory" in caplog.text else "fits")
        trainer.model_wrapped.close()
    assert outcomes == sorted(outcomes, key=["fits", "recovered", "refused"].index), outcomes
    assert {"fits", "refused"} <= set(outcomes)
