"""What goes in and out of a call: keyword and non-tensor inputs, labels, losses, outputs, uneven
microbatches."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, make_mlp, mlp_batch, squared_error_over
from tests.support.reference import Microbatch, plain_call, split_rows


def microbatches_of(count: int) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=count)


class Picky(nn.Module):
    """Takes everything a signature can hold, and refuses anything that arrives altered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(
        self,
        rows: Tensor,
        nested: dict[str, list[Tensor]],
        *,
        per_row: Tensor,
        vector: Tensor,
        scalar: Tensor,
        mode: str,
        power: int = 1,
        nothing: None = None,
    ) -> Tensor:
        assert len(rows) == len(per_row) == len(nested["inside"][0]), "rows were separated"
        assert (vector.shape, scalar.shape, mode, nothing) == ((3,), (), "double", None), (
            "something was cut"
        )
        hidden = self.linear(rows + nested["inside"][0]) * per_row * vector.sum() * scalar
        return 2 * hidden**power


def test_rows_are_cut_and_all_else_goes_to_every_microbatch(
    devices: DeviceSet, engines: Engines
) -> None:
    """By keyword, inside containers, and next to tensors, scalars and values that are no rows of
    the batch."""
    torch.manual_seed(0)
    model = Picky()
    rows, inside, target = torch.randn(3, 8, MLP_WIDTH).unbind()
    per_row = torch.rand(8, 1)
    fixed = {
        "vector": torch.tensor([0.1, 0.2, 0.3]),
        "scalar": torch.tensor(0.5),
        "mode": "double",
        "power": 2,
    }
    loss_fn = squared_error_over(8)
    pieces = split_rows(4, (rows, inside), {"per_row": per_row}, target)
    expected = plain_call(
        copy.deepcopy(model),
        [
            Microbatch((a[0], {"inside": [a[1]]}), {**k, **fixed, "nothing": None}, y)
            for a, k, y in pieces
        ],
        loss_fn,
    )
    engine = engines(model, devices)
    loss = engine.forward_backward(
        (rows, {"inside": [inside]}),
        {"per_row": per_row, **fixed, "nothing": None},
        label=target,
        loss_fn=loss_fn,
        run_config=microbatches_of(4),
    )
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)


class Pair(NamedTuple):
    hidden: Tensor
    gate: Tensor


class MakePair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, 2 * MLP_WIDTH)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Pair:
        return Pair(*(self.linear(hidden) * scale).chunk(2, dim=-1))


class JoinPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, pair: Pair) -> dict[str, Tensor]:
        assert isinstance(pair, Pair), f"got a {type(pair).__name__}"
        return {"joined": self.linear(pair.hidden * pair.gate.sigmoid())}


class Unpack(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["joined"]


@pytest.mark.parametrize("fused_start", [0, 1, 2])
def test_layers_hand_on_one_value_as_in_nn_sequential(
    fused_start: int, devices: DeviceSet, engines: Engines
) -> None:
    """Named tuples and dictionaries cross stage borders whole."""
    torch.manual_seed(0)
    model = nn.Sequential(MakePair(), JoinPair(), Unpack())
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    plan = ModelExecutePlan(
        fwd_plan=[range(i, i + 1) for i in range(fused_start)],
        bwd_plan=[range(fused_start, 3), *(range(i, i + 1) for i in reversed(range(fused_start)))],
    )
    loss = run_batch(engine, batch, 3, execute_plan=plan)
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)


def test_keyword_inputs_reach_the_first_layer(engines: Engines) -> None:
    model = nn.Sequential(MakePair(), JoinPair(), Unpack())
    plain = copy.deepcopy(model)
    batch = mlp_batch(rows=6)
    engine = engines(model, TWO)
    with torch.no_grad():
        output = engine(hidden=batch.args[0], scale=3.0, roundpipe_run_config=microbatches_of(1))
        TWO.check(output, plain[2](plain[1](plain[0](batch.args[0], scale=3.0))))


def test_inputs_that_require_grad_get_theirs(devices: DeviceSet, engines: Engines) -> None:
    """Also where nothing trainable stands in front, and added to what is there, as `backward`
    does."""
    model = nn.Sequential(nn.Tanh(), *make_mlp())
    batch = mlp_batch(rows=6)
    inputs = batch.args[0].clone().requires_grad_()
    plain_inputs = batch.args[0].clone().requires_grad_()
    engine = engines(model, devices)
    for _ in range(2):
        run_batch(engine, batch._replace(args=(inputs,)), 3)
        engine.synchronize()
    plain = copy.deepcopy(model)
    for _ in range(2):
        for args, _, label in batch._replace(args=(plain_inputs,)).split(3):
            batch.loss_fn(plain(*args), label).backward()
    devices.check(inputs.grad, plain_inputs.grad)


