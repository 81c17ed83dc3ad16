"""A device runs out of memory: the same batch goes through in smaller pieces, and the run is what
it would have been.

Errors are injected at every phase of a round. What comes up in a late stage run is only known when
the update is due.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.device import VirtualDevice
from roundpipe.engine import device_memory as engine_model
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
SITES = ["forward", "recompute"]
OTHER_SITES = ["upload", "fused", "loss", "backward", "offloading"]
# 3 steps of 2 batches of 4 rows. 3 microbatches at first, so that the next try has 4.
ROWS = token_rows(24)
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


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


def run_short(site: str, times: int = 1) -> None:
    """Memory runs out the next ``times`` times that ``site`` is reached."""

    def fail() -> None:
        nonlocal times
        times -= 1
        if times:
            INJECTION.arm(site, fail, at=1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    INJECTION.arm(site, fail, at=1)


class RunsShort(TrainerCallback):
    """After the first step, when the engine has learnt what layers do, which takes other ways."""

    def __init__(self, site: str, times: int = 1) -> None:
        self._how = site, times

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            run_short(*self._how)


def hooked_engine(*, has_hooked_lanes: bool = False) -> RoundPipe:
    """Reports to INJECTION. Layer 1 is in a stage that is recomputed, the head in the fused one.

    Lanes of one device alone are hooked, because two could run short in one and the same try.
    """
    model: Any = MODELS["full"]()
    reach_in(model)
    return wrap_model_to_roundpipe(
        model,
        optim_dtype=torch.float32,
        devices=[HookedDevice(0), VirtualDevice(1)] if has_hooked_lanes else 2,
        model_run_config=RoundPipeRunConfig(execute_plan=PLAN),
    )


def assert_is(trainer: Any, plain: Any) -> None:
    assert not INJECTION.is_armed, "memory never ran out"
    assert_same_logs(logged(trainer), logged(plain))
    assert_same_weights(weights(trainer), weights(plain))


@pytest.fixture(autouse=True)
def engines_give_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they try by themselves first is not the Trainer's business."""
    monkeypatch.setattr(engine_model, "_MADE_AGAIN", 0)


