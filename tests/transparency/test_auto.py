"""Models that are no sequence, through `AutoRoundPipe`: same losses, gradients and weights as
without it.

Their parts run on one and on three devices, whatever is between them and outside of them on the
CPU. Batches are cut for each part, so sums are added in another order: to 1e-6, not to the bit.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, RoundPipeRunConfig
from roundpipe.engine.partitioned import AutoRoundPipe
from roundpipe.memory.blocks import HostBlocks
from roundpipe.memory.slot_sizes import slot_bytes
from tests.support.adversaries import Adversaries
from tests.support.branching import (
    WIDTH,
    Branches,
    bert_batch,
    branches_batch,
    make_bert,
    make_branches,
    make_resnet,
    make_t5,
    resnet_batch,
    t5_batch,
)
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.models import Batch
from tests.support.optimizers import PATIENCE_S, PausingSGD, random_delays
from tests.support.reference import Reference, plain_call, weights_of


class Case(NamedTuple):
    """A model, its batches, and an upper threshold that leaves something to the CPU."""

    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    upper_threshold: int


CASES = {
    "branches": Case(make_branches, branches_batch, 0),
    "resnet": Case(make_resnet, resnet_batch, 200),
    "bert": Case(make_bert, bert_batch, 1100),
    "t5": Case(make_t5, t5_batch, 100),
}
case_by_name = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
one_and_three = pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
Wrap = Callable[..., AutoRoundPipe]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """Wraps part by part; engines are closed afterwards."""
    with ExitStack() as stack:

        def make(model: nn.Module, devices: DeviceSet = ONE, **settings: Any) -> AutoRoundPipe:
            settings.setdefault("upper_threshold", 0)
            engine = roundpipe.wrap_model_to_roundpipe(
                model, use_sequential_preset=False, devices=devices.argument, **settings
            )
            assert isinstance(engine, AutoRoundPipe)
            return stack.enter_context(engine)

        yield make


def train(engine: AutoRoundPipe, batch: Batch) -> Tensor:
    """Forward, loss, backward, as a user writes it."""
    loss = batch.loss_fn(engine(*batch.args, **batch.kwargs), batch.label)
    loss.backward()
    return loss.detach()


def gradients(engine: AutoRoundPipe) -> dict[str, Tensor]:
    engine.synchronize()
    return {
        name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None
    }


def frozen_half(model: nn.Module) -> nn.Module:
    """Every other parameter frozen, the first one too."""
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    return model


@case_by_name
@one_and_three
@pytest.mark.parametrize("prepare", [lambda model: model, frozen_half], ids=["all", "half frozen"])
def test_loss_and_gradients(wrap: Wrap, devices: DeviceSet, case: Case, prepare: Any) -> None:
    """What trains gets its gradient wherever it is, above and below frozen parts; what is frozen
    gets none."""
    model, batch = prepare(case.make()), case.batch()
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    engine = wrap(model, devices, upper_threshold=case.upper_threshold)
    assert 0 < engine.statistics()["cpu_bytes"] < engine.statistics()["working_bytes"]
    devices.check(train(engine, batch), expected.loss, bitwise=False)
    devices.check(gradients(engine), expected.gradients, bitwise=False)
    with torch.no_grad():
        devices.check(
            batch.loss_fn(engine(*batch.args, **batch.kwargs), batch.label),
            expected.loss,
            bitwise=False,
        )


@case_by_name
@one_and_three
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_four_steps(wrap: Wrap, devices: DeviceSet, case: Case, is_async: bool) -> None:
    """Weights on devices and on the CPU are as stale as those of the written references, however
    slow the steps."""
    model = case.make()
    batches = [case.batch(seed=seed) for seed in range(4)]
    reference = Reference(
        model,
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        staleness=int(is_async),
    )
    engine = wrap(model, devices, upper_threshold=case.upper_threshold)
    optimizer = PausingSGD(engine.optim_parameters(), pause=random_delays(3), lr=0.01, momentum=0.9)
    for batch in batches:
        expected = reference.forward_backward(batch.whole(), batch.loss_fn)
        reference.step()
        devices.check(train(engine, batch), expected, bitwise=False)
        engine.step(optimizer.step, is_async=is_async)
    engine.synchronize()
    devices.check(weights_of(model), reference.weights, bitwise=False)


def test_accumulation_and_wide_masters(wrap: Wrap) -> None:
    """bf16 weights: gradients of two calls are added in fp32 and applied to fp32 masters, on the
    CPU as on devices."""
    model, batches = make_branches().bfloat16(), [branches_batch(seed=seed) for seed in range(2)]
    batches = [
        b._replace(args=(b.args[0].bfloat16(),), loss_fn=_in_fp32(b.loss_fn)) for b in batches
    ]
    reference = Reference(
        model,
        lambda params: torch.optim.SGD(params, lr=0.01),
        optim_dtype=torch.float32,
        grad_dtype=torch.bfloat16,
    )
    engine = wrap(
        model, optim_dtype=torch.float32, model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.01)
    for batch in batches:
        reference.forward_backward(batch.whole(), batch.loss_fn)
        train(engine, batch)
    reference.step()
    engine.step(optimizer.step, is_async=False)
    masters = {name: master.detach() for name, master in engine.optim_named_parameters()}
    assert {master.dtype for master in masters.values()} == {torch.float32}
    for name, expected in reference.weights.items():
        torch.testing.assert_close(masters[name], expected, rtol=0, atol=2e-3)
    untied = [
        name for name in masters if name != "left.2.weight"
    ]  # whose uses are rounded one by one here
    assert all(
        torch.equal(masters[name], reference.weights[name]) for name in untied if "scale" in name
    )


def _in_fp32(loss_fn: Any) -> Any:
    return lambda output, target: loss_fn(output.float(), target)


def test_evaluation_is_never_stale(wrap: Wrap) -> None:
    """Without grad the newest weights count, also those outside of parts; so they do in every
    read."""
    model, batch = make_branches(), branches_batch()
    reference = Reference(model, lambda params: torch.optim.SGD(params, lr=0.1))
    engine = wrap(model)
    optimizer = PausingSGD(engine.optim_parameters(), pause=random_delays(1), lr=0.1)
    reference.forward_backward(batch.whole(), batch.loss_fn)
    reference.step()
    train(engine, batch)
    engine.step(optimizer.step)
    plain = make_branches()
    plain.load_state_dict(reference.weights, strict=False)
    with torch.no_grad():
        ONE.check(engine(*batch.args), plain(*batch.args), bitwise=False)
    ONE.check(dict(engine.named_parameters()), reference.weights, bitwise=False)


def test_loaded_weights_and_those_changed_in_place(wrap: Wrap) -> None:
    """Both reach devices, the CPU's part and the masters; a shared weight is one."""
    model, batch, other = make_branches(), branches_batch(), make_branches()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    engine = wrap(model)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.01)
    train(engine, batch)
    engine.step(optimizer.step)
    engine.load_state_dict(other.state_dict())
    ONE.check(weights_of(model), weights_of(other))
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for twin in (model, other):
                for parameter in twin.parameters():
                    parameter.mul_(factor)
        engine.reload_parameters()
        with torch.no_grad():
            ONE.check(engine(*batch.args), other(*batch.args), bitwise=False)
    reference = Reference(other, lambda params: torch.optim.SGD(params, lr=0.01))
    reference.forward_backward(batch.whole(), batch.loss_fn)
    reference.step()
    train(engine, batch)
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    ONE.check(weights_of(model), reference.weights, bitwise=False)


