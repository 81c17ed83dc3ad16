"""The gradient norm that clipping uses comes from the devices with the gradients, and equals the
plain model's.

Only where several calls, or several uses of a tied weight, were added up is the gradient read again
to tell.
"""

import math
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.device import VirtualDevice
from roundpipe.optim import clipping
from roundpipe.params.gradients import row_norms
from tests.support.device_sets import ONE, DeviceSet
from tests.support.engines import Engines, run_batch
from tests.support.models import CASES, MLP, TIED_LLAMA, Batch, ModelCase, make_mlp, mlp_batch
from tests.support.reference import Reference, plain_call

ONE_STAGE = ModelExecutePlan([], [range(7)])


def norms_of(engine: RoundPipe, whose: Any, limit: float = math.inf) -> float:
    return float(
        engine.step(lambda: roundpipe.clip_grad_norm_(whose, limit), is_async=False).result()
    )


def plain_norm(case: ModelCase, batches: list[Batch]) -> float:
    gradients: dict[str, torch.Tensor] = {}
    for batch in batches:
        for name, gradient in plain_call(
            case.make(), batch.split(2), batch.loss_fn
        ).gradients.items():
            gradients[name] = gradients.get(name, 0) + gradient
    return float(torch.nn.utils.get_total_norm(list(gradients.values())))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per gradient that clipping has read."""
    read: list[int] = []
    square = clipping.sum_of_squares
    monkeypatch.setattr(
        clipping, "sum_of_squares", lambda parts: (read.append(len(parts)), square(parts))[1]
    )
    return read


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_norm_is_the_plain_models_and_no_gradient_is_read(
    case: ModelCase, reads: list[int], devices: DeviceSet, engines: Engines
) -> None:
    """But that of a tied weight, which has two parts and counts once."""
    engine = engines(case.make(), devices)
    batch = case.batch(4, 0)
    run_batch(engine, batch, 2)
    assert norms_of(engine, engine) == pytest.approx(plain_norm(case, [batch]), rel=1e-5)
    assert reads == ([2] if case is TIED_LLAMA else [])


def test_gradients_of_several_calls_are_read(
    reads: list[int], devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make_mlp(), devices)
    batches = [MLP.batch(4, seed) for seed in range(3)]
    for batch in batches:
        run_batch(engine, batch, 2, execute_plan=ONE_STAGE)  # in shares there would be more to read
    assert norms_of(engine, engine) == pytest.approx(plain_norm(MLP, batches), rel=1e-5)
    assert reads == [1] * 8


def test_the_next_step_has_norms_of_its_own(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    for seed in range(3):
        run_batch(engine, MLP.batch(4, seed), 2)
        assert norms_of(engine, engine) == pytest.approx(
            plain_norm(MLP, [MLP.batch(4, seed)]), rel=1e-5
        )
        engine.zero_grad()  # because no optimizer has


def test_an_optimizer_over_some_masters_clips_those_only(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    named = dict(engine.optim_named_parameters())
    optimizer = torch.optim.SGD([named["0.weight"], named["2.bias"]], lr=0.1)
    batch = MLP.batch(4, 0)
    run_batch(engine, batch, 2)
    gradients = plain_call(make_mlp(), batch.split(2), batch.loss_fn).gradients
    expected = torch.nn.utils.get_total_norm([gradients["0.weight"], gradients["2.bias"]])
    assert norms_of(engine, optimizer) == pytest.approx(float(expected), rel=1e-5)


def test_a_norm_after_clipping_is_the_clipped_one(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    run_batch(engine, MLP.batch(4, 0), 2)

    def step_fn() -> list[float]:
        return [float(roundpipe.clip_grad_norm_(engine, limit)) for limit in (0.05, 0.05, math.inf)]

    first, second, third = engine.step(step_fn, is_async=False).result()
    assert first > 0.05
    assert second == pytest.approx(0.05, rel=1e-4)
    assert third == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32, torch.float16])
def test_the_norm_is_that_of_the_gradients_as_they_offloaded(
    grad_dtype: torch.dtype | None, engines: Engines
) -> None:
    """Rounded to 16 bits; fp16 overflows to inf, which must show."""
    model = make_mlp().bfloat16()
    batch = mlp_batch(rows=4)
    batch = batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16())
    for factor in (1.0, 1e6):
        loss_fn = scaled(batch.loss_fn, factor)
        engine = engines(
            make_mlp().bfloat16(), ONE, optim_dtype=torch.float32, grad_dtype=grad_dtype
        )
        run_batch(engine, batch._replace(loss_fn=loss_fn), 2)
        gradients = plain_call(model, batch.split(2), loss_fn).gradients.values()
        offloaded = [gradient.to(grad_dtype or torch.bfloat16).double() for gradient in gradients]
        assert norms_of(engine, engine) == pytest.approx(
            float(torch.nn.utils.get_total_norm(offloaded)), rel=1e-6
        )


def scaled(loss_fn: Any, factor: float) -> Any:
    return lambda output, target: loss_fn(output, target) * factor


@pytest.mark.parametrize("count", [1, 3])
def test_the_norm_depends_on_nothing_but_the_gradients(count: int) -> None:
    """Neither devices nor plan, to the bit."""
    seen = set()
    for devices in (1, count):
        for stages in (1, 2):
            engine = RoundPipe(
                make_mlp(), devices=[VirtualDevice(index) for index in range(devices)]
            )
            halves = [range(7)] if stages == 1 else [range(3, 7), range(3)]
            plan = roundpipe.ModelExecutePlan(
                fwd_plan=[] if stages == 1 else [range(3)], bwd_plan=halves
            )
            with engine:
                run_batch(engine, MLP.batch(4, 0), 2, execute_plan=plan)
                seen.add(norms_of(engine, engine))
    assert len(seen) == 1


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0), (5, 4), (2, 3, 4), (1, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    norms = row_norms(gradient)
    assert norms.shape == (shape[0] if len(shape) > 1 else 1,)
    assert norms.dtype == (torch.float32 if dtype is torch.bfloat16 else dtype)
    assert float(norms.norm()) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_a_large_gradient_is_summed_precisely() -> None:
    """In fp32, one number at a time, a sum of as many equal squares would stand still."""
    norms = row_norms(torch.full((256, 1 << 16), 1.5, dtype=torch.bfloat16)).double()
    assert float(norms.norm()) == pytest.approx(1.5 * math.sqrt(256 * (1 << 16)), rel=1e-6)


def test_clipped_training_equals_torchs(devices: DeviceSet, engines: Engines) -> None:
    batches = [mlp_batch(rows=6, seed=seed) for seed in range(4)]
    reference = Reference(make_mlp(), lambda params: torch.optim.AdamW(params, lr=0.01))
    engine = engines(make_mlp(), devices)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)
    norms, expected = [], []

    def step_fn() -> None:
        norms.append(roundpipe.clip_grad_norm_(engine, 0.05))
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step(lambda params: expected.append(torch.nn.utils.clip_grad_norm_(params, 0.05)))
        run_batch(engine, batch, 2)
        engine.step(step_fn, is_async=False)
    devices.check(torch.stack(norms), torch.stack(expected), bitwise=False)
    devices.check(dict(engine.named_parameters()), reference.weights, bitwise=False)
    assert min(map(float, expected)) > 0.05
