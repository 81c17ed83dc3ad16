"""Layers that are more than a stateless function of trained weights: frozen, buffered, shared,
cast."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roundpipe import ModelExecutePlan, RoundPipe
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch, train_steps
from tests.support.models import MLP_WIDTH, Batch, make_llama, make_mlp, mlp_batch, token_mean_over
from tests.support.reference import Reference, buffers_of, plain_call, split_rows, weights_of

ONE_LAYER_EACH = ModelExecutePlan(
    fwd_plan=[range(i, i + 1) for i in range(6)],
    bwd_plan=[range(i, i + 1) for i in range(6, -1, -1)],
)
WHOLE = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(7)])


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5)


@pytest.mark.parametrize("plan", [ONE_LAYER_EACH, WHOLE], ids=["staged", "fused"])
@pytest.mark.parametrize("frozen", [(0,), (0, 2), (2,), (6,), (0, 2, 4)], ids=str)
def test_frozen_layers_stay_and_the_others_train_as_in_plain_pytorch(
    frozen: tuple[int, ...], plan: ModelExecutePlan, devices: DeviceSet, engines: Engines
) -> None:
    """Weight decay of 0.5 would show on any weight that was touched."""
    model = make_mlp()
    for index in frozen:
        model[index].requires_grad_(False)
    start = weights_of(model)
    batches = [mlp_batch(rows=6, seed=seed) for seed in range(3)]
    reference = Reference(model, sgd)
    engine = engines(model, devices)
    names = [name for name, _ in engine.optim_named_parameters()]
    assert names == [name for name, p in model.named_parameters() if p.requires_grad]
    optimizer = sgd(engine.optim_parameters())
    for batch in batches:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2, execute_plan=plan)
        devices.check(engine_gradients(engine), reference.gradients)
        reference.step()
        engine.step(optimizer.step, is_async=False)
    weights = engine_weights(engine)
    devices.check(weights, reference.weights)
    for name, value in weights.items():
        assert torch.equal(value, start[name]) == (int(name.split(".")[0]) in frozen), name


def test_a_frozen_parameter_inside_a_trained_layer(devices: DeviceSet, engines: Engines) -> None:
    model = make_mlp()
    model[2].bias.requires_grad_(False)
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(2), batch.loss_fn)
    engine = engines(model, devices)
    run_batch(engine, batch, 2)
    devices.check(engine_gradients(engine), expected.gradients)
    assert "2.bias" not in expected.gradients


@pytest.mark.parametrize("plan", [ONE_LAYER_EACH, WHOLE], ids=["staged", "fused"])
def test_batch_norm_statistics_are_updated_once_per_microbatch(
    plan: ModelExecutePlan, devices: DeviceSet, engines: Engines
) -> None:
    """In microbatch order, as the plain loop does; recompute must not count twice. Also in the
    calls that follow."""
    torch.manual_seed(0)
    linears = [nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(4)]
    norms = [nn.BatchNorm1d(MLP_WIDTH) for _ in range(3)]
    model = nn.Sequential(
        *(layer for pair in zip(linears, norms, strict=False) for layer in pair), linears[3]
    )
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for seed in range(3):
        batch = mlp_batch(rows=12, seed=seed)
        expected = plain_call(plain, batch.split(3), batch.loss_fn)
        loss = run_batch(engine, batch, 3, execute_plan=plan)
        devices.check(loss, expected.loss)
        devices.check(engine_gradients(engine), expected.gradients, bitwise=True)
        devices.check(buffers_of(engine.model), buffers_of(plain))
        assert int(engine.model[1].num_batches_tracked) == 3 * (seed + 1)
        engine.zero_grad()


def test_batch_norm_in_evaluation_leaves_its_statistics_alone(
    devices: DeviceSet, engines: Engines
) -> None:
    model = nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.BatchNorm1d(MLP_WIDTH))
    engine = engines(model, devices)
    batch = mlp_batch(rows=12)
    run_batch(engine, batch, 3)
    engine.synchronize()
    before = buffers_of(model)
    engine.eval()
    with torch.no_grad():
        output = engine(*batch.args)
        devices.check(output, copy.deepcopy(model)(*batch.args), bitwise=False)
    engine.synchronize()
    devices.check(buffers_of(model), before)


@pytest.mark.parametrize("plan", [ONE_LAYER_EACH, WHOLE, None], ids=["staged", "fused", "auto"])
def test_one_linear_at_two_places_is_one_weight(
    plan: ModelExecutePlan | None, devices: DeviceSet, engines: Engines
) -> None:
    """Both uses count, once each: in different stages, in the same one; one optimizer entry, one
    update per step."""
    model = make_mlp()
    model[6] = model[0]
    batches = [mlp_batch(rows=6, seed=seed) for seed in range(5)]
    reference = Reference(model, sgd)
    engine = engines(model, devices)
    assert [name for name, _ in engine.optim_named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    optimizer = sgd(engine.optim_parameters())
    for batch in batches:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2, execute_plan=plan)
        devices.check(engine_gradients(engine), reference.gradients, bitwise=False)
        reference.step()
        engine.step(optimizer.step, is_async=False)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)
    assert model[6] is model[0]
    assert len(model.state_dict()) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_autocast_of_the_caller_holds_in_the_workers(dtype: torch.dtype, engines: Engines) -> None:
    """In forward and recompute alike. Virtual devices only: the oracle casts on the CPU."""
    model = make_mlp()
    batch = mlp_batch(rows=6)
    dtypes = set()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        dtypes.add(output.dtype)
        return batch.loss_fn(output.float(), target)

    with torch.autocast("cpu", dtype):
        expected = plain_call(copy.deepcopy(model), batch.split(3), loss_fn)
    without = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    assert abs(expected.loss - without.loss) > 1e-5, (
        "autocast made no difference, so nothing would be tested"
    )
    for devices in (ONE, THREE):
        for plan in (ONE_LAYER_EACH, WHOLE):
            engine = engines(copy.deepcopy(model), devices)
            with torch.autocast("cpu", dtype):
                loss = run_batch(engine, batch._replace(loss_fn=loss_fn), 3, execute_plan=plan)
            devices.check(loss, expected.loss)
            devices.check(engine_gradients(engine), expected.gradients)
            devices.check(run_batch(engine, batch, 3, execute_plan=plan), without.loss)
            engine.close()
    assert dtypes == {dtype}


def test_default_dtype_and_grad_mode_of_the_caller_hold_in_the_workers(engines: Engines) -> None:
    seen = []

    class Watch(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
            return hidden + torch.zeros(hidden.shape).to(hidden)

    engine = engines(nn.Sequential(nn.Linear(4, 4), Watch()).double(), TWO)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            engine(torch.ones(4, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {(torch.float64, False)}


class Recorder:
    """Counts what hooks saw."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.rows.append(len(output))
        return output * 2