def test_steps_and_masters_as_in_any_engine(wrap: Wrap) -> None:
    """Optimizer contexts, clipping over all parameters, what a step returns, and its errors."""
    model, batch = make_branches(), branches_batch()
    plain = copy.deepcopy(model)
    expected = plain_call(plain, batch.whole(), batch.loss_fn).gradients
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    engine = wrap(model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in engine.optim_named_parameters()] == names
    with roundpipe.OptimizerCtx():
        assert [id(p) for p in engine.parameters()] == [
            id(master) for master in engine.optim_parameters()
        ]
    assert all(a is b for a, b in zip(engine.parameters(), model.parameters(), strict=True))
    train(engine, batch)
    handle = engine.step(lambda: roundpipe.clip_grad_norm_(engine, 1.0))
    torch.testing.assert_close(handle.result(), norm)
    with pytest.raises(ZeroDivisionError):
        engine.step(lambda: 1 / 0, is_async=False)


@one_and_three
def test_only_the_input_trains(wrap: Wrap, devices: DeviceSet) -> None:
    """Inputs that require grad get theirs through all parts, frozen ones too."""
    model, batch = make_branches(), branches_batch()
    model.requires_grad_(False)
    (x,) = batch.args
    expected = torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0]
    engine = wrap(model, devices)
    engine(x).sum().backward()
    devices.check(x.grad, expected, bitwise=False)
    assert not gradients(engine)


