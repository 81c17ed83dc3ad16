"""Low-precision optimizer state: what is stored is right on average, repeats to the bit, and trains
like fp32."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, RoundPipe, load_checkpoint, save_checkpoint
from roundpipe.kernels import chunks, native, updates
from roundpipe.kernels.updates import BLOCK
from roundpipe.optim import AdamW, LeanAdamW
from roundpipe.optim.moments import BFloat16, Blocks8, Format, Noise, round_to_bf16
from roundpipe.params.window import Master
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import Batch, make_mlp, mlp_batch
from tests.support.reference import Reference

SIGNED = Blocks8(dtype=torch.int8, power=2, least=0)
POSITIVE = Blocks8(dtype=torch.uint8, power=4, least=1)
FORMATS: dict[str, tuple[Format, bool]] = {
    "bf16": (BFloat16(), True),
    "8 bits, signed": (SIGNED, True),
    "8 bits, positive": (POSITIVE, False),
}
OPTIONS: dict[str, Any] = {"bf16": torch.bfloat16, "8bit": "8bit", "fp32": torch.float32}
COUNT = 5 * BLOCK + 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK", BLOCK)


def values_like_moments(is_signed: bool) -> Tensor:
    """Over six orders of magnitude, in blocks of different sizes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(COUNT, generator=generator) * 10 ** (
        torch.rand(COUNT, generator=generator) * 3 - 3
    )
    values *= torch.logspace(-3, 0, COUNT)
    return values if is_signed else values.square()


def stored_and_read(form: Format, values: Tensor, seed: int) -> Tensor:
    stored = form.zeros(values)
    form.write(values.clone(), stored, Noise(seed).for_moments(0, values.numel())[0])
    return form.read(stored, "test").clone()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_right_on_average_and_never_far_off(name: str) -> None:
    """In each of ten orders of size the mean error over all draws is what chance leaves of a single
    draw's."""
    form, is_signed = FORMATS[name]
    values = values_like_moments(is_signed)
    draws = torch.stack([stored_and_read(form, values, seed) for seed in range(400)])
    largest = torch.nn.functional.pad(values.abs(), (0, -COUNT % BLOCK)).view(-1, BLOCK).amax(1)
    error = (draws - values).double() / largest.repeat_interleave(BLOCK)[:COUNT]
    assert error.abs().max() < (0.02 if name.startswith("8") else 0.01)
    assert error.abs().max() > 1e-4, "nothing was rounded"
    for alike in values.abs().argsort().chunk(10):
        chance = error[:, alike].square().mean().sqrt() / error[:, alike].numel() ** 0.5
        assert error[:, alike].mean().abs() < 5 * chance
    if not is_signed:
        assert (draws > 0).all()


def test_an_average_that_moves_by_less_than_a_step_still_moves() -> None:
    """beta2 = 0.999 in bf16: rounded to nearest it would stand still for ever."""
    decayed, nearest = (
        torch.full((4096,), 1.0, dtype=torch.bfloat16),
        torch.full((4096,), 1.0, dtype=torch.bfloat16),
    )
    for step in range(500):
        round_to_bf16(decayed.float() * 0.999, decayed, Noise(step).for_master(0, 4096))
        nearest.copy_(nearest.float() * 0.999)
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert decayed.float().mean().item() == pytest.approx(0.999**500, rel=2e-2)


def test_infs_and_nans_stay_and_zeros_stay_zero() -> None:
    """A NaN of fp16 has bits to which a random number could be added until a zero came out."""
    values = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    every_nan = torch.tensor([0x7FFF, -1, 0x7C01, -0x3FF], dtype=torch.int16).view(torch.float16)
    target = torch.empty(8, dtype=torch.bfloat16)
    most = torch.full((8,), 0xFFFF, dtype=torch.int32)
    round_to_bf16(torch.cat((values, every_nan.float())), target, most)
    assert target[:4].tolist() == values.tolist()
    assert target[4:].isnan().all()
    assert stored_and_read(SIGNED, torch.zeros(COUNT), 0).tolist() == [0.0] * COUNT


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    made = [mlp_batch(rows=8, seed=seed % 16, width=32) for seed in range(count)]
    return [batch._replace(args=(batch.args[0].to(dtype),)) for batch in made]


def make_engine(engines: Engines, devices: DeviceSet, dtype: torch.dtype) -> RoundPipe:
    return engines(make_model().to(dtype), devices, optim_dtype=dtype)


def make_model() -> nn.Sequential:
    return make_mlp(num_linears=3, width=32)


def train(engine: RoundPipe, optimizer: torch.optim.Optimizer, steps: list[Batch]) -> list[float]:
    losses = []
    for batch in steps:
        losses.append(float(run_batch(engine, batch, 2)))
        engine.step(optimizer.step, is_async=False)
    return losses


