"""A checkpoint is all there is to a run: training that goes on from it in another engine, with
other devices, another plan and other pinning, gives to the bit what the uninterrupted run gives.
Saving is a synchronisation point, so the uninterrupted run saves too.
"""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import (
    ConfigError,
    GradScaler,
    ModelExecutePlan,
    RoundPipe,
    load_checkpoint,
    save_checkpoint,
)
from roundpipe.errors import RoundPipeError
from tests.support.branching import branches_batch, make_branches
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import TIED_LLAMA, Batch, make_mlp, mlp_batch
from tests.support.reference import Reference

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(8)]
SAVED_AFTER = 3


def with_dropout() -> nn.Sequential:
    model = make_mlp()
    return nn.Sequential(*[layer for linear in model for layer in (linear, nn.Dropout(0.3))])


def in_bf16() -> nn.Sequential:
    return make_mlp().to(torch.bfloat16)


def as_bf16(batch: Batch) -> Batch:
    return batch._replace(
        args=(batch.args[0].bfloat16(),),
        loss_fn=lambda out, target: batch.loss_fn(out.float(), target),
    )


def two_groups(engine: RoundPipe) -> torch.optim.Optimizer:
    named = engine.optim_named_parameters()
    return roundpipe.optim.AdamW(
        [
            {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
            {
                "params": [p for name, p in named if not name.endswith("weight")],
                "lr": 0.02,
                "betas": (0.5, 0.9),
            },
        ],
        lr=0.01,
    )


OPTIMIZERS: dict[str, Callable[[RoundPipe], torch.optim.Optimizer]] = {
    "ours, two groups": two_groups,
    "torch sgd": lambda engine: torch.optim.SGD(engine.optim_parameters(), lr=0.05, momentum=0.9),
    "torch adam": lambda engine: torch.optim.Adam(
        engine.optim_parameters(), lr=torch.tensor(0.01), amsgrad=True
    ),
}


def train(
    engine: RoundPipe,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    *,
    is_async: bool,
    scaler: Any = None,
) -> list[Tensor]:
    """Learning rates move with the batch's place, so that hyper-parameters have to come back
    too."""

    def step_fn() -> None:
        optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad()

    losses = []
    for batch in batches:
        if scaler is not None:
            batch = batch._replace(
                loss_fn=lambda out, target, of=batch.loss_fn: scaler.scale(of(out, target))
            )
        losses.append(run_batch(engine, batch, 2))
        engine.step(step_fn, is_async=is_async)
        if scaler is not None:
            scaler.update()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
    return losses


def goes_on_alike(
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[RoundPipe], torch.optim.Optimizer],
    batches: list[Batch],
    path: Path,
    engines: Engines,
    *,
    is_async: bool,
    scaled: bool = False,
    settings: dict[str, Any] | None = None,
    other: dict[str, Any] | None = None,
) -> None:
    first, scaler = (
        engines(make(), TWO, **(settings or {})),
        GradScaler(init_scale=64.0) if scaled else None,
    )
    optimizer = make_optimizer(first)
    train(first, optimizer, batches[:SAVED_AFTER], is_async=is_async, scaler=scaler)
    save_checkpoint(path, first, optimizer, scaler)
    expected = train(first, optimizer, batches[SAVED_AFTER:], is_async=is_async, scaler=scaler)

    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.manual_seed(99)
    second = engines(model, **{"devices": THREE, **(settings or {}), **(other or {})})
    resumed, scaler = make_optimizer(second), GradScaler() if scaled else None
    load_checkpoint(path, second, resumed, scaler)
    losses = train(second, resumed, batches[SAVED_AFTER:], is_async=is_async, scaler=scaler)
    ONE.check(torch.stack(losses), torch.stack(expected))
    ONE.check(engine_weights(second), engine_weights(first))
    for a, e in zip(
        resumed.state_dict()["state"].values(),
        optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        ONE.check(
            {k: torch.as_tensor(v) for k, v in a.items()},
            {k: torch.as_tensor(v) for k, v in e.items()},
        )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_to_the_bit(
    optimizer: str, is_async: bool, tmp_path: Path, engines: Engines
) -> None:
    """With dropout, other devices, another plan, and unpinned memory."""
    plan = ModelExecutePlan(
        fwd_plan=[range(5), range(5, 9)], bwd_plan=[range(9, 14), range(4, 9), range(4)]
    )
    goes_on_alike(
        with_dropout,
        OPTIMIZERS[optimizer],
        BATCHES,
        tmp_path / "saved.safetensors",
        engines,
        is_async=is_async,
        other={
            "pin_model": "off",
            "model_run_config": roundpipe.RoundPipeRunConfig(execute_plan=plan),
        },
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_bf16_weights_go_on_from_their_fp32_masters(
    is_async: bool, tmp_path: Path, engines: Engines
) -> None:
    goes_on_alike(
        in_bf16,
        two_groups,
        [as_bf16(batch) for batch in BATCHES],
        tmp_path / "saved.safetensors",
        engines,
        is_async=is_async,
        settings={"optim_dtype": torch.float32},
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_loss_scale_goes_on(is_async: bool, tmp_path: Path, engines: Engines) -> None:
    """Right after an overflow, which an asynchronous update has not taken up yet."""
    batches = [mlp_batch(rows=6, seed=seed) for seed in range(8)]
    batches[SAVED_AFTER - 1].label[0, 0] = float("inf")
    goes_on_alike(
        make_mlp,
        two_groups,
        batches,
        tmp_path / "saved.safetensors",
        engines,
        is_async=is_async,
        scaled=True,
    )


def test_the_file_has_the_models_own_names_and_tied_weights_once(
    tmp_path: Path, engines: Engines
) -> None:
    engine = engines(TIED_LLAMA.make().to(torch.bfloat16), TWO, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters())
    run_batch(engine, TIED_LLAMA.batch(4, 0), 2)
    engine.step(optimizer.step, is_async=False)
    save_checkpoint(tmp_path / "saved", engine, optimizer)
    names = [name for name, _ in engine.model.named_parameters()]
    assert "lm_head.weight" not in names
    saved = safetensors.torch.load_file(tmp_path / "saved")
    of_kind = {
        kind: sorted(key.removeprefix(kind) for key in saved if key.startswith(kind))
        for kind in ("model/", "master/")
    }
    assert of_kind["model/"] == of_kind["master/"] == sorted(names)
    assert sorted(k for k in saved if k.startswith("optimizer/")) == sorted(
        f"optimizer/{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")
    )
    for name, weight in engine.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(saved[f"model/{name}"], weight)
    assert all(saved[f"master/{name}"].dtype is torch.float32 for name in names)


def test_masters_that_hold_no_more_than_the_weights_are_not_written(
    tmp_path: Path, engines: Engines
) -> None:
    engine = engines(make_mlp(), ONE)
    save_checkpoint(tmp_path / "saved", engine, torch.optim.SGD(engine.optim_parameters(), lr=0.1))
    assert not [
        key for key in safetensors.torch.load_file(tmp_path / "saved") if key.startswith("master/")
    ]


def test_buffers_frozen_weights_and_several_optimizers(tmp_path: Path, engines: Engines) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        model[2].bias.requires_grad_(False)
        return model

    def pair(engine: RoundPipe) -> list[torch.optim.Optimizer]:
        masters = engine.optim_parameters()
        return [
            torch.optim.SGD(masters[:2], lr=0.1, momentum=0.5),
            torch.optim.Adagrad(masters[2:], lr=0.1),
        ]

    def step_all(optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    first = engines(make(), TWO)
    optimizers = pair(first)
    for batch in BATCHES[:2]:
        run_batch(first, batch, 1)
        first.step(step_all, False, optimizers)
    with torch.no_grad():
        first.model[2].bias.fill_(3.0)
    save_checkpoint(tmp_path / "saved", first, optimizers)
    second = engines(make(), ONE)
    others = pair(second)
    load_checkpoint(tmp_path / "saved", second, others)
    ONE.check(second.state_dict(), dict(first.state_dict()))
    for engine, stepped in ((first, optimizers), (second, others)):
        run_batch(engine, BATCHES[2], 1)
        engine.step(step_all, False, stepped)
    ONE.check(second.state_dict(), dict(first.state_dict()))


def test_generators_of_python_and_numpy_come_back(tmp_path: Path, engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: E731
    save_checkpoint(tmp_path / "saved", engine, optimizer)
    expected = draw()
    load_checkpoint(tmp_path / "saved", engine, optimizer)
    assert draw() == expected


def everything(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {
        f"{place}/{key}": torch.as_tensor(value).clone()
        for place, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    masters = {
        f"master {name}": master.detach().clone()
        for name, master in engine.optim_named_parameters()
    }
    return {**engine_weights(engine), **masters, **state, "rng": torch.get_rng_state()}


def other_width() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))


def one_more() -> nn.Sequential:
    return nn.Sequential(*make_mlp(2), nn.Linear(16, 16))


def all_in_one(engine: RoundPipe) -> torch.optim.Optimizer:
    return roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("make", "make_optimizer", "scaled", "message"),
    [
        (
            other_width,
            two_groups,
            False,
            r"'0.weight' in shape \(16, 16\), the model in shape \(8, 16\)",
        ),
        (
            one_more,
            two_groups,
            False,
            r"lacks 2 \(3.bias, 3.weight\) and has 0 unexpected \(none\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(16, 16)),
            two_groups,
            False,
            r"has 2 unexpected \(2.bias, 2.weight\)",
        ),
        (lambda: make_mlp(2), all_in_one, False, "2 param groups, this AdamW has 1"),
        (
            lambda: make_mlp(2),
            OPTIMIZERS["torch sgd"],
            False,
            "state of AdamW, to be loaded into SGD",
        ),
        (lambda: make_mlp(2), two_groups, True, "saved without an enabled GradScaler"),
    ],
    ids=["shape", "missing", "unexpected", "groups", "class", "scaler"],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    make: Any, make_optimizer: Any, scaled: bool, message: str, tmp_path: Path, engines: Engines
) -> None:
    first = engines(make_mlp(2), ONE)
    optimizer = two_groups(first)
    train(first, optimizer, BATCHES[:2], is_async=False)
    save_checkpoint(tmp_path / "saved", first, optimizer)
    second = engines(make(), ONE)
    optimizer = make_optimizer(second)
    train(second, optimizer, BATCHES[2:4], is_async=False)
    before = everything(second, optimizer)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path / "saved", second, optimizer, GradScaler() if scaled else None)
    ONE.check(everything(second, optimizer), before)


def test_files_and_optimizers_of_others_are_refused(tmp_path: Path, engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    safetensors.torch.save_file(engine.state_dict(), tmp_path / "weights")
    with pytest.raises(ConfigError, match="metadata None.*not written by this version"):
        load_checkpoint(tmp_path / "weights", engine, optimizer)
    with pytest.raises(ConfigError, match="is a folder"):
        save_checkpoint(tmp_path, engine, optimizer)
    with pytest.raises(ConfigError, match="not one of the engine's"):
        save_checkpoint(
            tmp_path / "saved", engine, torch.optim.SGD(make_mlp().parameters(), lr=0.1)
        )
    optimizer.param_groups[0]["odd"] = object
    with pytest.raises(ConfigError, match="could not be loaded again"):
        save_checkpoint(tmp_path / "saved", engine, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_disabled_scaler_is_none(tmp_path: Path, engines: Engines) -> None:
    """Saved with one, it loads with another or without, and not into one that scales."""
    engine, off = engines(make_mlp(), ONE), GradScaler(enabled=False)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    save_checkpoint(tmp_path / "saved", engine, optimizer, off)
    load_checkpoint(tmp_path / "saved", engine, optimizer)
    load_checkpoint(tmp_path / "saved", engine, optimizer, off)
    with pytest.raises(ConfigError, match="saved without an enabled GradScaler"):
        load_checkpoint(tmp_path / "saved", engine, optimizer, GradScaler())


def test_a_checkpoint_cannot_be_taken_inside_a_step(tmp_path: Path, engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCHES[0], 2)
    with pytest.raises(RoundPipeError, match="inside step_fn"):
        engine.step(lambda: save_checkpoint(tmp_path / "saved", engine, optimizer), is_async=False)


def test_saving_makes_no_second_copy_in_memory(tmp_path: Path, engines: Engines) -> None:
    """The high-water mark of the process, reset right before, stays close to where it was."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    engine = engines(model, ONE)
    optimizer = torch.optim.Adam(engine.optim_parameters(), lr=0.1)
    run_batch(
        engine,
        Batch(
            (torch.ones(2, 1024),), {}, torch.zeros(2, 1024), lambda o, t: (o - t).square().sum()
        ),
        1,
    )
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    num_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    save_checkpoint(tmp_path / "saved", engine, optimizer)
    assert (tmp_path / "saved").stat().st_size > num_bytes
    assert peak_bytes() - before < num_bytes / 4


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        * 1024
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adafactor", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stock_torch_state_goes_on_in_our_optimizer(
    kind: str, options: dict[str, Any], devices: DeviceSet, engines: Engines
) -> None:
    """Plain training for three steps, the engine from there on."""
    plain = make_mlp()
    reference = Reference(
        plain, lambda params: getattr(torch.optim, kind)(params, lr=0.01, **options)
    )
    for batch in BATCHES[:3]:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
    engine = engines(make_mlp(), devices)
    engine.load_state_dict(reference.weights)
    optimizer = getattr(roundpipe.optim, kind)(engine.optim_parameters(), lr=0.01)
    optimizer.load_state_dict(
        copy.deepcopy(reference.optimizer.state_dict())
    )  # which keeps the tensors it is given
    assert optimizer.param_groups[0].get("fused", True), "torch's choice of a kernel is no state"
    for batch in BATCHES[3:]:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 2)
        engine.step(optimizer.step, is_async=False)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)


def test_a_model_that_is_no_sequence_goes_on_too(tmp_path: Path) -> None:
    """Through `AutoRoundPipe`, whose parts are engines of their own and share one optimizer
    thread."""

    def wrapped(devices: int) -> roundpipe.AutoRoundPipe:
        return roundpipe.wrap_model_to_roundpipe(
            make_branches(), upper_threshold=0, devices=devices
        )

    def steps(
        engine: roundpipe.AutoRoundPipe, optimizer: torch.optim.Optimizer, seeds: range
    ) -> None:
        for seed in seeds:
            batch = branches_batch(4, seed)
            batch.loss_fn(engine(*batch.args, **batch.kwargs), batch.label).backward()
            engine.step(optimizer.step)

    with wrapped(2) as first, wrapped(2) as second:
        assert isinstance(first, roundpipe.AutoRoundPipe)
        optimizer, resumed = (
            roundpipe.optim.AdamW(engine.optim_parameters()) for engine in (first, second)
        )
        steps(first, optimizer, range(2))
        save_checkpoint(tmp_path / "saved", first, optimizer)
        steps(first, optimizer, range(2, 4))
        load_checkpoint(tmp_path / "saved", second, resumed)
        steps(second, resumed, range(2, 4))
        ONE.check(engine_weights(second), engine_weights(first))
