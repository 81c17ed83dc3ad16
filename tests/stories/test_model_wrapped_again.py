"""A model that had an engine was given another one, and training went on from the wrong weights.

The story: a test of a model that is wrapped again failed now and then. The last update of an
asynchronous step is not written back until somebody flushes, and nobody did: the new engine began
one update back, or wherever the first one's thread was at that moment. What it trained was then
overwritten when the first was closed. And of two engines that were both kept, each went on from its
own copies of the weights, whatever the other had made of them.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, wrap_model_to_roundpipe
from roundpipe.engine.state import Host, ParameterStore
from tests.support.branching import make_branches
from tests.support.models import make_mlp
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import weights_of

INPUTS = [torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
Wrap = Callable[..., Any]


class Case(NamedTuple):
    """A kind of engine, by its model, its settings, and whose optimizer it is trained with."""

    make_model: Callable[[], nn.Module]
    settings: dict[str, Any]
    optimizers: Any = torch.optim


SEQUENCE = Case(make_mlp, {})
CASES = {
    "sequence": SEQUENCE,
    "on_device": Case(make_mlp, {"max_gpu_memory": 1.0}, roundpipe.optim),
    "in parts": Case(make_branches, {"upper_threshold": 100}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    with ExitStack() as stack:

        def make(model: nn.Module, case: Case = SEQUENCE) -> Any:
            engine = wrap_for(model, case)
            stack.callback(engine.close)
            return engine

        yield make


def wrap_for(model: nn.Module, case: Case) -> Any:
    return wrap_model_to_roundpipe(model, devices=1, **case.settings)


def sgd(parameters: Any, case: Case = SEQUENCE) -> torch.optim.Optimizer:
    return case.optimizers.SGD(parameters, lr=0.05, momentum=0.9)


def train(
    engine: Any, optimizer: torch.optim.Optimizer, step: int, *, is_async: bool = True
) -> None:
    engine(INPUTS[step]).square().mean().backward()
    engine.step(optimizer.step, is_async=is_async)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(INPUTS[step]).square().mean().backward()
    optimizer.step()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(
        weights_of(model).items(), weights_of(plain).values(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("how", "is_async"),
    [
        ("running", True),
        *((how, is_async) for how in ("kept", "closed", "forgotten") for is_async in (True, False)),
    ],
)
def test_the_second_engine_goes_on_from_the_last_update(
    how: str, is_async: bool, case: Case, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first is doing, and nothing of the first is written any more, not even when it
    is closed."""
    model, plain = case.make_model(), case.make_model()
    first: Any = wrap_for(model, case)
    optimizer, is_wrapped_again = sgd(first.optim_parameters(), case), threading.Event()
    if how == "running":
        make_host = Host.__init__

        def make(host: Host, *args: Any, **settings: Any) -> None:
            is_wrapped_again.set()
            make_host(host, *args, **settings)

        monkeypatch.setattr(Host, "__init__", make)

    def step() -> None:
        assert how != "running" or is_wrapped_again.wait(PATIENCE_S)
        optimizer.step()

    first(INPUTS[0]).square().mean().backward()
    first._steps._learnt.learn(
        optimizer
    )  # else the very first step would wait until the optimizer is entered
    first.step(step, is_async=is_async)
    if how == "closed":
        first.close()
    if how == "forgotten":
        del first
        gc.collect()
    second = wrap(model, case)
    optimizers = [sgd(plain.parameters()), sgd(plain.parameters())]
    train_plain(plain, optimizers[0], 0)
    assert_same(model, plain)
    train(second, sgd(second.optim_parameters(), case), 1)
    train_plain(plain, optimizers[1], 1)
    second.synchronize()
    assert_same(model, plain)
    if how in ("kept", "running"):
        first.close()
    assert_same(model, plain)