def test_forward_hooks_of_the_users_modules_run(devices: DeviceSet, engines: Engines) -> None:
    """Layers are called, not their `.forward`: NEFTune and PEFT live in hooks."""
    model = make_mlp()
    plain = copy.deepcopy(model)
    recorder = Recorder()
    for network in (model, plain):
        network[2].register_forward_hook(recorder)
    batch = mlp_batch(rows=6)
    expected = plain_call(plain, batch.split(2), batch.loss_fn)
    recorder.rows.clear()
    engine = engines(model, devices)
    loss = run_batch(engine, batch, 2, execute_plan=WHOLE)
    assert recorder.rows == [3, 3]
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)


def padded_batch() -> Batch:
    """Rows of 12, 9, 6 and 3 tokens, padded on the right and masked."""
    torch.manual_seed(7)
    input_ids = torch.randint(0, 64, (4, 12))
    mask = torch.ones(4, 12, dtype=torch.long)
    for row, length in enumerate((12, 9, 6, 3)):
        mask[row, length:] = 0
    labels = input_ids.masked_fill(mask == 0, -100)
    num_valid = int((labels[:, 1:] != -100).sum())
    return Batch(
        (), {"input_ids": input_ids, "attention_mask": mask}, labels, token_mean_over(num_valid)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_attention_masks_are_cut_with_their_rows(
    tied: bool, devices: DeviceSet, engines: Engines
) -> None:
    model = make_llama(tied=tied)
    batch = padded_batch()
    pieces = split_rows(2, (), batch.kwargs, batch.label)
    expected = plain_call(copy.deepcopy(model), pieces, batch.loss_fn)
    engine = engines(model, devices)
    loss = run_batch(engine, batch, 2)
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=not tied)