@pytest.mark.parametrize("num_microbatch", [1, 2, 4])
def test_return_outputs_gives_the_outputs_in_the_order_of_the_rows(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    batch = mlp_batch(rows=8)
    expected = plain_call(copy.deepcopy(model), batch.split(num_microbatch), batch.loss_fn)
    engine = engines(model, devices)
    loss, outputs = engine.forward_backward(
        batch.args,
        label=batch.label,
        loss_fn=batch.loss_fn,
        return_outputs=True,
        run_config=microbatches_of(num_microbatch),
    )
    devices.check(loss, expected.loss)
    devices.check(outputs, torch.cat(expected.outputs))
    assert (outputs.device.type, outputs.requires_grad) == ("cpu", False)


def test_without_loss_fn_the_outputs_are_the_loss(devices: DeviceSet, engines: Engines) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

        def forward(self, rows: Tensor, target: Tensor) -> Tensor:
            return (self.linear(rows) - target).square().sum()

    model = WithLoss()
    batch = mlp_batch(rows=6)
    inputs = (*batch.args, batch.label)
    pieces = split_rows(3, inputs, {}, batch.label)
    expected = plain_call(copy.deepcopy(model), pieces, lambda output, _: output)
    engine = engines(model, devices)
    loss = engine.forward_backward(inputs, run_config=microbatches_of(3))
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)


def test_losses_are_summed_never_averaged(devices: DeviceSet, engines: Engines) -> None:
    """A mean inside `loss_fn` gives the sum of the microbatch means, for the loss and for the
    gradients."""
    model = make_mlp()
    batch = mlp_batch(rows=12)._replace(loss_fn=nn.functional.mse_loss)
    expected = plain_call(copy.deepcopy(model), batch.split(4), batch.loss_fn)
    engine = engines(model, devices)
    devices.check(run_batch(engine, batch, 4), expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)
    whole = plain_call(make_mlp(), batch.whole(), batch.loss_fn)
    devices.check(expected.loss / 4, whole.loss, bitwise=False)