def test_weights_are_not_moved_while_the_first_engine_writes(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory is filled from where they are: what is written there after that would be
    lost."""
    first, found, make_store = wrap(make_mlp()), [], ParameterStore.__init__

    def make(store: ParameterStore, *args: Any) -> None:
        found.append((first._steps.is_idle, first._masters.are_ahead))
        make_store(store, *args)

    train(first, sgd(first.optim_parameters()), 0)
    monkeypatch.setattr(ParameterStore, "__init__", make)
    wrap(first.model)
    assert found == [(True, False)]


@pytest.mark.parametrize(
    ("order", "is_async"), [("abab", True), ("abab", False), ("abcabc", True), ("aabbab", False)]
)  # of two asynchronous steps in a row the second is stale, which plain training is not
def test_engines_over_the_same_weights_take_turns(
    order: str, is_async: bool, case: Case, wrap: Wrap
) -> None:
    """Each goes on from what the others have made of them; each has its own moments."""
    model, plain = case.make_model(), case.make_model()
    engines = {name: wrap(model, case) for name in sorted(set(order))}
    ours = {name: sgd(engine.optim_parameters(), case) for name, engine in engines.items()}
    theirs = {name: sgd(plain.parameters()) for name in engines}
    for step, name in enumerate(order):
        train(engines[name], ours[name], step, is_async=is_async)
        train_plain(plain, theirs[name], step)
    engines[order[-1]].synchronize()
    assert_same(model, plain)
    for engine in engines.values():
        engine.close()
    assert_same(model, plain)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_an_engine_goes_on_from_one_that_is_gone(how: str, case: Case, wrap: Wrap) -> None:
    model, plain = case.make_model(), case.make_model()
    kept, gone = wrap(model, case), wrap_for(model, case)
    ours, theirs = (
        sgd(kept.optim_parameters(), case),
        [sgd(plain.parameters()), sgd(plain.parameters())],
    )
    train(gone, sgd(gone.optim_parameters(), case), 0)
    train_plain(plain, theirs[0], 0)
    if how == "closed":
        gone.close()
    del gone
    gc.collect()
    train(kept, ours, 1)
    train_plain(plain, theirs[1], 1)
    kept.synchronize()
    assert_same(model, plain)


def test_a_load_through_one_engine_reaches_the_other(case: Case, wrap: Wrap) -> None:
    model, plain = case.make_model(), case.make_model()
    first, second = wrap(model, case), wrap(model, case)
    ours, theirs = sgd(first.optim_parameters(), case), sgd(plain.parameters())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(first, ours, 0)
    train_plain(plain, theirs, 0)
    second.load_state_dict(start)
    plain.load_state_dict(start)
    train(first, ours, 1)
    train_plain(plain, theirs, 1)
    first.synchronize()
    assert_same(model, plain)


def test_an_engine_that_evaluates_sees_what_another_trains(wrap: Wrap) -> None:
    """Also where its devices keep weights, which are frozen as far as it knows."""
    model = make_mlp()
    model.requires_grad_(False)
    judge = wrap(model)
    with torch.no_grad():
        judge(INPUTS[7])
        model[0].bias.requires_grad_(True)
        judge(INPUTS[7])
    trained = wrap(model)
    optimizer = sgd(trained.optim_parameters())
    for step in range(3):
        train(trained, optimizer, step)
        with torch.no_grad():
            found = judge(INPUTS[7])
            trained.synchronize()
            torch.testing.assert_close(found, model(INPUTS[7]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_what_was_loaded_before_stays(num_steps: int, case: Case, wrap: Wrap) -> None:
    """A notebook cell that loads the first weights and wraps, run twice. However many working
    copies there are."""
    model, plain = case.make_model(), case.make_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    first = wrap(model, case)
    optimizer = sgd(first.optim_parameters(), case)
    for step in range(num_steps):
        first(INPUTS[step]).square().mean().backward()
        first.step(optimizer.step).wait()
    first._steps.wait_idle()
    model.load_state_dict(start)
    second = wrap(model, case)
    assert_same(model, plain)
    train(second, sgd(second.optim_parameters(), case), 1)
    train_plain(plain, sgd(plain.parameters()), 1)
    first.close()
    second.synchronize()
    assert_same(model, plain)


def test_what_failed_in_the_first_engine_is_raised_once(wrap: Wrap) -> None:
    """By whoever would go on from weights that lack the update."""
    model = make_mlp()
    first = wrap(model)

    def fail() -> None:
        raise ArithmeticError("no update")

    first(INPUTS[0]).square().mean().backward()
    first.step(fail)
    with pytest.raises(ArithmeticError, match="no update"):
        wrap(model)
    second = wrap(model)
    train(second, sgd(second.optim_parameters()), 0)
    plain = make_mlp()
    train_plain(plain, sgd(plain.parameters()), 0)
    second.synchronize()
    assert_same(model, plain)


def test_an_engine_that_cannot_write_back_stops_the_others_until_it_is_closed(
    case: Case, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its weights may be in the model. They say whose they are, and go on from what is
    there."""
    model = case.make_model()
    first, second = (
        wrap_for(model, case._replace(settings={**case.settings, "name": "first"})),
        wrap(model, case),
    )
    optimizer = sgd(second.optim_parameters(), case)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    num_failed = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal num_failed
        num_failed += 1
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(first._steps._write_back, "_write", fail)
        train(first, sgd(first.optim_parameters(), case), 0, is_async=False)
        for use in (second, second, lambda _: wrap(model, case)):
            with pytest.raises(OSError, match="no room") as raised:
                use(INPUTS[0])
            notes = "\n".join(raised.value.__notes__)
            assert "from the engine first, which has the same weights" in notes
            assert "close() that engine" in notes
        with pytest.raises(OSError, match="no room"):
            first.close()
        second(INPUTS[0])
        num_failed_before = num_failed
        second.load_state_dict(start)
        train(second, optimizer, 1)
    second.synchronize()
    assert num_failed == num_failed_before
    plain = case.make_model()
    train_plain(plain, sgd(plain.parameters()), 1)
    assert_same(model, plain)


def test_what_was_not_written_back_at_the_close_is_written_back_when_others_go_on(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close raised it, and what was in the way is gone."""
    model, plain = make_mlp(), make_mlp()
    first, second = wrap_for(model, SEQUENCE), wrap(model)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(first._steps._write_back, "_write", fail)
        train(first, sgd(first.optim_parameters()), 0, is_async=False)
        with pytest.raises(OSError, match="no room"):
            first.close()
    train(second, sgd(second.optim_parameters()), 1)
    second.synchronize()
    for step in range(2):
        train_plain(plain, sgd(plain.parameters()), step)
    assert_same(model, plain)


def test_in_its_own_step_a_model_is_not_wrapped(wrap: Wrap) -> None:
    """That would wait for itself."""
    model = make_mlp()
    engine = wrap(model)
    engine(INPUTS[0]).square().mean().backward()
    with pytest.raises(
        ConfigError, match="wrapping a model that has an engine was called inside step_fn"
    ):
        engine.step(lambda: wrap(model), is_async=False)