def test_dropout_does_not_depend_on_devices(wrap: Wrap) -> None:
    """The same masks, in recompute too, on one device and on three; other masks at every call."""
    batch, found = bert_batch(), []
    for devices in (ONE, THREE):
        engine = wrap(
            make_bert(dropout=0.3), devices, model_run_config=RoundPipeRunConfig(num_microbatch=3)
        )
        torch.manual_seed(5)
        losses = [train(engine, batch), train(engine, batch)]
        assert not torch.equal(*losses)
        found.append({"first": losses[0], "second": losses[1], **gradients(engine)})
    THREE.check(found[1], found[0])


def test_two_forwards_in_one_loss(wrap: Wrap) -> None:
    """Every parameter is used twice, on devices and on the CPU; a third forward without grad
    changes nothing."""
    model = make_branches()
    first, second = branches_batch(seed=0).args[0], branches_batch(seed=1).args[0]
    expected = torch.autograd.grad((model(first) * model(second)).sum(), list(model.parameters()))
    engine = wrap(model)
    one = engine(first)
    with torch.no_grad():
        engine(first)
    (one * engine(second)).sum().backward()
    for found, wanted in zip(gradients(engine).values(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_hugging_face_models_do_besides(wrap: Wrap) -> None:
    """Hidden states are collected, autocast reaches every part, checkpointing that was on stays off
    inside."""
    model, batch = make_bert(), bert_batch()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    engine = wrap(
        model, upper_threshold=1100, model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (
            each(**batch.kwargs, output_hidden_states=True) for each in (engine, plain)
        )
    assert len(found.hidden_states) == 4
    for one, other in zip(
        [found.loss, *found.hidden_states], [expected.loss, *expected.hidden_states], strict=True
    ):
        assert torch.equal(one, other)
    found.loss.backward()
    expected.loss.backward()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    ONE.check(gradients(engine), grads, bitwise=False)
    assert model.is_gradient_checkpointing


def test_hidden_states_are_collected_at_every_call(wrap: Wrap) -> None:
    """transformers puts its hooks on a model once, so they must not stay behind on what one forward
    has run with."""
    model, batch = make_bert(), bert_batch()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        model(
            **batch.kwargs, output_hidden_states=True
        )  # hooks are on the blocks themselves from here on
    for num_microbatch in (1, 2, 1):
        engine = wrap(
            model,
            upper_threshold=1100,
            model_run_config=RoundPipeRunConfig(num_microbatch=num_microbatch),
        )
        for _ in range(2):
            found, expected = (
                each(**batch.kwargs, output_hidden_states=True) for each in (engine, plain)
            )
            for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        engine.close()


def test_what_is_inside_of_blocks_is_not_collected(wrap: Wrap) -> None:
    """It would be silently missing."""
    engine = wrap(make_bert(), upper_threshold=1100)
    for name in ("output_attentions", "output_router_logits"):
        with pytest.raises(ConfigError, match=f"{name}=True.*leave it False"):
            engine(**bert_batch().kwargs, **{name: True})


def test_a_frozen_tower_without_grad(wrap: Wrap) -> None:
    """A model that runs one part without grad itself: that part keeps to the weights of the forward
    around it."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.tower(x)
            return self.head(x)

    torch.manual_seed(0)
    model, batches = Tower(), [branches_batch(seed=seed) for seed in range(4)]
    reference = Reference(model, lambda params: torch.optim.SGD(params, lr=0.1), staleness=1)
    engine = wrap(model)
    optimizer = PausingSGD(engine.optim_parameters(), pause=random_delays(2), lr=0.1)
    for batch in batches:
        batch = batch._replace(kwargs={})
        reference.forward_backward(batch.whole(), batch.loss_fn)
        reference.step()
        train(engine, batch)
        engine.step(optimizer.step)
    engine.synchronize()
    ONE.check(weights_of(model), reference.weights, bitwise=False)


def test_stale_backward_is_refused(wrap: Wrap) -> None:
    """A step between forward and backward: the weights of the CPU's part are gone too."""
    engine = wrap(make_branches())
    batch = branches_batch()
    loss = batch.loss_fn(engine(*batch.args), batch.label)
    engine.step(lambda: None, is_async=False)
    with pytest.raises(RuntimeError, match="call backward\\(\\) first"):
        loss.backward()


class Explosive(nn.Module):
    """Raises in its backward while ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.armed and out.requires_grad:
            out.register_hook(_explode)
        return out


def _explode(_: Tensor) -> None:
    raise ZeroDivisionError("in a backward")


def test_a_failed_backward_leaves_no_gradient(wrap: Wrap) -> None:
    """The part that fails is reached last: what other parts and the CPU have made by then does not
    count either."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(Explosive())
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * self.scale)

    torch.manual_seed(0)
    model, batch = Chain(), branches_batch()._replace(kwargs={})
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn).gradients
    engine = wrap(model)
    model.first[0].armed = True
    with pytest.raises(ZeroDivisionError):
        train(engine, batch)
    assert not gradients(engine)
    model.first[0].armed = False
    train(engine, batch)
    ONE.check(gradients(engine), expected, bitwise=False)


def test_state_that_forwards_write(wrap: Wrap) -> None:
    """Buffers and attributes set by the model's own code, and by its parts, end up in the user's
    model."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("total", torch.zeros(()))
            self.calls = 0
            self.latest: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.total = self.total + 1
            self.latest = x
            return self.norm(self.part(x))

    torch.manual_seed(0)
    model, x = Counting(), branches_batch().args[0]
    plain = copy.deepcopy(model)
    plain(x)
    engine = wrap(
        model, skip_modules=[model.norm], model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    engine(x)
    assert model.calls == 1
    assert model.latest is x
    ONE.check(dict(model.named_buffers()), dict(plain.named_buffers()))


@one_and_three
@pytest.mark.parametrize("count", [1, 3])
def test_batch_norm(wrap: Wrap, devices: DeviceSet, count: int) -> None:
    """A ResNet with batch statistics: those of each microbatch, one after the other, as in a loop
    over microbatches in plain PyTorch; with one microbatch those of the batch."""
    model, batch = make_resnet(), resnet_batch()
    for block in (*model.layer1, *model.layer2):
        block.norm1, block.norm2 = (
            nn.BatchNorm2d(norm.num_channels) for norm in (block.norm1, block.norm2)
        )
    plain = copy.deepcopy(model)
    outputs = [plain(images) for images in batch.args[0].chunk(count)]
    expected = batch.loss_fn(torch.cat(outputs), batch.label)
    expected.backward()
    engine = wrap(
        model, devices, lower_threshold=1, model_run_config=RoundPipeRunConfig(num_microbatch=count)
    )
    devices.check(train(engine, batch), expected.detach(), bitwise=False)
    grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    devices.check(gradients(engine), grads, bitwise=False)
    devices.check(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=False)


def test_hooks_run_once(wrap: Wrap) -> None:
    """Of the model, of a part, of a sequence that is a part, of a layer in it: as often as in the
    plain model."""
    model, x = make_branches(), branches_batch().args[0]
    seen: list[str] = []
    for name in ("", "left", "left.0", "blocks.1", "blocks.1.inner"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        wrap(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))(x)
    assert sorted(seen) == ["", "blocks.1", "blocks.1.inner", "left", "left.0"]


def test_the_model_itself_is_untouched(wrap: Wrap) -> None:
    """Its modules, keys and forward are its own, and work beside the engine."""
    model, batch = make_branches(), branches_batch()
    before = [id(module) for module in model.modules()]
    expected = model(*batch.args)
    engine = wrap(model)
    engine(*batch.args)
    assert engine.model is model
    assert [id(module) for module in model.modules()] == before
    assert torch.equal(model(*batch.args), expected)
    assert engine.state_dict().keys() == model.state_dict().keys()


def test_settings_reach_the_right_parts(wrap: Wrap) -> None:
    """A call's beat the model's; what is said of one part beats both where the rules do; small
    parts are not cut."""
    model: Any = make_branches()
    rows: dict[str, list[int]] = {"left": [], "blocks.0": [], "blocks.2": [], "right": []}
    for name, seen in rows.items():
        module = model.get_submodule(name)
        module = module[0] if isinstance(module, nn.Sequential) else module
        module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))
    engine = wrap(
        model,
        lower_threshold=100,
        model_run_config=RoundPipeRunConfig(num_microbatch=2),
        override_config={model.right: RoundPipeRunConfig(num_microbatch=3)},
    )
    x = torch.randn(6, WIDTH)
    with torch.no_grad():
        engine(x)
        assert rows == {"left": [3, 3], "right": [2, 2, 2], "blocks.0": [3, 3], "blocks.2": [3, 3]}
        engine(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert [len(seen) for seen in rows.values()] == [3, 3, 3, 4]


def test_outputs_between_elements_of_a_list(wrap: Wrap) -> None:
    """They stay in microbatches until somebody looks; then they are the tensor of the plain
    model."""

    class Looking(Branches):
        def forward(self, x: Tensor, **_: Any) -> Any:
            seen = []
            for index, block in enumerate(self.blocks):
                x = block(x, shift=index)
                seen.append(x)
            return x, seen, (seen[0] + seen[1][:, :2].sum()).shape

    torch.manual_seed(0)
    model = Looking()
    (x,) = branches_batch().args
    expected, all_expected, shape = model(x)
    grads = torch.autograd.grad(
        expected.sum() + all_expected[0].square().sum(), list(model.blocks.parameters())
    )
    engine = wrap(model, THREE)
    output, seen, found_shape = engine(x)
    assert found_shape == shape
    for one, other in zip([output, *seen], [expected, *all_expected], strict=True):
        assert isinstance(one, Tensor)
        THREE.check(one, other, bitwise=False)
    (output.sum() + seen[0].square().sum()).backward()
    found = gradients(engine)
    for (name, _), wanted in zip(
        model.blocks.named_parameters(prefix="blocks"), grads, strict=True
    ):
        THREE.check(found[name], wanted, bitwise=False)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def looked_at(x: Tensor) -> Tensor:
    with torch.no_grad():
        assert x.norm() > 0
    return x


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def written(x: Tensor) -> Tensor:
    x[:, 0] = 0.5
    return x


def activated(x: Tensor) -> Tensor:
    nn.functional.relu(x, inplace=True)
    return x


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x


Between = Callable[[nn.Module, Tensor], Tensor]
BETWEEN: dict[str, Between] = {
    "looked at without grad": lambda block, x: looked_at(block(x)) * 2,
    "told from a tuple": lambda block, x: first_of(block(x)),
    "written": lambda block, x: written(block(x)),
    "activated in place": lambda block, x: activated(block(x)),
    "hook": lambda block, x: hooked(block(x)),
    "detached in place": lambda block, x: x + block(block(x).detach_()),
    "autograd function": lambda block, x: Doubled.apply(block(x)),
    "checkpoint": lambda block, x: (
        x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    ),
    "vmap": lambda block, x: torch.vmap(torch.tanh)(block(x)),
    "numpy": lambda block, x: (
        block(x) * float(block(x).detach().numpy().mean() + block(x.detach()).tolist()[0][0])
    ),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_own_code_between_elements_finds_a_tensor(wrap: Wrap, between: Between) -> None:
    """Whatever it does with an output that still is in microbatches: the values and gradients of
    the plain model."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = between(block, x)
            return x

    torch.manual_seed(0)
    model, batch = Chain(), branches_batch()._replace(kwargs={})
    batch.args[0].requires_grad_()
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    batch.args[0].grad = None
    engine = wrap(model, THREE)
    THREE.check(train(engine, batch), expected.loss, bitwise=False)
    found = gradients(engine)
    assert found.keys() == expected.gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected.gradients[name], rtol=1e-5, atol=1e-5, msg=name
        )


