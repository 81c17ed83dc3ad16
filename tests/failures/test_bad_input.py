"""Bad input gets a clear error and changes nothing: the engine trains on afterwards as if nobody
had asked."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.errors import ConfigError, PlanError, RoundPipeError
from tests.support.device_sets import TWO
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, Batch, make_llama, make_mlp, mlp_batch
from tests.support.reference import weights_of

BATCH = mlp_batch(rows=6)


@contextmanager
def nothing_changes(engine: RoundPipe) -> Iterator[None]:
    """Weights, accumulated gradients and the generator are as before, and the next call gives the
    usual numbers."""
    engine.zero_grad()
    run_batch(engine, BATCH, 2)
    weights, gradients = engine_weights(engine), engine_gradients(engine)
    generator = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), generator)
    TWO.check(engine_weights(engine), weights)
    TWO.check(engine_gradients(engine), gradients)
    engine.zero_grad()
    run_batch(engine, BATCH, 2)
    TWO.check(engine_gradients(engine), gradients)


def step_and_wait(engine: RoundPipe, step_fn: Callable[[], object], is_async: bool) -> None:
    """A step whose error, if it has one, has had its occasion to be raised."""
    engine.step(step_fn, is_async=is_async)
    engine.synchronize()


def call_and_wait(engine: RoundPipe, batch: Batch) -> None:
    run_batch(engine, batch, 2)
    engine.synchronize()


@pytest.fixture
def engine(engines: Engines) -> RoundPipe:
    return engines(make_mlp(), TWO)


def test_a_batch_without_rows_is_refused(engine: RoundPipe) -> None:
    empty = torch.empty(0, MLP_WIDTH)
    with nothing_changes(engine):
        with pytest.raises(ConfigError, match="no rows|zero rows|0 rows"):
            engine.forward_backward((empty,), label=empty, loss_fn=BATCH.loss_fn)
        with pytest.raises(ConfigError, match="no rows|zero rows|0 rows"), torch.no_grad():
            engine(empty)
        with pytest.raises(ConfigError):
            engine.forward_backward(microbatches=[], loss_fn=BATCH.loss_fn)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameter"):
        RoundPipe(nn.Sequential(nn.Tanh(), nn.ReLU()), devices=2)
    with pytest.raises(ConfigError):
        RoundPipe(nn.Sequential(), devices=2)


@pytest.mark.parametrize("count", [0, -1])
def test_num_microbatch_below_one_is_refused(count: int, engine: RoundPipe) -> None:
    with nothing_changes(engine), pytest.raises(ConfigError, match=rf"num_microbatch.*{count}"):
        run_batch(engine, BATCH, count)


def test_an_unknown_pin_model_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="pin_model") as caught:
        RoundPipe(make_mlp(), pin_model="nonsense", devices=1)
    assert all(word in str(caught.value) for word in ("nonsense", "alloc", "register", "off"))


@pytest.mark.parametrize("devices", [0, -1, []], ids=str)
def test_no_devices_are_refused(devices: int | list[torch.device]) -> None:
    with pytest.raises(ConfigError, match="device"):
        RoundPipe(make_mlp(), devices=devices)


WORKING_WEIGHTS: dict[str, Callable[[RoundPipe], Iterator[nn.Parameter]]] = {
    "the model's parameters": lambda engine: engine.model.parameters(),
    "the engine's parameters": lambda engine: engine.parameters(),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("which", WORKING_WEIGHTS)
def test_an_optimizer_over_working_weights_is_refused(
    which: str, is_async: bool, engine: RoundPipe
) -> None:
    """The first line everybody writes. It would train nothing, or what the next upload
    overwrites."""
    optimizer = torch.optim.SGD(WORKING_WEIGHTS[which](engine), lr=0.1)
    run_batch(engine, BATCH, 2)
    weights = engine_weights(engine)
    with pytest.raises(RoundPipeError, match="optim_parameters"):
        step_and_wait(engine, optimizer.step, is_async)
    TWO.check(engine_weights(engine), weights)
    right = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCH, 2)
    engine.step(right.step, is_async=is_async)
    assert not torch.equal(engine_weights(engine)["0.weight"], weights["0.weight"])


def test_roundpipes_clipping_outside_step_fn_is_refused(engine: RoundPipe) -> None:
    with nothing_changes(engine), pytest.raises(RoundPipeError, match="step_fn|step"):
        roundpipe.clip_grad_norm_(engine, 1.0)


def test_optimizer_step_outside_step_fn_is_refused(engine: RoundPipe) -> None:
    """It would find no gradients, do nothing, and say nothing."""
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    with nothing_changes(engine), pytest.raises(RoundPipeError, match="step"):
        optimizer.step()


def test_a_parameter_that_became_trainable_too_late_is_noticed(engines: Engines) -> None:
    """The optimizer was made without it: it would get gradients and never an update."""
    model = make_mlp()
    model[2].requires_grad_(False)
    engine = engines(model, TWO)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step, is_async=False)
    weights = engine_weights(engine)
    model[2].requires_grad_(True)

    def call_and_step() -> None:
        run_batch(engine, BATCH, 2)
        engine.step(optimizer.step, is_async=False)

    with pytest.raises(RoundPipeError, match=r"2\.(weight|bias)"):
        call_and_step()
    TWO.check(weights_of(model), weights)


BAD_PLANS: dict[str, tuple[ModelExecutePlan, int]] = {
    # name: (plan for 7 layers, the layer that has to be named)
    "a gap in the forward": (ModelExecutePlan([range(2), range(3, 5)], [range(5, 7), range(5)]), 2),
    "a gap in the backward": (
        ModelExecutePlan([range(5)], [range(5, 7), range(3, 5), range(2)]),
        2,
    ),
    "a layer twice": (ModelExecutePlan([range(3), range(2, 5)], [range(5, 7), range(5)]), 2),
    "forward ends too early": (ModelExecutePlan([range(4)], [range(5, 7), range(5)]), 4),
    "forward ends too late": (ModelExecutePlan([range(6)], [range(5, 7), range(5)]), 5),
    "the last layer is missing": (ModelExecutePlan([range(5)], [range(5, 6), range(5)]), 6),
    "a layer too many": (ModelExecutePlan([range(5)], [range(5, 8), range(5)]), 7),
    "backward in ascending order": (ModelExecutePlan([], [range(5), range(5, 7)]), 0),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_is_refused_naming_the_layer(name: str, engine: RoundPipe) -> None:
    plan, layer = BAD_PLANS[name]
    with nothing_changes(engine), pytest.raises(PlanError, match=rf"\blayers? .*\b{layer}\b"):
        run_batch(engine, BATCH, 2, execute_plan=plan)


def test_engine_calls_inside_step_fn_raise_instead_of_deadlocking(engine: RoundPipe) -> None:
    calls: dict[str, Callable[[], object]] = {
        "forward_backward": lambda: run_batch(engine, BATCH, 2),
        "forward": lambda: engine(*BATCH.args),
        "step": lambda: engine.step(lambda: None),
        "synchronize": engine.synchronize,
        "state_dict": engine.state_dict,
    }
    for name, forbidden in calls.items():
        for is_async in (False, True):
            with nothing_changes(engine):
                run_batch(engine, BATCH, 2)
                with pytest.raises(RoundPipeError) as caught:
                    step_and_wait(engine, forbidden, is_async)
                assert "step_fn" in str(caught.value), f"{name}: {caught.value}"
                engine.zero_grad()
                run_batch(engine, BATCH, 2)


def test_parameters_inside_loss_fn_raise_instead_of_deadlocking(engine: RoundPipe) -> None:
    """Reading flushes, and a flush waits for the very call that computes the loss."""
    reads: list[Callable[[], object]] = [
        lambda: list(engine.parameters()),
        lambda: list(engine.named_parameters()),
    ]
    for read in reads:

        def loss_fn(output: Tensor, target: Tensor, read: Callable[[], object] = read) -> Tensor:
            read()
            return BATCH.loss_fn(output, target)

        with nothing_changes(engine), pytest.raises(RoundPipeError, match="loss_fn"):
            run_batch(engine, BATCH._replace(loss_fn=loss_fn), 2)


FORBIDDEN: dict[str, Callable[[RoundPipe], object]] = {
    "to(device)": lambda engine: engine.to("meta"),
    "to(dtype)": lambda engine: engine.to(torch.bfloat16),
    "cuda": lambda engine: engine.cuda(),
    "half": lambda engine: engine.half(),
    "assigning forward": lambda engine: setattr(engine, "forward", lambda rows: rows),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_moving_casting_or_patching_the_engine_is_refused(what: str, engine: RoundPipe) -> None:
    with nothing_changes(engine), pytest.raises(RoundPipeError):
        FORBIDDEN[what](engine)


def test_structural_changes_after_wrapping_are_refused(engines: Engines) -> None:
    model = make_llama(tied=False)
    engine = engines(model, TWO)
    model.resize_token_embeddings(80)
    ids = torch.randint(0, 64, (4, 12))
    with pytest.raises(RoundPipeError, match="wrap"):
        engine.forward_backward(
            input_kwargs={"input_ids": ids}, loss_fn=lambda out, _: out.logits.sum()
        )


def test_a_loss_that_does_not_fit_is_the_users_error(engine: RoundPipe) -> None:
    """A loss that is no scalar, or not a tensor at all, is refused without effect."""
    with nothing_changes(engine):
        for loss_fn in (lambda output, _: output, lambda output, _: 1.0, lambda output, _: None):
            with pytest.raises((RoundPipeError, RuntimeError, TypeError)):
                call_and_wait(engine, BATCH._replace(loss_fn=loss_fn))


def test_parameters_that_share_memory_and_are_not_one_are_refused() -> None:
    """PEFT ties adapters so. Plain PyTorch changes both where one is updated; with masters of
    their own they parted silently."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    before = model[0].weight.data_ptr()
    message = r"layer 1's parameter 'weight' \(4, 6\) lies in the memory of layer 0's .*\(6, 4\)"
    with pytest.raises(ConfigError, match=message + ".*one nn.Parameter"):
        RoundPipe(model, devices=roundpipe.virtual(1))
    assert model[0].weight.data_ptr() == before
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    RoundPipe(model, devices=roundpipe.virtual(1)).close()  # because nobody writes to either


