"""Labels, inputs, losses or outputs were changed in place after `forward_backward` had returned,
and so its gradients.

The call returns while backward stage runs go on. Where a tensor handed in or out was the very
memory that autograd had saved for them, whatever the caller did to it counted: silently through
numpy, as an error of a later call through torch, even for `loss /= 10`.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.late_work import LATE, make_pausing, open_gate
from tests.support.models import MLP_WIDTH, Batch, make_mlp, mlp_batch
from tests.support.optimizers import Gate
from tests.support.reference import Microbatch, plain_call

FUSED = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(7)])
HOLD_S = 0.05
"""A fused backward is held up for so long: an engine that returns before it does so meanwhile,
others merely wait."""


def own_batch() -> Batch:
    """Not shared with other tests: it is written to."""
    batch = mlp_batch(rows=6)
    return Batch(tuple(arg.clone() for arg in batch.args), {}, batch.label.clone(), batch.loss_fn)


def run_for_outputs(engine: RoundPipe, batch: Batch, plan: ModelExecutePlan) -> tuple[Any, Any]:
    """A call of one microbatch: there nothing has to be added or merged, so nothing is copied by
    that."""
    settings = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    loss, output = engine.forward_backward(
        batch.args,
        label=batch.label,
        loss_fn=batch.loss_fn,
        return_outputs=True,
        run_config=settings,
    )
    return loss, output


class HeldBackward(torch.autograd.Function):
    """Holds up the backward of the loss until the caller has done its worst, or until it is clear
    that it cannot."""

    released = threading.Event()

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        HeldBackward.released.wait(HOLD_S)
        return gradient


def losses_that_need_everything(output: Tensor, target: Tensor) -> list[Tensor]:
    """Their backward reads the labels, the outputs and the losses themselves."""
    needs_loss_and_label = (output * target).mean().exp()
    return [needs_loss_and_label, output.square().sum(), HeldBackward.apply(output.sum())]


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda batch, losses, output: batch.label.zero_(), id="label"),
        pytest.param(lambda batch, losses, output: batch.label.numpy().fill(0), id="label numpy"),
        pytest.param(lambda batch, losses, output: output.zero_(), id="output"),
        pytest.param(lambda batch, losses, output: output.numpy().fill(0), id="output numpy"),
        pytest.param(lambda batch, losses, output: losses[0].div_(10), id="loss"),
        pytest.param(lambda batch, losses, output: losses[0].numpy().fill(0), id="loss numpy"),
        pytest.param(lambda batch, losses, output: batch.args[0].zero_(), id="input"),
        pytest.param(lambda batch, losses, output: batch.args[0].numpy().fill(0), id="input numpy"),
    ],
)
def test_what_a_call_took_or_gave_may_be_written_to(
    change: Callable[[Batch, list[Tensor], Tensor], object], devices: DeviceSet, engines: Engines
) -> None:
    batch = own_batch()
    model, plain = make_mlp(), make_mlp()

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return sum(losses_that_need_everything(output, target), torch.zeros(()))

    HeldBackward.released.set()
    expected = plain_call(plain, batch.whole(), summed)
    engine = engines(model, devices)
    HeldBackward.released.clear()
    losses, output = run_for_outputs(
        engine, batch._replace(loss_fn=losses_that_need_everything), FUSED
    )
    change(batch, losses, output)
    HeldBackward.released.set()
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
@pytest.mark.parametrize("with_numpy", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize("changed", ["input", "label", "loss", "output"])
def test_the_same_before_a_late_recompute(
    changed: str, with_numpy: bool, devices: DeviceSet, engines: Engines
) -> None:
    batch, gate = own_batch(), Gate()
    expected = plain_call(make_pausing(open_gate()), batch.whole(), batch.loss_fn)
    engine = engines(make_pausing(gate), devices)
    loss, output = run_for_outputs(engine, batch, LATE)
    gate.wait_reached()
    tensor = {"input": batch.args[0], "label": batch.label, "loss": loss, "output": output}[changed]
    if with_numpy:
        tensor.numpy().fill(0)
    else:
        tensor.zero_()
    gate.open()
    devices.check(engine_gradients(engine), expected.gradients)


class Aside(nn.Module):
    """Passes its second input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(hidden), factor


class Multiply(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        hidden, factor = value
        return (self.linear(hidden) * factor).tanh()


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_input_that_frozen_layers_pass_on(
    is_frozen: bool, devices: DeviceSet, engines: Engines
) -> None:
    """Saved where training begins, as the layers before it need no backward: it must not be the
    caller's memory."""
    batch, gate = own_batch(), Gate()
    factor = torch.linspace(0.5, 2.0, 6 * MLP_WIDTH).view(6, MLP_WIDTH)

    def make(gate: Gate) -> nn.Sequential:
        others = make_pausing(gate)
        torch.manual_seed(1)
        model = nn.Sequential(Aside(), Multiply(), nn.Tanh(), *others[3:])
        model[0].requires_grad_(not is_frozen)
        return model

    first, *rest = plain = make(open_gate())
    joined = nn.Sequential(*rest)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = plain

        def forward(self, hidden: Tensor, factor: Tensor) -> Tensor:
            return joined(first(hidden, factor))

    cut = zip(batch.args[0].chunk(2), factor.chunk(2), batch.label.chunk(2), strict=True)
    microbatches = [Microbatch((hidden, part), {}, label) for hidden, part, label in cut]
    expected = plain_call(Plain(), microbatches, batch.loss_fn).gradients
    engine = engines(make(gate), devices)
    run_batch(engine, batch._replace(args=(batch.args[0], factor)), 2, execute_plan=LATE)
    gate.wait_reached()
    factor.zero_()
    batch.args[0].zero_()
    gate.open()
    devices.check(
        {f"layers.{name}": value for name, value in engine_gradients(engine).items()}, expected
    )


@pytest.mark.parametrize("num_microbatch", [1, 2])
def test_a_parameter_of_the_callers_own_in_loss_fn_has_its_gradient_at_return(
    num_microbatch: int, engines: Engines
) -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    batch = mlp_batch(rows=6)
    model = make_mlp()
    plain, plain_scale = copy.deepcopy(model), nn.Parameter(torch.tensor(2.0))
    plain_call(
        plain,
        batch.split(num_microbatch),
        lambda output, label: batch.loss_fn(output, label) * plain_scale,
    )
    engine = engines(model, TWO)
    engine.forward_backward(
        batch.args,
        label=batch.label,
        loss_fn=lambda output, label: batch.loss_fn(output, label) * scale,
        run_config=RoundPipeRunConfig(num_microbatch=num_microbatch),
    )
    assert scale.grad is not None
    assert plain_scale.grad is not None
    torch.testing.assert_close(scale.grad, plain_scale.grad)