def test_what_went_in_and_came_out_is_not_held_until_the_backward(wrap: Wrap) -> None:
    """It would be memory of the devices: of an output only the user's own references count, as in
    plain PyTorch, and the next element of a list keeps its own copy of what it needs."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Chain(), branches_batch().args[0]
    made: list[weakref.ref[Any]] = []
    for block in model.blocks:
        block[1].register_forward_hook(
            lambda *given: made.append(weakref.ref(given[-1].untyped_storage()))
        )
    plan = roundpipe.ModelExecutePlan(fwd_plan=[range(2)], bwd_plan=[range(2)])
    engine = wrap(
        model,
        override_config={block: RoundPipeRunConfig(execute_plan=plan) for block in model.blocks},
    )
    with torch.no_grad():
        engine(x)  # shows the engine which outputs carry a gradient
    engine(x).sum().backward()
    made.clear()
    loss = engine(x).sum()
    assert len(made) == 6
    assert [storage() for storage in made] == [None] * 6
    loss.backward()


class Wide(nn.Module):
    """Four elements whose inputs are much larger than their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("num_bytes", "waits"), [(3 << 19, True), (2 << 20, False)])
def test_parts_share_the_room_for_kept_inputs(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch, num_bytes: int, waits: bool
) -> None:
    """Four inputs of 256 KiB wait for their backwards at once, beside the part that runs. Where
    each would fit, but not all of them, they wait on the host."""
    taken: list[int] = []
    take = HostBlocks.take
    monkeypatch.setattr(
        HostBlocks, "take", lambda blocks, size: taken.append(size) or take(blocks, size)
    )
    torch.manual_seed(0)
    model, (x, y) = Wide(), torch.randn(2, 4096, WIDTH)
    loss_fn = nn.functional.mse_loss
    expected = plain_call(copy.deepcopy(model), Batch((x,), {}, y, loss_fn).whole(), loss_fn)
    in_four = RoundPipeRunConfig(num_microbatch=4)
    engine = wrap(
        model, max_gpu_memory=f"{num_bytes}B", lower_threshold=1, model_run_config=in_four
    )
    for _ in range(5):  # the first ones show the planners what inputs take
        taken.clear()
        engine.zero_grad()
        loss_fn(engine(x), y).backward()
    assert sum(taken) == (4 * x.nbytes if waits else 0)
    ONE.check(gradients(engine), expected.gradients, bitwise=False)


