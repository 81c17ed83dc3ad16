"""Gradients of a call that is said to be a step's last go to their owners while its backward runs,
and count only as what every rank's window holds at the step.

Each check runs in two processes, joined by gloo; the oracle is an engine of one process alone, over
the same rows.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import roundpipe
from tests.params.test_ranks import assert_equal_on_all, shares
from tests.support.models import Batch, make_mlp, mlp_batch
from tests.support.processes import check_in_processes

ROWS, STEPS, SECONDS = 7, 4, 60
IN_TWO_STAGES = roundpipe.RoundPipeRunConfig(
    execute_plan=roundpipe.ModelExecutePlan([range(2)], [range(2, 7), range(2)])
)
Said = Callable[[int, int], bool]


def test_two_processes(tmp_path: Path) -> None:
    check_in_processes(all_checks, tmp_path)


def all_checks() -> None:
    dist.init_process_group("gloo")
    for is_async in (False, True):
        trains_as_one(lambda call, calls: call == calls - 1, is_async=is_async)
        trains_as_one(lambda call, calls: True, is_async=is_async)
    trains_as_one(lambda call, calls: dist.get_rank() == 0, is_async=False)
    adds_up_while_the_backward_runs()
    what_is_whole_is_sent_once()
    what_failed_after_it_was_sent_is_made_again()
    what_comes_after_the_last_call_counts()
    dropped_gradients_do_not_count()


def trains_as_one(says_last: Said, *, is_async: bool) -> None:
    """Whoever says it, and of whichever call: ranks with other numbers of calls, and with none."""
    alone, together = (
        trained(make_mlp(), group, says_last, is_async=is_async)
        for group in (None, dist.group.WORLD)
    )
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    assert_equal_on_all(together)


def trained(model: nn.Module, group: Any, says_last: Said, *, is_async: bool) -> list[Tensor]:
    with roundpipe.RoundPipe(model, devices=2, process_group=group) as engine:
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
        for number in range(STEPS):
            batch = mlp_batch(ROWS, number)
            calls = shares(ROWS, number, is_alone=group is None, each=False)
            for index, rows in enumerate(calls):
                run(engine, batch, rows, is_last=says_last(index, len(calls)))
            engine.step(optimizer.step, is_async)
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(engine: roundpipe.RoundPipe, batch: Batch, rows: slice, *, is_last: bool) -> None:
    engine.forward_backward(
        (batch.args[0][rows],), label=batch.label[rows], loss_fn=batch.loss_fn, is_last=is_last
    )


def adds_up_while_the_backward_runs() -> None:
    """The backward of the first layer does not end before the last ones' gradients are summed."""
    are_summed = threading.Event()

    def backward() -> None:
        assert are_summed.wait(SECONDS), "nothing was sent while the backward ran"

    model, batch = make_with_hook(backward), mlp_batch(4)
    with roundpipe.RoundPipe(
        model, devices=1, model_run_config=IN_TWO_STAGES, process_group=dist.group.WORLD
    ) as engine:
        exchange = engine.ranks.exchange

        def exchange_and_tell(outgoing: Any, incoming: Any) -> None:
            exchange(outgoing, incoming)
            if any(one.is_floating_point() for one in incoming.values()):
                are_summed.set()

        engine.ranks.exchange = exchange_and_tell  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        run(engine, batch, own_rows(4), is_last=True)
        engine.step(optimizer.step, is_async=False)
    expected = made_by_hand(batch)
    torch.testing.assert_close(list(model.parameters()), expected, atol=1e-6, rtol=0)


def what_is_whole_is_sent_once() -> None:
    """Once for each layer with weights, though the second rank does not say which call is its last.
    Sums are in fp32, unlike the weights that are sent afterwards."""
    num_sent, model, batch = 0, make_mlp().bfloat16(), mlp_batch(4)
    batch = batch._replace(args=(batch.args[0].bfloat16(),))
    with roundpipe.RoundPipe(
        model, torch.float32, devices=1, process_group=dist.group.WORLD
    ) as engine:
        exchange = engine.ranks.exchange

        def exchange_and_count(outgoing: Any, incoming: Any) -> None:
            nonlocal num_sent
            num_sent += any(one.dtype is torch.float32 for one in outgoing.values())
            exchange(outgoing, incoming)

        engine.ranks.exchange = exchange_and_count  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        run(engine, batch, own_rows(4), is_last=dist.get_rank() == 0)
        engine.step(optimizer.step, is_async=False)
    assert num_sent == 4


def what_failed_after_it_was_sent_is_made_again() -> None:
    """The second rank's backward fails behind its back, when the first one's gradients and its own
    deep ones are sent. It runs its call again, and the step is that of both."""
    may_fail = threading.Event()
    failures = [MemoryError("none left")] if dist.get_rank() else []

    def backward() -> None:
        if failures:
            assert may_fail.wait(SECONDS)
            raise failures.pop()

    model, batch = make_with_hook(backward), mlp_batch(4)
    with roundpipe.RoundPipe(
        model, devices=1, model_run_config=IN_TWO_STAGES, process_group=dist.group.WORLD
    ) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        run(engine, batch, own_rows(4), is_last=True)
        may_fail.set()
        if dist.get_rank():
            with pytest.raises(MemoryError, match="none left"):
                engine.step(optimizer.step, is_async=False)
            run(engine, batch, own_rows(4), is_last=True)
        engine.step(optimizer.step, is_async=False)
        engine.step(optimizer.step, is_async=False)  # nothing of the step before is left
    expected = made_by_hand(batch)
    torch.testing.assert_close(list(model.parameters()), expected, atol=1e-6, rtol=0)


def what_comes_after_the_last_call_counts() -> None:
    """A gradient that the first rank adds afterwards, by hand."""
    model, batch = make_mlp(), mlp_batch(4)
    with roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        run(engine, batch, own_rows(4), is_last=True)
        if dist.get_rank() == 0:
            engine.add_gradients({model[0].bias: torch.ones(16)})
        engine.step(optimizer.step, is_async=False)
    expected = made_by_hand(batch)
    expected[1] -= 0.1
    torch.testing.assert_close(list(model.parameters()), expected, atol=1e-6, rtol=0)


def dropped_gradients_do_not_count() -> None:
    """The second rank drops them when they are sent; it has run other rows before."""
    model, batch = make_mlp(), mlp_batch(4)
    with roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        if dist.get_rank():
            run(engine, mlp_batch(4, seed=1), slice(0, 4), is_last=True)
            engine.zero_grad()
        run(engine, batch, own_rows(4), is_last=True)
        engine.step(optimizer.step, is_async=False)
    expected = made_by_hand(batch)
    torch.testing.assert_close(list(model.parameters()), expected, atol=1e-6, rtol=0)


def own_rows(count: int) -> slice:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def make_with_hook(backward: Callable[[], None]) -> nn.Sequential:
    """The same weights as ``make_mlp``. ``backward`` is called before the first layer's."""
    model = make_mlp()

    class Called(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: Tensor) -> Tensor:
            return output.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            backward()
            return gradient

    class Hooked(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return Called.apply(super().forward(inputs))  # type: ignore[no-any-return]

    first = Hooked(16, 16)
    first.load_state_dict(model[0].state_dict())
    model[0] = first
    return model


def made_by_hand(batch: Batch) -> list[Tensor]:
    """The weights after a step of SGD over the whole batch."""
    model = make_mlp()
    batch.loss_fn(model(*batch.args), batch.label).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [parameter.detach() for parameter in model.parameters()]
