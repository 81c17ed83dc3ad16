"""The oracles themselves, against loops written out by hand: a wrong oracle would make every other
test worthless."""

import copy

import pytest
import torch
from torch import nn

from tests.support.models import llama_batch, make_llama, make_mlp, mlp_batch
from tests.support.reference import Reference, plain_call, weights_of

STEPS = 6


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def hand_written_training(model: nn.Module, num_microbatch: int) -> list[dict[str, torch.Tensor]]:
    """The ordinary loop with accumulation through `.grad`; returns W_0, W_1, ..."""
    optimizer = sgd(list(model.parameters()))
    versions = [weights_of(model)]
    for step in range(STEPS):
        batch = mlp_batch(rows=6, seed=step)
        for args, _, label in batch.split(num_microbatch):
            batch.loss_fn(model(*args), label).backward()
        optimizer.step()
        optimizer.zero_grad()
        versions.append(weights_of(model))
    return versions


def reference_training(
    staleness: int, *, flush_after: frozenset[int] = frozenset()
) -> dict[str, torch.Tensor]:
    reference = Reference(make_mlp(), sgd, staleness=staleness)
    for step in range(1, STEPS + 1):
        batch = mlp_batch(rows=6, seed=step - 1)
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        if step in flush_after:
            reference.flush()
    return reference.weights


@pytest.mark.parametrize("num_microbatch", [1, 2, 3])
def test_r0_is_the_ordinary_loop_to_the_bit(num_microbatch: int) -> None:
    by_hand = hand_written_training(make_mlp(), num_microbatch)
    reference = Reference(make_mlp(), sgd)
    for step in range(STEPS):
        batch = mlp_batch(rows=6, seed=step)
        reference.forward_backward(batch.split(num_microbatch), batch.loss_fn)
        reference.step()
        assert all(
            torch.equal(reference.weights[name], value) for name, value in by_hand[step + 1].items()
        )


def test_r1_cannot_be_confused_with_r0() -> None:
    ordinary, stale = reference_training(0), reference_training(1)
    assert max(float((ordinary[name] - stale[name]).abs().max()) for name in ordinary) > 1e-2


def test_r1_is_the_recurrence_written_out() -> None:
    """W_t = update(W_(t-1), gradient at W_max(t-2, 0)), here with SGD's momentum written out."""
    model = make_mlp()
    versions, velocity = [weights_of(model)], {}
    for t in range(1, STEPS + 1):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(versions[max(t - 2, 0)][name])
        batch = mlp_batch(rows=6, seed=t - 1)
        gradients = plain_call(model, batch.split(2), batch.loss_fn).gradients
        velocity = {
            name: 0.9 * velocity[name] + g if name in velocity else g
            for name, g in gradients.items()
        }
        versions.append(
            {name: value - 0.1 * velocity[name] for name, value in versions[-1].items()}
        )
    stale = reference_training(1)
    for name, value in versions[-1].items():
        torch.testing.assert_close(stale[name], value, rtol=1e-5, atol=1e-6)


def test_r1_flushed_after_every_step_is_r0_and_a_single_flush_is_neither() -> None:
    ordinary, stale = reference_training(0), reference_training(1)
    always = reference_training(1, flush_after=frozenset(range(STEPS + 1)))
    once = reference_training(1, flush_after=frozenset({3}))
    assert all(torch.equal(always[name], ordinary[name]) for name in ordinary)
    assert not any(
        torch.equal(once[name], ordinary[name]) or torch.equal(once[name], stale[name])
        for name in once
    )


def test_microbatch_losses_add_up_to_the_batch() -> None:
    """Token-weighted: the mean of microbatch means differs by far more than the tolerance."""
    batch = llama_batch([2, 5, 9, 11])
    model = make_llama(tied=False)
    whole = plain_call(model, batch.whole(), batch.loss_fn)
    for num_microbatch in (2, 4):
        parts = plain_call(model, batch.split(num_microbatch), batch.loss_fn)
        torch.testing.assert_close(parts.loss, whole.loss, rtol=1e-5, atol=1e-6)
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(parts.gradients[name], gradient, rtol=1e-5, atol=1e-6)
    means = [
        nn.functional.cross_entropy(model(**kwargs).logits[0, :-1], label[0, 1:], ignore_index=-100)
        for _, kwargs, label in batch.split(4)
    ]
    assert abs(torch.stack(means).mean() - whole.loss) > 1e-3


def test_fixtures_are_the_same_each_time_and_survive_a_copy() -> None:
    model = make_llama(tied=True)
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    again = make_llama(tied=True)
    assert all(
        torch.equal(value, again.get_parameter(name)) for name, value in weights_of(model).items()
    )