def test_slots_of_other_parts_are_given_back(wrap: Wrap) -> None:
    """Parts of different sizes use the devices one after the other, each as if it were alone
    there."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Linear(width, width + 64) for width in range(64, 64 * 6, 64)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Growing(), torch.randn(4, 64)
    engine = wrap(model)
    largest = slot_bytes(max(engine.statistics()["layer_bytes"]))
    for _ in range(2):
        loss = engine(x).sum()
        assert 0 < max(engine.statistics()["slot_bytes"].values()) <= largest
        loss.backward()
        assert 0 < max(engine.statistics()["slot_bytes"].values()) <= largest


class SequenceFirst(nn.Module):
    """Torch's transformer as it is by default, with the sequence in the first dimension, and a
    recurrent layer, whose state has the batch in the second."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.blocks = nn.ModuleList(Mixing() for _ in range(2))
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x.transpose(0, 1))
        for block in self.blocks:
            x = block(x)
        made, (state, _) = self.lstm(x.transpose(0, 1))
        return made[:, -1] + state[0] + state[1]


class Mixing(nn.Module):
    """A user's own, over a first dimension that is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).cumsum(0)


@pytest.mark.parametrize("length", [2, 4, 7])
def test_a_sequence_is_not_cut_for_a_batch(wrap: Wrap, length: int) -> None:
    """Where the first dimension of what a part is given is not the model's batch, also where it is
    as long (4 rows, 2 of them in a microbatch, as many as the recurrent layer has layers)."""
    torch.manual_seed(0)
    model = SequenceFirst()
    x, y = torch.randn(4, length, WIDTH), torch.randn(4, WIDTH)
    batch = Batch((x,), {}, y, nn.functional.mse_loss)
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    engine = wrap(
        model, THREE, lower_threshold=1, model_run_config=RoundPipeRunConfig(num_microbatch=2)
    )
    THREE.check(train(engine, batch), expected.loss, bitwise=False)
    THREE.check(gradients(engine), expected.gradients, bitwise=False)


def make_wrapped_decoder(*, hands_on: bool, asks: bool = False) -> Any:
    """A model of transformers' whose forward does not say that there is a cache, around a decoder
    that makes one."""
    from transformers import LlamaConfig, LlamaModel, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

    class Around(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.decoder = LlamaModel(config)

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            output = self.decoder(
                input_ids, **(kwargs if hands_on else {"use_cache": True} if asks else {})
            )
            return BaseModelOutput(last_hidden_state=output.last_hidden_state)

    torch.manual_seed(0)
    return Around(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


@pytest.mark.parametrize("hands_on", [True, False])
def test_caches_deep_inside_are_off(hands_on: bool, wrap: Wrap) -> None:
    """Microbatches that share one would attend to each other's tokens."""
    ids = torch.arange(32).view(4, 8)
    model = make_wrapped_decoder(hands_on=hands_on)
    expected = model(ids).last_hidden_state
    in_two = {"model_run_config": RoundPipeRunConfig(num_microbatch=2), "lower_threshold": 1}
    ONE.check(wrap(model, **in_two)(ids).last_hidden_state, expected, bitwise=False)
    assert model.config.use_cache
    assert model.decoder.config is model.config
    with pytest.raises(ConfigError, match="key-value cache"):
        wrap(make_wrapped_decoder(hands_on=False, asks=True), **in_two)(ids)