def curve(make: Any, dtype: torch.dtype) -> list[float]:
    """A plain loop; the optimizer's masters are fed the gradients by hand, as the engine would
    offload them."""
    model = make_model().to(dtype)
    parameters = list(model.parameters())
    masters = [Master(parameter.detach().clone()) for parameter in parameters]
    optimizer, losses = make(masters), []
    for step in range(160):
        batch = mlp_batch(rows=8, seed=step % 4, width=32)
        loss = batch.loss_fn(model(batch.args[0].to(dtype)).float(), batch.label)
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.detach())
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def right_curve() -> list[float]:
    return curve(
        lambda masters: torch.optim.AdamW(masters, lr=5e-3, foreach=False, fused=False),
        torch.float32,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "masters", [torch.float32, torch.bfloat16], ids=["fp32 masters", "bf16 masters"]
)
@pytest.mark.parametrize("moments", OPTIONS)
def test_the_loss_curve_is_fp32s(
    moments: str, masters: torch.dtype, right_curve: list[float]
) -> None:
    """160 steps over 4 batches again and again. bf16 masters are bf16 weights too, which costs more
    than the moments.

    The same without random rounding stays far behind, see the test of an average that moves.
    """
    losses = curve(lambda params: LeanAdamW(params, lr=5e-3, moments=OPTIONS[moments]), masters)
    assert sum(right_curve[-4:]) < 0.2 * sum(right_curve[:4]), (
        "nothing was learnt, so nothing was tested"
    )
    for part in (slice(40, 60), slice(90, 110), slice(140, 160)):
        assert sum(losses[part]) == pytest.approx(sum(right_curve[part]), rel=0.02)


def test_fp32_moments_over_fp32_masters_are_exact(engines: Engines) -> None:
    first, second = engines(make_model(), TWO), engines(make_model(), ONE)
    train(first, LeanAdamW(first.optim_parameters(), lr=0.01, moments=torch.float32), batches(10))
    reference = Reference(make_model(), lambda params: torch.optim.AdamW(params, lr=0.01))
    for batch in batches(10):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
    TWO.check(engine_weights(first), reference.weights, bitwise=False)
    assert len(second.optim_parameters()) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("moments", OPTIONS)
def test_a_run_repeats_and_resumes_to_the_bit(
    moments: str,
    dtype: torch.dtype,
    tmp_path: Path,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding draws from the step's number, not from a generator somebody else could move on; and
    a machine without a compiler goes on where one with the kernel was."""
    whole = make_engine(engines, TWO, dtype)
    optimizer = LeanAdamW(whole.optim_parameters(), moments=OPTIONS[moments])
    train(whole, optimizer, batches(6, dtype)[:3])
    save_checkpoint(tmp_path / "saved", whole, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    train(whole, optimizer, batches(6, dtype)[3:])

    from_file = make_engine(engines, THREE, dtype)
    resumed = LeanAdamW(from_file.optim_parameters())
    load_checkpoint(tmp_path / "saved", from_file, resumed)
    torch.manual_seed(17)
    train(from_file, resumed, batches(6, dtype)[3:])
    ONE.check(engine_weights(from_file), engine_weights(whole))

    if (moments, dtype) != ("fp32", torch.float32):  # whose reference is torch's to a rounding
        monkeypatch.setattr(native, "library", lambda: None)
    from_state = make_engine(engines, ONE, dtype)
    from_state.load_state_dict(weights)
    loaded = LeanAdamW(from_state.optim_parameters())
    loaded.load_state_dict(state)
    train(from_state, loaded, batches(6, dtype)[3:])
    ONE.check(engine_weights(from_state), engine_weights(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("moments", OPTIONS)
def test_every_format_is_updated_in_one_pass(
    moments: str, dtype: torch.dtype, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8-bit moments an 8B model's step did not end within minutes, because torch's kernels
    went over the values in between a dozen times."""
    if native.library() is None:
        pytest.skip("this machine has no C compiler")
    monkeypatch.setattr(updates, "_in_chunks", lambda *_: pytest.fail("torch's kernels ran"))
    for devices, is_async in ((ONE, False), (THREE, True)):
        engine = make_engine(engines, devices, dtype)
        before = {name: value.clone() for name, value in engine_weights(engine).items()}
        optimizer = LeanAdamW(engine.optim_parameters(), lr=0.1, moments=OPTIONS[moments])
        for batch in batches(2, dtype):
            run_batch(engine, batch, 2)
            engine.step(optimizer.step, is_async=is_async)
        for name, value in engine_weights(engine).items():
            assert not torch.equal(value, before[name])


def test_fp32_moments_over_fp32_masters_are_adamws_to_the_bit(engines: Engines) -> None:
    """Nothing is rounded there, so the rule is AdamW's own."""
    runs = []
    for make, settings in ((LeanAdamW, {"moments": torch.float32}), (AdamW, {})):
        engine = engines(make_model(), TWO)
        train(engine, make(engine.optim_parameters(), lr=0.01, **settings), batches(4))
        runs.append(engine_weights(engine))
    ONE.check(runs[0], runs[1])


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_asynchronous_steps_round_as_synchronous_ones(moments: str, engines: Engines) -> None:
    """Gradients do not depend on the weights here, so it does not matter which version a call
    reads."""
    runs = []
    for devices, is_async in ((ONE, False), (ONE, True), (THREE, False), (THREE, True)):
        engine = engines(nn.Sequential(nn.Linear(64, 64)), devices)
        with torch.no_grad():
            for number, parameter in enumerate(engine.parameters()):
                parameter.copy_(
                    torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter)
                )
        optimizer = LeanAdamW(engine.optim_parameters(), lr=0.01, moments=OPTIONS[moments])
        for step in range(4):
            rows = torch.linspace(-1, 1 + step, 8 * 64).view(8, 64)
            batch = Batch((rows,), {}, rows.roll(1), lambda out, label: (out * label).sum())
            run_batch(engine, batch, 2)
            engine.step(optimizer.step, is_async=is_async)
        engine.synchronize()
        runs.append(engine_weights(engine))
    for run in runs[1:]:
        ONE.check(run, runs[0])


