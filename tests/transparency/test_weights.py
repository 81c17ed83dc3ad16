"""Reading and writing weights: names are the original model's; an old master never overwrites a
loaded weight."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import (
    Engines,
    engine_gradients,
    engine_weights,
    reference_steps,
    run_batch,
    train_steps,
)
from tests.support.models import CASES, ModelCase, make_llama, make_mlp, mlp_batch
from tests.support.reference import Reference, weights_of

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(4)]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_names_are_those_of_the_original_model(case: ModelCase, engines: Engines) -> None:
    model = case.make()
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    engine = engines(model, TWO)
    assert engine.model is model
    assert [name for name, _ in engine.named_parameters()] == list(shapes)
    assert sorted(name for name, _ in engine.optim_named_parameters()) == sorted(trainable)
    assert {name: p.shape for name, p in engine.optim_named_parameters()}.items() <= shapes.items()
    assert [name for name, _ in engine.optim_named_parameters("x")] == [
        f"x.{name}" for name, _ in engine.optim_named_parameters()
    ]
    assert sorted(engine.state_dict()) == sorted(keys)


@pytest.mark.parametrize("how", ["load_state_dict", "reload_parameters"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_loaded_weights_replace_masters_and_keep_moments(
    how: str, is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    """Gradients from before the load are dropped; momentum is kept, as in torch."""
    reference = Reference(make_mlp(), sgd, staleness=int(is_async))
    engine = engines(make_mlp(), devices)
    optimizer = sgd(engine.optim_parameters())
    other = weights_of(make_mlp(seed=5))
    for round_of_two in (BATCHES[:2], BATCHES[2:]):
        reference_steps(reference, round_of_two, 2)
        train_steps(engine, optimizer, round_of_two, 2, is_async=is_async)
        run_batch(engine, BATCHES[0], 2)
        reference.load(other)
        if how == "load_state_dict":
            engine.load_state_dict(other)
        else:
            engine.synchronize()
            with torch.no_grad():
                for name, parameter in engine.model.named_parameters():
                    parameter.copy_(other[name])
            engine.reload_parameters()
        devices.check(engine_weights(engine), other)
    reference_steps(reference, BATCHES, 2)
    train_steps(engine, optimizer, BATCHES, 2, is_async=is_async)
    devices.check(engine_weights(engine), reference.weights)


def test_a_partial_load_touches_only_the_loaded_keys(devices: DeviceSet, engines: Engines) -> None:
    engine = engines(make_mlp(), devices)
    train_steps(engine, sgd(engine.optim_parameters()), BATCHES[:2], 2, is_async=True)
    trained = engine_weights(engine)
    loaded = {
        name: value for name, value in weights_of(make_mlp(seed=5)).items() if name.startswith("2.")
    }
    engine.load_state_dict(loaded, strict=False)
    devices.check(engine_weights(engine), {**trained, **loaded})
    assert not torch.equal(trained["0.weight"], weights_of(make_mlp())["0.weight"])


def test_a_load_reaches_low_precision_weights_at_the_incoming_precision(
    devices: DeviceSet, engines: Engines
) -> None:
    """The master takes the fp32 value, not what bf16 left of it."""
    engine = engines(make_mlp().bfloat16(), devices, optim_dtype=torch.float32)
    incoming = weights_of(make_mlp(seed=5))
    engine.load_state_dict(incoming)
    devices.check(dict(engine.optim_named_parameters()), incoming)
    devices.check(
        engine_weights(engine), {name: value.bfloat16() for name, value in incoming.items()}
    )


def test_load_by_assignment_is_refused(engines: Engines) -> None:
    engine = engines(make_mlp(), TWO)
    before = engine_weights(engine)
    with pytest.raises(Exception, match="assign"):
        engine.load_state_dict(weights_of(make_mlp(seed=5)), assign=True)
    TWO.check(engine_weights(engine), before)


def test_tied_weights_stay_one_tensor(devices: DeviceSet, engines: Engines) -> None:
    model = make_llama(tied=True)
    engine = engines(model, devices)
    case = CASES[2]
    train_steps(
        engine,
        sgd(engine.optim_parameters()),
        [case.batch(4, seed) for seed in range(2)],
        2,
        is_async=True,
    )
    engine.synchronize()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in engine.optim_named_parameters()]
    assert len(names) == len(set(names)) == len(list(model.parameters()))


def test_reads_fall_through_and_writes_reach_the_model(engines: Engines) -> None:
    class Labelled(nn.Sequential):
        label = "original"

    model = Labelled(*make_mlp())
    engine = engines(model, TWO)
    assert engine.label == "original"
    engine.label = "changed"
    assert model.label == "changed"
    del engine.label
    assert model.label == "original"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing


def test_a_copy_of_the_trained_model_is_the_users(devices: DeviceSet, engines: Engines) -> None:
    """After `synchronize()` the raw model can be copied; the copy does not follow later
    training."""
    engine = engines(make_mlp(), devices)
    optimizer = sgd(engine.optim_parameters())
    train_steps(engine, optimizer, BATCHES[:2], 2, is_async=True)
    expected = engine_weights(engine)
    twin = copy.deepcopy(engine.model)
    train_steps(engine, optimizer, BATCHES[2:], 2, is_async=True)
    devices.check(weights_of(twin), expected)
    assert not torch.equal(engine_weights(engine)["0.weight"], expected["0.weight"])


def test_parameters_stay_valid_after_close(devices: DeviceSet, engines: Engines) -> None:
    """`close()` flushes: the model holds every update and works as an ordinary module, gradients
    included."""
    model = make_mlp()
    reference = Reference(model, sgd, staleness=1)
    reference_steps(reference, BATCHES, 2)
    with engines(model, devices) as engine:
        train_steps(engine, sgd(engine.optim_parameters()), BATCHES, 2, is_async=True)
    devices.check(weights_of(model), reference.weights)
    model.zero_grad()
    BATCHES[0].loss_fn(model(*BATCHES[0].args), BATCHES[0].label).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_two_engines_train_side_by_side(devices: DeviceSet, engines: Engines) -> None:
    """In one process, interleaved, each as if alone."""
    references = [Reference(make_mlp(seed=seed), sgd, staleness=1) for seed in (0, 1)]
    pair = [engines(make_mlp(seed=seed), devices) for seed in (0, 1)]
    optimizers = [sgd(engine.optim_parameters()) for engine in pair]
    for batch in BATCHES:
        for reference, engine, optimizer in zip(references, pair, optimizers, strict=True):
            reference_steps(reference, [batch], 2)
            train_steps(engine, optimizer, [batch], 2, is_async=True)
    for reference, engine in zip(references, pair, strict=True):
        devices.check(engine_weights(engine), reference.weights)


def test_gradients_of_all_the_parameters_are_there_after_synchronize(engines: Engines) -> None:
    """And have the dtype of the weights they belong to, whatever the masters' dtype."""
    model = make_mlp().bfloat16()
    engine = engines(model, TWO, optim_dtype=torch.float32)
    batch = BATCHES[0]
    run_batch(
        engine, batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16()), 2
    )
    gradients = engine_gradients(engine)
    assert {name: gradient.dtype for name, gradient in gradients.items()} == {
        name: torch.bfloat16 for name, _ in model.named_parameters()
    }