class ClassifierAround(nn.Module):
    """As users write heads of their own: a module around a model of transformers, which learns
    something about its labels and notes that in its config."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForSequenceClassification

        super().__init__()
        torch.manual_seed(0)
        self.inner = LlamaForSequenceClassification(
            LlamaConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_labels=3,
                pad_token_id=0,
            )
        )

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(ids, labels=labels).loss


def test_what_a_forward_notes_in_a_config_with_its_cache_off_stays(wrap: Wrap) -> None:
    ids, labels = torch.arange(1, 33).view(4, 8), torch.tensor([0, 1, 2, 0])
    model = ClassifierAround()
    expected = copy.deepcopy(model)(ids, labels)
    config = model.inner.config
    engine = wrap(model, lower_threshold=1, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    ONE.check(engine(ids, labels), expected, bitwise=False)
    assert model.inner.config is config
    assert (config.problem_type, config.use_cache) == ("single_label_classification", True)


class Extracting(nn.Module):
    """Hooks of its stages hand the model itself what it goes on with, and add what another of its
    modules makes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.trunk = (
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        )
        self.adapter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stem.register_forward_hook(self.keep)
        self.trunk[0].register_forward_hook(lambda _, args, output: output + self.adapter(args[0]))

    def keep(self, _: Any, args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.stem(x))) + self.kept


