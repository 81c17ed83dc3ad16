"""A weight used by two pipeline parts lost one of its gradients, was updated twice, or fired its
hook early.

Copies of a parameter per stage break its identity. Here the embedding and the head of a tied
TinyLlama, and one Linear at positions 0 and 3 of a Sequential, lie in different stages, and once in
a single fused one.

Source: pytorch/pytorch#51931, pytorch/pytorch#81296.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, TIED_LLAMA, make_llama, mlp_batch
from tests.support.reference import Reference, plain_call

EMBEDDING = "model.embed_tokens.weight"


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def test_the_tied_gradient_is_the_sum_of_both_parts(devices: DeviceSet, engines: Engines) -> None:
    """Embedding part and head part, both non-zero, come from an untied twin."""
    batch = TIED_LLAMA.batch(4, 0)
    untied = make_llama(tied=False)
    tied = make_llama(tied=True)
    weights = {
        **untied.state_dict(),
        **tied.state_dict(),
        "lm_head.weight": tied.lm_head.weight.detach(),
    }
    untied.load_state_dict(weights)
    parts = plain_call(untied, batch.split(2), batch.loss_fn).gradients
    assert min(parts[EMBEDDING].norm(), parts["lm_head.weight"].norm()) > 0.1
    engine = engines(tied, devices)
    run_batch(engine, batch, 2)
    devices.check(
        engine_gradients(engine)[EMBEDDING],
        parts[EMBEDDING] + parts["lm_head.weight"],
        bitwise=False,
    )


@pytest.mark.parametrize("min_stages", [1, 3, 6])
def test_a_tied_llama_trains_as_the_plain_one(
    min_stages: int, devices: DeviceSet, engines: Engines
) -> None:
    """One optimizer entry, one update per step, one tensor after five; the global norm counts it
    once."""
    model = make_llama(tied=True)
    reference = Reference(model, sgd)
    engine = engines(model, devices)
    assert [name for name, _ in engine.optim_named_parameters()].count(EMBEDDING) == 1
    assert "lm_head.weight" not in dict(engine.optim_named_parameters())
    plan = ModelExecutePlan.auto("fused", engine, min_stages=min_stages)
    optimizer = sgd(engine.optim_parameters())
    norms, expected_norms = [], []

    def step_fn() -> None:
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in engine.parameters()]))
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(5):
        batch = TIED_LLAMA.batch(4, seed)
        reference.forward_backward(batch.split(2), batch.loss_fn)
        expected_norms.append(torch.nn.utils.get_total_norm(list(reference.gradients.values())))
        reference.step()
        run_batch(engine, batch, 2, execute_plan=plan)
        engine.step(step_fn, is_async=False)
    devices.check(torch.stack(norms), torch.stack(expected_norms), bitwise=False)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reloaded = make_llama(tied=True)
    reloaded.load_state_dict(engine.state_dict())
    assert torch.equal(reloaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    "plan",
    [
        ModelExecutePlan(
            fwd_plan=[range(1), range(1, 3)], bwd_plan=[range(3, 5), range(2, 3), range(2)]
        ),
        ModelExecutePlan(fwd_plan=[range(3)], bwd_plan=[range(3, 5), range(3)]),
        ModelExecutePlan(fwd_plan=[], bwd_plan=[range(5)]),
    ],
    ids=["apart", "two stages", "one fused stage"],
)
def test_one_linear_at_positions_0_and_3(
    plan: ModelExecutePlan, devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(MLP_WIDTH, MLP_WIDTH)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(MLP_WIDTH, MLP_WIDTH), shared, nn.Tanh())
    batch = mlp_batch(rows=6)
    expected = plain_call(copy.deepcopy(model), batch.split(2), batch.loss_fn)
    reference = Reference(model, sgd)
    engine = engines(model, devices)
    loss = run_batch(engine, batch, 2, execute_plan=plan)
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)
    engine.zero_grad()
    optimizer = sgd(engine.optim_parameters())
    for seed in range(5):
        batch = mlp_batch(rows=6, seed=seed)
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 2, execute_plan=plan)
        engine.step(optimizer.step, is_async=False)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)
