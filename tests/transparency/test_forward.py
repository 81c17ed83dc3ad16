"""`forward()`: evaluation, and outputs that take part in the user's own autograd graph."""

import copy

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeError, RoundPipeRunConfig
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import CASES, MLP_WIDTH, ModelCase, make_mlp, mlp_batch
from tests.support.reference import plain_call, weights_of

BATCH = mlp_batch(rows=12)


def forward(engine: RoundPipe, *args: object, num_microbatch: int, **kwargs: object) -> object:
    return engine(
        *args, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=num_microbatch), **kwargs
    )


def plain_outputs(model: nn.Module, inputs: Tensor, num_microbatch: int) -> Tensor:
    return torch.cat([model(piece) for piece in inputs.chunk(num_microbatch)])


@pytest.mark.parametrize("num_microbatch", [1, 3, 4])
def test_no_grad_forward_equals_the_plain_model(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    expected = plain_outputs(copy.deepcopy(model), BATCH.args[0], num_microbatch)
    engine = engines(model, devices)
    with torch.no_grad():
        output = forward(engine, *BATCH.args, num_microbatch=num_microbatch)
    assert (output.requires_grad, output.device.type) == (False, "cpu")
    devices.check(output, expected)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_no_grad_logits_equal_the_plain_model(
    case: ModelCase, devices: DeviceSet, engines: Engines
) -> None:
    model = case.make().eval()
    batch = case.batch(4, 0)
    with torch.no_grad():
        expected = torch.cat([model(**kwargs).logits for _, kwargs, _ in batch.split(2)])
        engine = engines(model, devices)
        output = forward(engine, num_microbatch=2, **batch.kwargs)
    devices.check(output.logits, expected)


@pytest.mark.parametrize("num_microbatch", [1, 2, 3])
def test_backward_through_the_outputs_equals_plain_autograd(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    """The user's own layers before and after the engine get their gradients too.

    One microbatch is plain autograd to the bit; with more, gradients arrive in parts and are summed
    in another order.
    """
    model = make_mlp()
    torch.manual_seed(8)
    before, after = nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, 1)
    plain_model, plain_before, plain_after = copy.deepcopy((model, before, after))
    plain_loss = plain_after(plain_model(plain_before(BATCH.args[0]))).square().mean()
    plain_loss.backward()
    engine = engines(model, devices)
    hidden = forward(engine, before(BATCH.args[0]), num_microbatch=num_microbatch)
    loss = after(hidden).square().mean()
    loss.backward()
    exact = num_microbatch == 1
    devices.check(loss.detach(), plain_loss.detach(), bitwise=exact)
    devices.check(
        engine_gradients(engine),
        {name: p.grad for name, p in plain_model.named_parameters()},
        bitwise=exact,
    )
    for own, plain in ((before, plain_before), (after, plain_after)):
        devices.check(own.weight.grad, plain.weight.grad, bitwise=exact)
        devices.check(own.bias.grad, plain.bias.grad, bitwise=exact)


class TwoHeads(nn.Module):
    """Hands on two tensors, and one that carries no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(hidden), self.right(hidden), hidden.detach().sum(1)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_outputs_that_are_not_used(
    used: int, num_stages: int, devices: DeviceSet, engines: Engines
) -> None:
    """Nor is all that another forward has made. What no gradient reaches has none, as in plain
    autograd."""
    model = nn.Sequential(*make_mlp(2), TwoHeads())
    plain = copy.deepcopy(model)
    plain(BATCH.args[0])[used].square().mean().backward()
    engine = engines(model, devices)
    stages = {1: [range(4)], 3: [range(1), range(1, 3), range(3, 4)]}[num_stages]
    config = RoundPipeRunConfig(
        num_microbatch=1, execute_plan=ModelExecutePlan(stages, stages[::-1])
    )
    engine(*BATCH.args, roundpipe_run_config=config)
    engine(*BATCH.args, roundpipe_run_config=config)[used].square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert len(expected) == 6
    devices.check(engine_gradients(engine), expected)


def test_gradients_of_backward_add_to_those_of_forward_backward(
    devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    expected = plain_call(copy.deepcopy(model), BATCH.whole(), BATCH.loss_fn).gradients
    engine = engines(model, devices)
    run_batch(engine, BATCH, 1)
    BATCH.loss_fn(forward(engine, *BATCH.args, num_microbatch=1), BATCH.label).backward()
    devices.check(
        engine_gradients(engine), {name: gradient + gradient for name, gradient in expected.items()}
    )


def test_two_forwards_may_be_open_at_once(devices: DeviceSet, engines: Engines) -> None:
    """Siamese use: both backward in one graph, in whatever order autograd takes them."""
    model = make_mlp()
    plain = copy.deepcopy(model)
    first, second = BATCH.args[0], BATCH.label
    (plain(first) * plain(second)).sum().backward()
    engine = engines(model, devices)
    (
        forward(engine, first, num_microbatch=2) * forward(engine, second, num_microbatch=3)
    ).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    devices.check(engine_gradients(engine), expected, bitwise=False)


def test_a_step_between_forward_and_backward_is_refused_and_changes_nothing(
    devices: DeviceSet, engines: Engines
) -> None:
    """The recompute would use other weights than the forward did: autograd raises for changed
    tensors, so does this."""
    model = make_mlp()
    engine = engines(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    output = forward(engine, *BATCH.args, num_microbatch=2)
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step, is_async=False)
    with pytest.raises((RuntimeError, RoundPipeError)):
        output.sum().backward()
    after_step = engine_weights(engine)
    expected = make_mlp()
    expected.load_state_dict(after_step)
    run_batch(engine, BATCH, 2)
    devices.check(
        engine_gradients(engine), plain_call(expected, BATCH.split(2), BATCH.loss_fn).gradients
    )


def test_backward_on_the_returned_loss_says_it_has_already_run(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    loss = run_batch(engine, BATCH, 2)
    before = engine_gradients(engine)
    with pytest.raises((RuntimeError, RoundPipeError), match="already run"):
        loss.backward()
    ONE.check(engine_gradients(engine), before)


def test_forward_with_grad_uses_the_weights_forward_backward_would_use(
    devices: DeviceSet, engines: Engines
) -> None:
    """One step old after an asynchronous step: not newer because it is a `forward`."""
    model = make_mlp()
    start = copy.deepcopy(model)
    engine = engines(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.5)
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step)
    output = forward(engine, *BATCH.args, num_microbatch=2)
    devices.check(output.detach(), plain_outputs(start, BATCH.args[0], 2).detach())
    engine.synchronize()
    with torch.no_grad():
        start.load_state_dict(weights_of(engine.model))
        output = forward(engine, *BATCH.args, num_microbatch=2)
        devices.check(output, plain_outputs(start, BATCH.args[0], 2))


def test_training_is_one_property_for_engine_and_model(engines: Engines) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    engine = engines(model, TWO)
    assert engine.training
    engine.eval()
    assert (engine.training, model.training, model[1].training) == (False, False, False)
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(3, 4)), engine(torch.ones(3, 4)))
    model.train()
    assert engine.training


PARTIAL = {
    "autograd.grad": lambda output, inputs: torch.autograd.grad(output.sum(), inputs),
    "autograd.grad, unused allowed": lambda output, inputs: torch.autograd.grad(
        output.sum(), [inputs, torch.ones(1, requires_grad=True)], allow_unused=True
    ),
    "backward(inputs=...)": lambda output, inputs: output.sum().backward(inputs=[inputs]),
}


@pytest.mark.parametrize("how", PARTIAL)
@pytest.mark.parametrize("num_microbatch", [1, 2])
def test_gradients_of_inputs_alone_are_refused(
    num_microbatch: int, how: str, devices: DeviceSet, engines: Engines
) -> None:
    """They would come with gradients of the weights, which nobody asked for and which the next step
    would apply."""
    engine = engines(make_mlp(), devices)
    run_batch(engine, BATCH, num_microbatch)
    before = engine_gradients(engine)
    inputs = BATCH.args[0].clone().requires_grad_()
    output = forward(engine, inputs, num_microbatch=num_microbatch)
    with pytest.raises(RoundPipeError, match=r"loss\.backward\(\)"):
        PARTIAL[how](output, inputs)
    devices.check(engine_gradients(engine), before)
    assert inputs.grad is None
    engine.zero_grad()
    forward(engine, inputs, num_microbatch=num_microbatch).sum().backward()
    assert inputs.grad is not None
    assert sorted(engine_gradients(engine)) == sorted(before)


def test_gradients_of_what_comes_after_the_engine_can_be_asked_for(
    devices: DeviceSet, engines: Engines
) -> None:
    """`torch.autograd.grad` is fine where it does not pass through the engine."""
    engine = engines(make_mlp(), devices)
    after = nn.Linear(MLP_WIDTH, 1)
    output = forward(engine, *BATCH.args, num_microbatch=2)
    loss = after(output).sum()
    (weight,) = torch.autograd.grad(loss, [after.weight], retain_graph=True)
    devices.check(weight, output.detach().sum(0, keepdim=True), bitwise=False)
    assert engine_gradients(engine) == {}
    loss.backward()
    assert engine_gradients(engine) != {}


@pytest.mark.parametrize("num_microbatch", [1, 3])
def test_outputs_where_the_caller_wants_them(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    """On the device of the caller's choice, and part of the graph there; so are its gradients."""
    model = make_mlp()
    expected = plain_call(copy.deepcopy(model), BATCH.split(num_microbatch), BATCH.loss_fn)
    engine = engines(model, devices)
    where = engine.devices[-1].torch_device
    inputs = BATCH.args[0].to(where).requires_grad_()
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, output_device=where)
    output = engine(inputs, roundpipe_run_config=config)
    assert output.device == where
    BATCH.loss_fn(output, BATCH.label.to(where)).backward()
    assert inputs.grad is not None
    assert inputs.grad.device == where
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)