def test_modules_whose_hooks_reach_out_stay_on_the_cpu(wrap: Wrap) -> None:
    """On a device the hook would find the user's module, in which this forward sets and trains
    nothing."""
    torch.manual_seed(0)
    plain = Extracting()
    torch.manual_seed(0)
    model, batch = (
        Extracting(),
        branches_batch()._replace(kwargs={}),
    )  # no deepcopy: closures would refer to the first
    expected = plain_call(plain, batch.whole(), batch.loss_fn)
    engine = wrap(model, THREE, lower_threshold=1)
    assert engine.statistics()["engines"].keys() == {"adapter", "head"}
    THREE.check(train(engine, batch), expected.loss, bitwise=False)
    THREE.check(gradients(engine), expected.gradients, bitwise=False)


def test_intermediate_outputs_are_given_back_merged(wrap: Wrap) -> None:
    """Of an element whose ``override_config`` says so; the others' stay on the devices."""
    seen: list[Tensor] = []

    class Noting(Branches):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x, shift=index)
                seen.append(x)
            return x

    torch.manual_seed(0)
    model, batch = Noting(), branches_batch()._replace(kwargs={})
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    plain = [tensor.detach() for tensor in seen]
    seen.clear()
    engine = wrap(
        model, THREE, override_config={model.blocks[0]: RoundPipeRunConfig(merge_output=True)}
    )
    THREE.check(train(engine, batch), expected.loss, bitwise=False)
    assert [type(tensor) is Tensor for tensor in seen] == [True, False, True]
    for ours, theirs in zip(seen, plain, strict=True):
        THREE.check(ours, theirs, bitwise=False)
    THREE.check(gradients(engine), expected.gradients, bitwise=False)


