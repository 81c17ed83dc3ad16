"""A resumed run differed from the uninterrupted one: moments were cast to the dtype of the
parameter, masters rebuilt from bf16 weights, the random state lost, or an update still on its way
was missed.

Dropout, AdamW, a linear schedule and clipping; saved at step 3 of 8 while a slow update is in
flight, resumed in a fresh engine on other devices. Saving is a synchronisation point, in the
reference too.

Source: huggingface/transformers#46628, #11323, pytorch/pytorch#43706, TensorAuto/OpenTau#185.
"""

import time
from pathlib import Path

import pytest
import safetensors
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipe, load_checkpoint, save_checkpoint
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import make_mlp, mlp_batch

STEPS, SAVED_AT = 8, 3


class SlowAdamW(torch.optim.AdamW):
    def step(self, closure: None = None) -> None:
        time.sleep(0.01)
        super().step(closure)
        time.sleep(0.01)


def make_model(dtype: torch.dtype) -> nn.Sequential:
    linears = make_mlp()
    return nn.Sequential(*[layer for linear in linears for layer in (linear, nn.Dropout(0.1))]).to(
        dtype
    )


class Run:
    """A training loop with all that a checkpoint has to bring back, but for the data's position and
    the schedule's."""

    def __init__(
        self, engines: Engines, devices: DeviceSet, dtype: torch.dtype, *, is_async: bool
    ) -> None:
        self.engine: RoundPipe = engines(make_model(dtype), devices, optim_dtype=torch.float32)
        self.optimizer = SlowAdamW(self.engine.optim_parameters(), lr=0.01)
        self._dtype, self._is_async = dtype, is_async

    def steps(self, numbers: range) -> list[Tensor]:
        losses = []
        for number in numbers:
            batch = mlp_batch(6, number)
            cast = batch._replace(
                args=(batch.args[0].to(self._dtype),),
                loss_fn=lambda o, t, b=batch: b.loss_fn(o.float(), t),
            )
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 * (1 - number / STEPS)
            losses.append(run_batch(self.engine, cast, 2))
            self.engine.step(self._update, self._is_async)
        return losses

    def _update(self) -> None:
        roundpipe.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(
    dtype: torch.dtype, is_async: bool, tmp_path: Path, engines: Engines
) -> None:
    torch.manual_seed(5)
    whole = Run(engines, TWO, dtype, is_async=is_async)
    whole.steps(range(SAVED_AT))
    save_checkpoint(tmp_path / "saved", whole.engine, whole.optimizer)
    expected = whole.steps(range(SAVED_AT, STEPS))

    torch.manual_seed(1234)
    resumed = Run(engines, THREE, dtype, is_async=is_async)
    load_checkpoint(tmp_path / "saved", resumed.engine, resumed.optimizer)
    losses = resumed.steps(range(SAVED_AT, STEPS))
    ONE.check(torch.stack(losses), torch.stack(expected))
    ONE.check(engine_weights(resumed.engine), engine_weights(whole.engine))
    assert {float(state["step"]) for state in resumed.optimizer.state.values()} == {float(STEPS)}


def test_moments_of_bf16_masters_keep_their_own_precision(tmp_path: Path, engines: Engines) -> None:
    """torch's `load_state_dict` casts them to the parameter's dtype; some optimizers keep wider
    ones on purpose."""

    class WideMomentum(torch.optim.SGD):
        """Keeps its momentum in fp32 whatever the parameters are."""

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for master in self.param_groups[0]["params"]:
                momentum = self.state[master].setdefault("momentum", torch.zeros(master.shape))
                momentum.mul_(0.9).add_(master.grad)
                master.sub_(0.1 * momentum)

    first, second = (
        engines(make_model(torch.bfloat16), ONE),
        engines(make_model(torch.bfloat16), TWO),
    )
    optimizer, other = (
        WideMomentum(engine.optim_parameters(), lr=0.1) for engine in (first, second)
    )
    for batch in (mlp_batch(6, 0), mlp_batch(6, 1)):
        run_batch(first, batch._replace(args=(batch.args[0].bfloat16(),)), 2)
        first.step(optimizer.step)
    save_checkpoint(tmp_path / "saved", first, optimizer)
    load_checkpoint(tmp_path / "saved", second, other)
    for master, loaded in zip(first.optim_parameters(), second.optim_parameters(), strict=True):
        momentum = other.state[loaded]["momentum"]
        assert momentum.dtype is torch.float32
        assert torch.equal(momentum, optimizer.state[master]["momentum"])
        assert not torch.equal(momentum, momentum.bfloat16().float()), (
            "bf16 could have held it: nothing was tested"
        )


def test_masters_are_not_rebuilt_from_bf16_weights(tmp_path: Path, engines: Engines) -> None:
    run = Run(engines, TWO, torch.bfloat16, is_async=True)
    run.steps(range(2))
    save_checkpoint(tmp_path / "saved", run.engine, run.optimizer)
    with safetensors.safe_open(tmp_path / "saved", "pt") as file:
        master = file.get_tensor("master/0.weight")
        assert not torch.equal(master, file.get_tensor("model/0.weight").float())
    other = Run(engines, ONE, torch.bfloat16, is_async=True)
    load_checkpoint(tmp_path / "saved", other.engine, other.optimizer)
    assert torch.equal(dict(other.engine.optim_named_parameters())["0.weight"], master)
