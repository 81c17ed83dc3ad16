"""Ctrl-C at any moment of an engine call: the call counts whole or not at all, and the next one is
right.

It comes at the n-th place of the main thread where it can, for n spread evenly over the whole call:
also behind its last wait, where the generator is given back, buffers are written and gradients are
committed one after the other.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.step import write_back
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.injection import Places
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import Tensors, buffers_of

BATCH = mlp_batch(rows=4)
PLAN = ModelExecutePlan(fwd_plan=[range(2)], bwd_plan=[range(2, 4), range(2)])
WATCHED = (str(Path(roundpipe.__file__).parent), contextlib.__file__, threading.__file__)
NUM_PLACES = 40


def make_engine(engines: Engines) -> RoundPipe:
    """Dropout, so that the generator moves; batch norm, so that buffers do."""
    torch.manual_seed(0)
    linear = [nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(2)]
    return engines(
        nn.Sequential(linear[0], nn.BatchNorm1d(MLP_WIDTH), nn.Dropout(0.5), linear[1]), ONE
    )


def call(engine: RoundPipe) -> None:
    run_batch(engine, BATCH, 2, execute_plan=PLAN)


def forward_and_backward(engine: RoundPipe) -> None:
    engine(*BATCH.args).square().sum().backward()


def state(engine: RoundPipe) -> Tensors:
    """Everything a call changes: gradients, buffers, the generator."""
    gradients = {f"gradient of {name}": value for name, value in engine_gradients(engine).items()}
    return {**gradients, **buffers_of(engine.model), "generator": torch.get_rng_state()}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def places_in(run: Callable[[], None], reset: Callable[[], None]) -> list[int]:
    """As many as there are after a ``reset``, because a call looks at what was loaded."""
    counts = []
    for _ in range(3):  # some calls do more than others
        reset()
        places = Places(WATCHED)
        with places.watched():
            run()
        counts.append(places.count)
    assert min(counts) > NUM_PLACES
    return [1 + index * (min(counts) - 1) // (NUM_PLACES - 1) for index in range(NUM_PLACES)]


def interrupted(run: Callable[[], None], place: int) -> bool:
    places = Places(WATCHED, place)
    try:
        with places.watched():
            run()
    except KeyboardInterrupt:
        return True
    assert not places.has_sent, f"the interrupt at place {place} was swallowed"
    return False


CALLS = {"forward_backward": call, "forward and backward": forward_and_backward}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_counts_whole_or_not_at_all(name: str, engines: Engines) -> None:
    """`forward` and its `backward` are two calls: between them the buffers and the generator have
    moved already."""
    engine = make_engine(engines)
    call(engine)  # what is learnt only once is learnt
    CALLS[name](engine)
    start = {name: value.clone() for name, value in engine.model.state_dict().items()}
    threads = threading.enumerate()

    def reset() -> None:
        engine.zero_grad()
        engine.load_state_dict(start)
        torch.manual_seed(7)

    reset()
    before = state(engine)
    allowed = [before]
    if name != "forward_backward":
        engine(*BATCH.args)
        allowed.append(state(engine))
    reset()
    CALLS[name](engine)
    after = state(engine)
    allowed.append(after)
    reset()
    ends = set()
    num_interrupted = 0
    places = places_in(lambda: CALLS[name](engine), reset)
    # How many there are wavers, because a wait looks up more often when the machine is busy: the
    # last ones are tried again, one by one, until an interrupt was late enough.
    later = range(places[-1] - NUM_PLACES // 4, places[-1] + NUM_PLACES)
    for number, place in enumerate(itertools.chain(places, later)):
        if number >= NUM_PLACES and len(allowed) - 1 in ends:
            break
        reset()
        has_come = interrupted(lambda: CALLS[name](engine), place)
        num_interrupted += has_come
        found = state(engine)
        matching = [index for index, one in enumerate(allowed) if same(found, one)]
        assert matching, (
            f"interrupted at place {place}, it is neither as before the call nor as after it"
        )
        if has_come:
            ends.add(matching[0])
        reset()
        CALLS[name](engine)
        assert same(state(engine), after), (
            f"after an interrupt at place {place} the next call is another one"
        )
    assert num_interrupted > NUM_PLACES * 0.8, "hardly any interrupt came through"
    assert {0, len(allowed) - 1} <= ends, (
        "no interrupt was early enough, or none was late enough, to tell"
    )
    assert threading.enumerate() == threads


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_step_counts_whole_or_not_at_all(is_async: bool, engines: Engines) -> None:
    """Counted but not queued, it would let everybody after it wait for its weights forever."""
    engine = make_engine(engines)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=2**-10)
    call(engine)
    engine.step(optimizer.step, is_async=False)
    for master in engine.optim_parameters():
        master.grad = None

    def step() -> None:
        engine.step(optimizer.step, is_async=is_async)

    call(engine)
    num_steps = 0
    for place in places_in(step, lambda: None):
        call(engine)
        gradients, weights = engine_gradients(engine), engine_weights(engine)
        interrupted(step, place)
        left = engine_gradients(engine)
        now = engine_weights(engine)
        if left:
            ONE.check(left, gradients)
            ONE.check(now, weights)
        else:
            num_steps += 1
            ONE.check(
                now,
                {name: value - 2**-10 * gradients[name] for name, value in weights.items()},
                bitwise=False,
            )
        engine.zero_grad()
    assert 0 < num_steps < NUM_PLACES


@pytest.mark.parametrize("kept", ["one copy", "two copies"])
def test_a_flush_is_made_up_for_by_the_next_one(
    kept: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who saves again, because saving was interrupted, saves older weights."""
    monkeypatch.setattr(
        write_back, "free_host_bytes", lambda: 1 << 60 if kept == "two copies" else 0
    )
    engine = make_engine(engines)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=2**-10)

    def step() -> None:
        call(engine)
        engine.step(optimizer.step, is_async=True)
        engine._steps.wait_idle()

    for _ in range(
        2
    ):  # from the second on there may be second copies, which hold the newest weights
        step()
    places = Places(WATCHED)
    with places.watched():
        engine.synchronize()
    num_interrupted = 0
    for place in range(1, places.count, max(1, places.count // NUM_PLACES)):
        step()
        num_interrupted += interrupted(engine.synchronize, place)
        weights = engine_weights(engine)
        ONE.check(weights, dict(zip(weights, engine.optim_parameters(), strict=True)))
    assert num_interrupted > NUM_PLACES * 0.8, "hardly any interrupt came through"