def test_elements_that_are_cut_differently(wrap: Wrap) -> None:
    """One element has a number of microbatches of its own; what is made of its output beside
    another's is merged."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first = self.blocks[0](x, x)
            second = self.blocks[1](x, x)
            return self.blocks[2](first, second)

    torch.manual_seed(0)
    model, batch = Skipping(), branches_batch()._replace(kwargs={})
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    engine = wrap(
        model,
        override_config={model.blocks[0]: RoundPipeRunConfig(num_microbatch=2)},
        devices=THREE,
    )
    torch.testing.assert_close(train(engine, batch), expected.loss, rtol=1e-5, atol=0)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(
            gradient, expected.gradients[name], rtol=1e-4, atol=1e-4, msg=name
        )


def test_what_it_refuses(wrap: Wrap) -> None:
    """Clear errors for what only a sequence, or only one engine, can do."""
    model, batch = make_branches(), branches_batch()
    engine = wrap(model)
    with pytest.raises(ConfigError, match=r"no forward_backward.*loss.backward\(\)"):
        engine.forward_backward(batch.args)
    with pytest.raises(ConfigError, match="split_input.*override_config"):
        engine(*batch.args, roundpipe_run_config=RoundPipeRunConfig(split_input=lambda *_: None))
    engine.model.blocks.append(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="wrap the model again"):
        engine(*batch.args)
    del engine.model.blocks[-1]


@pytest.mark.parametrize("name", ["branches", "t5"])
def test_no_wait_is_missing_between_parts(name: str) -> None:
    """On devices that copy late and poison freed memory: every hand-over between parts and the CPU
    is waited for."""
    case, devices = CASES[name], Adversaries(3)
    model, batches = case.make(), [case.batch(seed=seed) for seed in range(2)]
    reference = Reference(model, lambda params: torch.optim.SGD(params, lr=0.01), staleness=1)
    with roundpipe.wrap_model_to_roundpipe(
        model, devices=devices.argument, upper_threshold=case.upper_threshold
    ) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.01)
        for batch in batches:
            reference.forward_backward(batch.whole(), batch.loss_fn)
            reference.step()
            train(engine, batch)
            engine.step(optimizer.step)
    THREE.check(weights_of(model), reference.weights, bitwise=False)
    assert not devices.faults


def test_a_forgotten_engine_leaves_no_thread() -> None:
    """No part, shell or graph keeps it alive; its finalizer ends the threads that all parts
    share."""
    before = set(threading.enumerate())
    engine = roundpipe.wrap_model_to_roundpipe(make_branches(), devices=2, upper_threshold=0)
    engine(*branches_batch().args).sum().backward()
    reference = weakref.ref(engine)
    del engine
    assert reference() is None
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_closing_frees_everything(wrap: Wrap) -> None:
    """One optimizer thread and one worker per device for all parts; none is left afterwards."""
    before = set(threading.enumerate())
    engine = wrap(make_branches(), THREE)
    started = sorted(thread.name for thread in set(threading.enumerate()) - before)
    assert started == [
        "roundpipe-optimizer",
        *(f"roundpipe-worker-virtual:{index}" for index in range(3)),
    ]
    train(engine, branches_batch())
    engine.close()
    assert set(threading.enumerate()) == before
    assert set(engine.statistics()["slot_bytes"].values()) == {0}
    with pytest.raises(roundpipe.ClosedError):
        engine(torch.zeros(2, WIDTH))