@pytest.mark.parametrize("moments", OPTIONS)
def test_state_takes_the_bytes_it_says(moments: str, engines: Engines) -> None:
    engine = engines(nn.Sequential(nn.Linear(512, 512, bias=False)), ONE, optim_dtype=torch.float32)
    optimizer = LeanAdamW(engine.optim_parameters(), moments=OPTIONS[moments])
    batch = Batch(
        (torch.ones(1, 512),),
        {},
        torch.zeros(1, 512),
        lambda out, target: (out - target).square().sum(),
    )
    train(engine, optimizer, [batch])
    (state,) = optimizer.state.values()
    num_bytes = sum(value.nbytes for key, value in state.items() if key != "step")
    assert num_bytes / 512**2 == pytest.approx(
        {"bf16": 4, "8bit": 2 + 8 / BLOCK, "fp32": 8}[moments]
    )


@pytest.mark.parametrize("moments", OPTIONS)
def test_a_stock_torch_state_is_taken_over(moments: str, engines: Engines) -> None:
    """Within rounding, and the optimizer keeps its own formats."""
    reference = Reference(make_model(), lambda params: torch.optim.AdamW(params, lr=3e-3))
    for batch in batches(20):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
    engine = engines(make_model(), ONE)
    engine.load_state_dict(reference.weights)
    optimizer = LeanAdamW(engine.optim_parameters(), lr=3e-3, moments=OPTIONS[moments])
    optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    start = reference.weights
    for batch in batches(23)[20:]:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
    train(engine, optimizer, batches(23)[20:])
    assert {float(state["step"]) for state in optimizer.state.values()} == {23.0}
    moved = torch.cat([(engine_weights(engine)[name] - start[name]).flatten() for name in start])
    right = torch.cat([(reference.weights[name] - start[name]).flatten() for name in start])
    assert (moved - right).norm() < 0.1 * right.norm()


def test_bad_settings_are_refused(engines: Engines) -> None:
    engine = engines(make_model().half(), ONE)
    with pytest.raises(ConfigError, match="moments is torch.float16"):
        LeanAdamW(engine.optim_parameters(), moments=torch.float16)
    optimizer = LeanAdamW(engine.optim_parameters())
    batch = batches(1)[0]
    run_batch(engine, batch._replace(args=(batch.args[0].half(),)), 2)
    with pytest.raises(ConfigError, match="torch.float16; make it over"):
        engine.step(optimizer.step, is_async=False)


def test_clipping_reaches_the_update(engines: Engines) -> None:
    """The factor is applied as chunks are read; fp32 moments, so that the oracle is exact."""
    for make, options in ((LeanAdamW, {"moments": torch.float32}), (AdamW, {})):
        engine = engines(make_model(), TWO)
        optimizer = make(engine.optim_parameters(), lr=0.01, **options)
        reference = Reference(make_model(), lambda params: torch.optim.AdamW(params, lr=0.01))

        def step_fn(optimizer: torch.optim.Optimizer = optimizer) -> None:
            roundpipe.clip_grad_norm_(optimizer, 0.05)
            optimizer.step()
            optimizer.zero_grad()

        for batch in batches(5):
            reference.forward_backward(batch.split(2), batch.loss_fn)
            reference.step(lambda params: torch.nn.utils.clip_grad_norm_(params, 0.05))
            run_batch(engine, batch, 2)
            engine.step(step_fn, is_async=False)
        TWO.check(engine_weights(engine), reference.weights, bitwise=False)