def test_a_sequence_of_losses_comes_back_as_a_list_of_sums(
    devices: DeviceSet, engines: Engines
) -> None:
    """All of them are trained on."""
    model = make_mlp()
    batch = mlp_batch(rows=6)

    def two_losses(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return batch.loss_fn(output, target), 0.1 * output.square().sum()

    plain = copy.deepcopy(model)
    sums = torch.zeros(2)
    for args, _, label in batch.split(3):
        losses = two_losses(plain(*args), label)
        (losses[0] + losses[1]).backward()
        sums += torch.stack(losses).detach()
    engine = engines(model, devices)
    returned = run_batch(engine, batch._replace(loss_fn=two_losses), 3)
    assert isinstance(returned, list)
    devices.check(torch.stack(returned), sums)
    devices.check(
        engine_gradients(engine),
        {name: p.grad for name, p in plain.named_parameters()},
        bitwise=False,
    )


def test_labels_may_be_nested_or_absent(devices: DeviceSet, engines: Engines) -> None:
    batch = mlp_batch(rows=6)
    engine = engines(make_mlp(), devices)
    rows_seen = []

    def loss_fn(output: Tensor, label: dict[str, object]) -> Tensor:
        rows_seen.append(len(label["targets"][0]))
        assert label["name"] == "kept whole"
        return batch.loss_fn(output, label["targets"][0].to(output.device))

    label = {"targets": [batch.label], "name": "kept whole"}
    nested = run_batch(engine, batch._replace(label=label, loss_fn=loss_fn), 3)
    assert rows_seen == [2, 2, 2]
    devices.check(nested, plain_call(make_mlp(), batch.split(3), batch.loss_fn).loss)
    absent = engine.forward_backward(
        batch.args, loss_fn=lambda output, label: output.square().sum() if label is None else None
    )
    assert torch.isfinite(absent)


def test_given_microbatches_may_have_different_shapes(devices: DeviceSet, engines: Engines) -> None:
    """Padding-free batches: other numbers of rows, even other ranks; each is run as it is, in
    order."""
    torch.manual_seed(0)
    shapes = [(5, MLP_WIDTH), (1, MLP_WIDTH), (2, 3, MLP_WIDTH), (7, MLP_WIDTH)]
    pieces = [Microbatch((torch.randn(shape),), {}, torch.randn(shape)) for shape in shapes]
    loss_fn = squared_error_over(10)
    model = make_mlp()
    expected = plain_call(copy.deepcopy(model), pieces, loss_fn)
    engine = engines(model, devices)
    loss = engine.forward_backward(microbatches=[tuple(piece) for piece in pieces], loss_fn=loss_fn)
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize(("rows", "num_microbatch"), [(5, 4), (1, 4), (7, 3), (3, 3), (2, 5)])
def test_every_row_is_used_once_and_no_layer_sees_an_empty_microbatch(
    rows: int, num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    seen: list[Tensor] = []

    class Watch(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(hidden.detach().cpu())
            return hidden

    model = nn.Sequential(Watch(), *make_mlp())
    batch = mlp_batch(rows=rows)
    expected = plain_call(make_mlp(), batch.whole(), batch.loss_fn)
    engine = engines(model, devices)
    plan = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(len(model))])
    loss = run_batch(engine, batch, num_microbatch, execute_plan=plan)
    gradients = engine_gradients(engine)
    assert len(seen) == min(rows, num_microbatch)
    assert min(len(piece) for piece in seen) >= 1
    assert torch.equal(torch.cat(seen), batch.args[0])
    devices.check(loss, expected.loss, bitwise=False)
    renamed = {
        f"{int(name.split('.')[0]) + 1}.{name.split('.')[1]}": g
        for name, g in expected.gradients.items()
    }
    devices.check(gradients, renamed, bitwise=False)


def test_the_default_number_of_microbatches_is_devices_plus_one(
    devices: DeviceSet, engines: Engines
) -> None:
    calls = []
    engine = engines(make_mlp(), devices)

    def loss_fn(output: Tensor, _: None) -> Tensor:
        calls.append(len(output))
        return output.sum()

    engine.forward_backward((torch.randn(12, MLP_WIDTH),), loss_fn=loss_fn)
    assert calls == [12 // (devices.count + 1)] * (devices.count + 1)


def test_a_calls_setting_beats_the_models(engines: Engines) -> None:
    calls = []
    engine = engines(make_mlp(), ONE, model_run_config=microbatches_of(4))

    def loss_fn(output: Tensor, _: None) -> Tensor:
        calls.append(len(output))
        return output.sum()

    engine.forward_backward((torch.randn(12, MLP_WIDTH),), loss_fn=loss_fn)
    engine.forward_backward(
        (torch.randn(12, MLP_WIDTH),), loss_fn=loss_fn, run_config=microbatches_of(2)
    )
    assert calls == [3, 3, 3, 3, 6, 6]


def test_default_arguments_of_a_call_are_not_shared(engines: Engines) -> None:
    """`input_kwargs={}` in the signature must not collect anything."""
    engine = engines(make_mlp(), ONE)
    given: dict[str, object] = {}
    batch = mlp_batch(rows=4)
    engine.forward_backward(batch.args, given, label=batch.label, loss_fn=batch.loss_fn)
    assert given == {}


def test_the_caller_may_overwrite_its_tensors_once_the_call_has_returned(
    devices: DeviceSet, engines: Engines
) -> None:
    """Late backward stage runs recompute from the inputs; a loader that reuses its buffers must not
    reach into them."""
    model = make_mlp()
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    inputs, labels = batch.args[0].clone(), batch.label.clone()
    engine = engines(model, devices)
    plan = ModelExecutePlan(fwd_plan=[range(5)], bwd_plan=[range(5, 7), range(5)])
    run_batch(engine, batch._replace(args=(inputs,), label=labels), 3, execute_plan=plan)
    inputs.fill_(float("nan"))
    labels.fill_(float("nan"))
    devices.check(engine_gradients(engine), expected.gradients)


def test_gradients_flow_on_into_the_graph_the_input_came_from(
    devices: DeviceSet, engines: Engines
) -> None:
    """A frozen feature extractor in front is common; a trained one must get its gradients."""
    torch.manual_seed(1)
    front, model = nn.Linear(MLP_WIDTH, MLP_WIDTH), make_mlp()
    plain_front = copy.deepcopy(front)
    batch = mlp_batch(rows=6)
    batch.loss_fn(copy.deepcopy(model)(plain_front(batch.args[0])), batch.label).backward()
    engine = engines(model, devices)
    run_batch(engine, batch._replace(args=(front(batch.args[0]),)), 3)
    engine.synchronize()
    devices.check(front.weight.grad, plain_front.weight.grad, bitwise=False)