def test_freezing_between_steps_takes_effect(engines: Engines) -> None:
    """A parameter frozen after step 1 keeps its value; the others go on as in plain PyTorch."""
    model = make_mlp()
    plain = copy.deepcopy(model)
    engine = engines(model, TWO)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def both(batch: Batch, engine: RoundPipe) -> None:
        train_steps(engine, optimizer, [batch], 2, is_async=False)
        for args, _, label in batch.split(2):
            batch.loss_fn(plain(*args), label).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    both(mlp_batch(rows=6, seed=0), engine)
    for network in (model, plain):
        network[4].requires_grad_(False)
    both(mlp_batch(rows=6, seed=1), engine)
    TWO.check(engine_weights(engine), weights_of(plain))


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize(
    "plan",
    [
        ModelExecutePlan(
            [range(i, i + 1) for i in range(4)], [range(i, i + 1) for i in range(4, -1, -1)]
        ),
        ModelExecutePlan([range(3)], [range(3, 5), range(1, 3), range(1)]),
        ModelExecutePlan([range(1)], [range(1, 5), range(1)]),
        ModelExecutePlan([], [range(5)]),
    ],
    ids=["staged", "crossing", "starting in place", "fused"],
)
def test_layers_that_write_to_their_input(
    plan: ModelExecutePlan, grain: str, devices: DeviceSet, engines: Engines
) -> None:
    """`inplace=True` must not spoil what recompute starts from, nor be handed a leaf that requires
    grad."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
    )
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    for _ in range(2):  # The second call knows what the first one learnt about the layers.
        engine.zero_grad()
        devices.check(
            run_batch(engine, batch, 3, execute_plan=plan, recompute_grain=grain), expected.loss
        )
        devices.check(engine_gradients(engine), expected.gradients)


class Recurrent(nn.Module):
    """A module that holds its parameters in a list of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MLP_WIDTH, MLP_WIDTH, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.lstm(rows[:, None])[0][:, 0]


@pytest.mark.parametrize(
    "first",
    [Recurrent, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(MLP_WIDTH, MLP_WIDTH))],
    ids=["recurrent", "parametrized"],
)
def test_modules_that_reach_their_parameters_in_other_ways(
    first: Callable[[], nn.Module], devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    batches = [mlp_batch(rows=6, seed=seed) for seed in range(3)]
    reference = Reference(model, sgd)
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    for batch in batches:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 2)
        engine.step(optimizer.step, is_async=False)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)


class TwiceCheckpointed(nn.Module):
    """Its backward runs two more backwards inside itself, each of which finishes a gradient of the
    same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.linear, hidden, use_reentrant=True).tanh()
        return checkpoint(self.linear, hidden, use_reentrant=True)


@pytest.mark.parametrize("fused_start", [0, 2])
def test_gradients_that_come_in_several_parts_all_count(
    fused_start: int, devices: DeviceSet, engines: Engines
) -> None:
    """A layer sends its gradients down when it has them all; a part that comes later must not be
    left behind."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH), TwiceCheckpointed(), nn.Linear(MLP_WIDTH, MLP_WIDTH)
    )
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(2), batch.loss_fn)
    engine = engines(model, devices)
    plan = ModelExecutePlan(
        fwd_plan=[range(fused_start)] if fused_start else [],
        bwd_plan=[range(fused_start, 3), *([range(fused_start)] if fused_start else [])],
    )
    run_batch(engine, batch, 2, execute_plan=plan)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)


class Checkpointed(nn.Module):
    """Runs its own forward again in its backward, with the random numbers of then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + checkpoint(self.inner, hidden, use_reentrant=False)


def test_layers_that_checkpoint_themselves_draw_the_same_on_any_number_of_devices(
    engines: Engines,
) -> None:
    """Virtual devices share the process's generator, which a checkpoint sets back in the middle of
    a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Checkpointed() for _ in range(6)))
    hidden = torch.randn(48, 64)
    batch = Batch((hidden,), {}, hidden, lambda output, _: output.square().mean())
    found = []
    for devices in (ONE, THREE, THREE):
        torch.manual_seed(1)
        engine = engines(copy.deepcopy(model), devices)
        run_batch(engine, batch, 8)
        found.append(engine_gradients(engine))
    ONE.check(found[1], found[0])
    ONE.check(found[2], found[0])


class Counting(nn.Module):
    """Returns a buffer that it writes to, in the next microbatch too."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.register_buffer("count", torch.zeros(MLP_WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.linear(hidden), self.count


class CountingBeside(nn.Module):
    """The same with a tensor that its first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.count: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.count is None:
            self.count = torch.zeros_like(hidden[0])
        self.count += 1
        return self.linear(hidden), self.count


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        output: Tensor = self.linear(value[0] * value[1])
        return output


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("kind", [Counting, CountingBeside])
@pytest.mark.filterwarnings("ignore:CountingBeside.forward sets the tensor attribute 'count'")
def test_a_buffer_that_a_layer_returns_stays_what_it_was(
    kind: type[nn.Module], cut: int, devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), Scaling())
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    cuts = [range(cut)] if cut < 2 else []
    plan = ModelExecutePlan(fwd_plan=cuts, bwd_plan=[range(cut, 2), *cuts] if cuts else [range(2)])
    devices.check(run_batch(engine, batch, 3, execute_plan=plan), expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)