@pytest.mark.parametrize(
    "site", [*SITES, *(pytest.param(site, marks=pytest.mark.slow) for site in OTHER_SITES)]
)
def test_more_microbatches(site: str, plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    """After one without kept graphs. Whatever runs out, the losses, norms and weights are those of
    enough memory; a line says what was done."""
    with hooked_engine(has_hooked_lanes=site in ("upload", "offloading")) as engine:
        trainer = run(
            make_trainer(RoundPipeTrainer, engine, ROWS, callbacks=[RunsShort(site, 2)], **SETTINGS)
        )
        assert_is(trainer, plain)
    assert "training ran out of device memory with num_microbatch=3; it goes on" in caplog.text
    assert "num_microbatch=4" in caplog.text
    assert "graphs made again in the backward" in caplog.text


@pytest.mark.parametrize(
    ("site", "times"), [pytest.param("fused", 3, marks=pytest.mark.slow), ("recompute", 4)]
)
def test_then_less_recomputed_at_a_time_then_batch_by_batch(
    site: str, times: int, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line or in several, as a late stage run fails before or after its call has
    returned."""
    with hooked_engine() as engine:
        trainer = run(
            make_trainer(
                RoundPipeTrainer, engine, ROWS, callbacks=[RunsShort(site, times)], **SETTINGS
            )
        )
        assert_is(trainer, plain)
    steps = [
        "graphs made again",
        "num_microbatch=4",
        "recompute_grain='layer'",
        "one round for each batch",
    ]
    assert [step in caplog.text for step in steps] == [True] * times + [False] * (4 - times)


def test_then_the_error_is_the_devices_own_and_nothing_has_happened() -> None:
    with hooked_engine() as engine:
        trainer = make_trainer(
            RoundPipeTrainer,
            engine,
            ROWS,
            callbacks=[RunsShort("fused", 99)],
            lr_scheduler_type="constant",
            **SETTINGS,
        )
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            run(trainer)
        INJECTION.disarm()
        one_step = run(make_trainer(Trainer, MODELS["full"](), ROWS, max_steps=1, **SETTINGS))
        trainer.synchronize()
        assert_same_weights(weights(trainer), weights(one_step))


@pytest.mark.parametrize("site", ["fused", "recompute"])
@pytest.mark.slow
def test_with_an_asynchronous_optimizer(site: str, caplog: pytest.LogCaptureFixture) -> None:
    """Late stage runs of the first round of its size are waited for, and run again with weights
    just as old."""
    runs = []
    for shortage in (None, site):
        with hooked_engine() as engine:
            if shortage is not None:
                run_short(shortage)
            trainer = make_trainer(
                RoundPipeTrainer, engine, ROWS, async_optimizer=True, num_microbatch=3, **SETTINGS
            )
            runs.append(run(trainer))
            trainer.synchronize()
    assert caplog.text.count("ran out of device memory") == 1
    assert_same_logs(logged(runs[1]), logged(runs[0]))
    assert_same_weights(weights(runs[1]), weights(runs[0]))


def test_a_failed_update_is_not_tried_again() -> None:
    """The optimizer itself has run out of host memory: masters may have changed, so the error is
    the user's to see."""

    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            )

    trainer = make_trainer(
        RoundPipeTrainer,
        MODELS["full"](),
        ROWS,
        optimizer_cls_and_kwargs=(Greedy, {"lr": 0.1}),
        **SETTINGS,
    )
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        run(trainer)


def contrastive(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    pooled = outputs.logits.mean(dim=1)
    return cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


@pytest.mark.parametrize("in_loss", [False, True])
def test_a_smaller_batch_only_where_it_cannot_be_cut(in_loss: bool) -> None:
    """`auto_find_batch_size`: rows of a contrastive loss belong together, so where that runs out
    the run equals one of a smaller batch; the model is cut finer below any loss."""
    model: Any = MODELS["full"]()

    def check(_: Any, args: Any) -> None:
        if len(args[0]) > 3:
            raise RuntimeError("CUDA out of memory.")

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        if in_loss:
            check(None, (labels,))
        return contrastive(outputs, labels)

    if not in_loss:
        model.model.layers[1].register_forward_pre_hook(check)
    settings: dict[str, Any] = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 4,
        "devices": 2,
        "num_microbatch": 1,
    }
    ours = run(make_trainer(RoundPipeTrainer, model, ROWS[:12], compute_loss_func=loss, **settings))
    assert ours.state.train_batch_size == (3 if in_loss else 4)
    plain = run(
        make_trainer(
            Trainer,
            MODELS["full"](),
            ROWS[:12],
            compute_loss_func=contrastive,
            per_device_train_batch_size=ours.state.train_batch_size,
        )
    )
    assert_same_logs(logged(ours)[:-1], logged(plain)[:-1])
    assert_same_weights(weights(ours), weights(plain))


def test_a_device_that_is_too_small_for_the_model_is_told_by_the_planner() -> None:
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, max_gpu_memory=2**20 / 2**30 / 64, **SETTINGS
    )
    with pytest.raises(PlanError, match="on a device"):
        run(trainer)


def test_evaluation_recovers_by_itself(plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Losses and predictions alike; what training uses stays as it was."""
    plain_before = make_trainer(Trainer, MODELS["full"](), ROWS)
    with hooked_engine() as engine:
        trainer = make_trainer(RoundPipeTrainer, engine, ROWS, eval_dataset=ROWS[:8], **SETTINGS)
        expected = (
            plain_before.evaluate(ROWS[:8])["eval_loss"],
            plain_before.predict(ROWS[:8]).predictions,
        )
        run_short("forward")
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected[0], abs=1e-6)
        run_short("fused")
        assert trainer.predict(ROWS[:8]).predictions == pytest.approx(expected[1], abs=1e-6)
        assert (
            "evaluation ran out of device memory with num_microbatch=3; it goes on with "
            "num_microbatch=6," in caplog.text
        )
        caplog.clear()
        assert_is(run(trainer), plain)
    assert "ran out" not in caplog.text


@pytest.mark.slow
def test_hopeless_evaluation_does_not_shrink_the_training_batch() -> None:
    with hooked_engine() as engine:
        trainer = make_trainer(
            RoundPipeTrainer,
            engine,
            ROWS,
            eval_dataset=ROWS[:5],
            eval_on_start=True,
            auto_find_batch_size=True,
        )
        run_short("forward", 99)
        with pytest.raises(
            torch.OutOfMemoryError, match="Tried to allocate.*lower per_device_eval_batch_size"
        ):
            run(trainer)
        assert trainer._train_batch_size == trainer.args.per_device_train_batch_size
