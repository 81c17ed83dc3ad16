"""`backward()` after a forward with grad: at other weights than the forward's, and without the
hooks of the user.

A flush or a load between the two replaced the weights that the backward recomputes with, silently.
Hooks on parameters were refused in `forward_backward` only, in `forward` they just never ran. And
the gradient of a gradient was zero.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import make_mlp, mlp_batch
from tests.support.reference import plain_call

BATCH = mlp_batch(rows=6)
TWO_MICROBATCHES = RoundPipeRunConfig(num_microbatch=2)


def load_twice_the_weights(engine: RoundPipe) -> None:
    engine.load_state_dict({name: value * 2 for name, value in engine.model.state_dict().items()})


def reload(engine: RoundPipe) -> None:
    with torch.no_grad():
        engine.model[0].weight.mul_(2)
    engine.reload_parameters()


def evaluate(engine: RoundPipe) -> None:
    with torch.no_grad():
        engine(*BATCH.args)


@pytest.mark.parametrize(
    "between",
    [
        RoundPipe.state_dict,
        RoundPipe.synchronize,
        lambda engine: list(engine.parameters()),
        evaluate,
    ],
    ids=["state_dict", "synchronize", "parameters", "evaluation"],
)
def test_writing_back_an_update_between_forward_and_backward_is_refused(
    between: Callable[[RoundPipe], object], devices: DeviceSet, engines: Engines
) -> None:
    """The update was asynchronous, so the forward was at the weights before it."""
    engine = engines(make_mlp(), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step)
    output = engine(*BATCH.args, roundpipe_run_config=TWO_MICROBATCHES)
    between(engine)
    with pytest.raises(RuntimeError, match="forward"):
        BATCH.loss_fn(output, BATCH.label).backward()
    assert engine_gradients(engine) == {}, "the refused backward left gradients"


@pytest.mark.parametrize(
    "between", [load_twice_the_weights, reload], ids=["load_state_dict", "reload_parameters"]
)
def test_loading_between_forward_and_backward_is_refused(
    between: Callable[[RoundPipe], object], devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make_mlp(), devices)
    output = engine(*BATCH.args, roundpipe_run_config=TWO_MICROBATCHES)
    between(engine)
    with pytest.raises(RuntimeError, match="forward"):
        BATCH.loss_fn(output, BATCH.label).backward()
    assert engine_gradients(engine) == {}


@pytest.mark.parametrize(
    "between",
    [RoundPipe.state_dict, RoundPipe.synchronize, evaluate],
    ids=["state_dict", "synchronize", "evaluation"],
)
def test_reading_between_forward_and_backward_is_allowed_where_no_update_is_pending(
    between: Callable[[RoundPipe], object], devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    expected = plain_call(copy.deepcopy(model), BATCH.whole(), BATCH.loss_fn)
    engine = engines(model, devices)
    output = engine(*BATCH.args, roundpipe_run_config=TWO_MICROBATCHES)
    between(engine)
    BATCH.loss_fn(output, BATCH.label).backward()
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)


def hook_gradient(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: gradient * 0)


def hook_accumulation(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize("hook", [hook_gradient, hook_accumulation])
def test_hooks_on_parameters_are_refused_however_gradients_come(
    hook: Callable[[nn.Parameter], None], devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    engine = engines(model, devices)
    hook(model[2].weight)
    with pytest.raises(ConfigError, match="2.weight"):
        engine(*BATCH.args)
    with pytest.raises(ConfigError, match="2.weight"):
        run_batch(engine, BATCH, 2)
    with torch.no_grad():  # nothing there for them to do
        devices.check(engine(*BATCH.args), model(*BATCH.args), bitwise=False)


@pytest.mark.parametrize("is_linear", [False, True], ids=["squared loss", "linear loss"])
def test_a_gradient_penalty_is_refused(
    is_linear: bool, devices: DeviceSet, engines: Engines
) -> None:
    """Recomputed on devices, the gradient has no graph of its own; a penalty on it would be a
    constant."""
    engine = engines(make_mlp(), devices)
    inputs = BATCH.args[0].clone().requires_grad_()
    output = engine(inputs)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(
            output.sum() if is_linear else BATCH.loss_fn(output, BATCH.label),
            inputs,
            create_graph=True,
        )


@pytest.mark.parametrize("num_microbatch", [1, 2])
def test_outputs_on_a_device_of_the_users_choice(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    """On an accelerator autograd runs a thread per device: the round backwards must not take up the
    one it needs."""
    target = "cpu" if devices.kind == "virtual" else "cuda:0"
    model = make_mlp()
    expected = plain_call(copy.deepcopy(model), BATCH.split(num_microbatch), BATCH.loss_fn)
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, output_device=target)
    output = engine(*BATCH.args, roundpipe_run_config=config)
    assert output.device == torch.device(target)
    BATCH.loss_fn(output, BATCH.label.to(target)).backward()
    devices.check(output.detach().cpu(), torch.cat([part.detach() for part in expected.outputs]))
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)
    elsewhere = RoundPipeRunConfig(num_microbatch=num_microbatch, output_device="meta")
    with_grad: Tensor = engine(*BATCH.args, roundpipe_run_config=elsewhere)
    assert with_grad.is_meta
    assert with_grad.requires_grad
    with torch.no_grad():
        assert engine(*BATCH.args, roundpipe_run_config=elsewhere).is_meta
