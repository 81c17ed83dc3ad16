"""Updates on a device, a batch of tensors in each operation; here with the CPU for a device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roundpipe.kernels import foreach, native, updates
from roundpipe.kernels.updates import RuleUpdate, UpdateInto
from roundpipe.optim.optimizers import AdamRule

SHAPES = [(3, 7), (70000,), (1,), (300, 500), (200000,)]
RULE = AdamRule(
    step=3,
    lr=0.1,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    weight_decay=0.1,
    amsgrad=False,
    maximize=False,
    is_decoupled=True,
)


def make(scale: float, num_parts: int) -> list[UpdateInto]:
    torch.manual_seed(0)
    made = []
    for shape in SHAPES:
        weight, mean = torch.randn(shape), torch.randn(shape)
        parts = tuple(torch.randn(shape).bfloat16() for _ in range(num_parts))
        update = RuleUpdate(weight, (mean, torch.rand(shape)), parts, scale, False, RULE)
        made.append(UpdateInto(update, torch.zeros(shape, dtype=torch.bfloat16)))
    return made


def tensors_of(made: list[UpdateInto]) -> list[Tensor]:
    return [
        tensor for update, working in made for tensor in (update.weight, *update.moments, working)
    ]


def one_by_one(made: list[UpdateInto]) -> list[Tensor]:
    """torch's kernel on each whole tensor."""
    for update, working in made:
        gradient = (
            sum((part.float() for part in update.parts[1:]), start=update.parts[0].float())
            * update.scale
        )
        RULE.apply([update.weight], [gradient], [update.moments])
        working.copy_(update.weight)
    return tensors_of(made)


@pytest.mark.parametrize("piece", [1 << 25, 100000, 30000])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_pieces_and_batches_change_nothing(
    scale: float, num_parts: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreach, "_PIECE", piece)
    made = make(scale, num_parts)
    foreach.update(made)
    for actual, expected in zip(tensors_of(made), one_by_one(make(scale, num_parts)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Tensors of more elements cannot be had. Returns a list that grows by the size of each that
    was asked for."""
    new_empty, asked = Tensor.new_empty, list[int]()

    def limited(tensor: Tensor, count: int) -> Tensor:
        asked.append(count)
        if count > most:
            raise torch.OutOfMemoryError("full")
        return new_empty(tensor, count)

    monkeypatch.setattr(Tensor, "new_empty", limited)
    return asked


def test_where_memory_is_short_smaller_pieces_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made, expected = make(0.3, 1), one_by_one(make(0.3, 1))
    asked = short_of_memory(monkeypatch, 1 << 16)
    foreach.update(made)
    assert max(asked) > 1 << 16
    for actual, one in zip(tensors_of(made), expected, strict=True):
        torch.testing.assert_close(actual, one, rtol=1e-6, atol=1e-7)


def test_without_memory_for_the_smallest_piece_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    short_of_memory(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError, match="the update of 21 elements"):
        foreach.update(make(1.0, 1))


def test_on_a_device_a_rule_that_raises_keeps_no_other_from_being_done() -> None:
    made, expected = make(0.3, 1), one_by_one(make(0.3, 1))
    made[0] = made[0]._replace(update=made[0].update._replace(rule=replace(RULE, eps="none")))
    with pytest.raises(TypeError):
        foreach.update(made)
    for tensor, wanted in zip(tensors_of(made)[4:], expected[4:], strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_one_that_raises_keeps_no_other_from_being_done(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its master is left as it was, so that what is written back is what masters hold."""
    if not has_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    made, expected, unchanged = make(0.3, 1), one_by_one(make(0.3, 1)), tensors_of(make(0.3, 1))
    bad = range(4, 8)  # the tensors of the second
    made[1] = made[1]._replace(update=made[1].update._replace(rule=replace(RULE, beta1=1.0)))
    with pytest.raises(ZeroDivisionError):
        updates.compute(made)
    for place, tensor in enumerate(tensors_of(made)):
        wanted = unchanged if place in bad else expected
        torch.testing.assert_close(tensor, wanted[place], rtol=1e-6, atol=1e-7)