def test_parameters_beside_each_other_in_one_matrix_share_nothing() -> None:
    whole = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(model, whole.split(4, dim=1), strict=True):
        layer.weight = nn.Parameter(part)
    with RoundPipe(model, devices=roundpipe.virtual(1)) as engine:
        x = torch.randn(2, 4)
        expected = x @ whole[:, :4].T @ whole[:, 4:].T
        torch.testing.assert_close(engine(x), expected)  # of rows that lie otherwise in a slot


class Sloped(nn.Module):
    """Adds how steep a sum of squares is where it is, as force fields and gradient penalties do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(x).square().sum(), x, create_graph=True)
        return self.linear(x) + slope


def test_gradients_in_a_forward_need_one_stage(engines: Engines) -> None:
    """They died of an assertion of ours where a layer's forward keeps no graph."""
    torch.manual_seed(0)
    model = nn.Sequential(Sloped(), Sloped(), Sloped())
    plain = copy.deepcopy(model)
    engine = engines(model, TWO)
    before = engine_weights(engine)
    for _ in range(2):  # what was refused once must not be half known
        with pytest.raises(ConfigError, match=r"layer 0.* takes gradients in its own forward"):
            call_and_wait(engine, BATCH)
    TWO.check(engine_weights(engine), before)
    plan = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(3)])
    engine.forward_backward(
        BATCH.args,
        label=BATCH.label,
        loss_fn=BATCH.loss_fn,
        run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1, execute_plan=plan),
    )
    BATCH.loss_fn(plain(*BATCH.args), BATCH.label).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    TWO.check(engine_gradients(engine), wanted)
