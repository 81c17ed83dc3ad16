"""The end of an engine: closed, left, or forgotten, it leaves no thread; used afterwards it says
so."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from roundpipe import RoundPipe
from roundpipe.errors import ClosedError, ConfigError
from tests.support.device_sets import THREE, TWO
from tests.support.engines import Engines, engine_weights, reference_steps, run_batch, train_steps
from tests.support.models import make_mlp, mlp_batch
from tests.support.optimizers import PATIENCE_S, PausingSGD, random_delays
from tests.support.reference import Reference, weights_of

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(3)]


def trained_engine() -> RoundPipe:
    """An engine with an update still on its way."""
    engine = RoundPipe(make_mlp(), devices=3)
    optimizer = PausingSGD(engine.optim_parameters(), pause=random_delays(1), lr=0.1)
    train_steps(engine, optimizer, BATCHES, 2, is_async=True)
    return engine


USES: dict[str, Callable[[RoundPipe], object]] = {
    "forward": lambda engine: engine(*BATCHES[0].args),
    "forward_backward": lambda engine: run_batch(engine, BATCHES[0], 2),
    "step": lambda engine: engine.step(lambda: None),
    "synchronize": lambda engine: engine.synchronize(),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close_raises(use: str) -> None:
    engine = trained_engine()
    engine.close()
    with pytest.raises(ClosedError):
        USES[use](engine)


def test_close_twice_is_harmless() -> None:
    before = set(threading.enumerate())
    engine = trained_engine()
    engine.close()
    settled = weights_of(engine.model)
    engine.close()
    assert set(threading.enumerate()) == before
    THREE.check(weights_of(engine.model), settled)
    with pytest.raises(ClosedError):
        engine.synchronize()


def test_close_joins_every_thread() -> None:
    before = set(threading.enumerate())
    engine = trained_engine()
    assert set(threading.enumerate()) > before
    engine.close()
    assert set(threading.enumerate()) == before


def test_the_threads_have_names() -> None:
    before = set(threading.enumerate())
    with trained_engine():
        names = sorted(thread.name for thread in set(threading.enumerate()) - before)
    assert len(names) >= 3
    assert all(name.startswith("roundpipe") for name in names), names


def test_leaving_the_context_flushes_and_joins() -> None:
    before = set(threading.enumerate())
    reference = Reference(make_mlp(), lambda params: torch.optim.SGD(params, lr=0.1), staleness=1)
    reference_steps(reference, BATCHES, 2)
    with trained_engine() as engine:
        pass
    assert set(threading.enumerate()) == before
    THREE.check(weights_of(engine.model), reference.weights)


def test_an_error_of_the_body_is_what_leaves_the_context() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="the body's"), trained_engine():
        raise KeyError("the body's")
    assert set(threading.enumerate()) == before


def test_an_error_while_leaving_chains_onto_the_bodys() -> None:
    """The failed update surfaces in `__exit__`; the body's error must still be found, and so must
    the update's."""

    def step_fn() -> None:
        raise ArithmeticError("the update's")

    def chain(error: BaseException | None) -> list[type[BaseException]]:
        return [] if error is None else [type(error), *chain(error.__cause__ or error.__context__)]

    def fail_twice() -> None:
        with RoundPipe(make_mlp(), devices=2) as engine:
            run_batch(engine, BATCHES[0], 2)
            engine.step(step_fn)
            raise KeyError("the body's")

    before = set(threading.enumerate())
    with pytest.raises((KeyError, ArithmeticError)) as caught:
        fail_twice()
    assert KeyError in chain(caught.value)
    assert set(threading.enumerate()) == before


def test_an_error_of_an_update_nobody_looked_at_leaves_the_context() -> None:
    def step_fn() -> None:
        raise ArithmeticError("the update's")

    def leave_at_once() -> None:
        with RoundPipe(make_mlp(), devices=2) as engine:
            run_batch(engine, BATCHES[0], 2)
            engine.step(step_fn)

    with pytest.raises(ArithmeticError, match="the update's"):
        leave_at_once()


def test_an_engine_that_is_forgotten_leaves_no_thread() -> None:
    """Workers hold no reference to it, so it is collected; its finalizer signals them and does not
    wait."""
    before = set(threading.enumerate())
    engine = trained_engine()
    engine.synchronize()
    started = set(threading.enumerate()) - before
    assert started
    del engine
    gc.collect()
    for thread in started:
        thread.join(PATIENCE_S)
    assert not [thread.name for thread in started if thread.is_alive()]


def test_an_engine_that_never_ran_can_be_closed(engines: Engines) -> None:
    """And its weights are the user's, untouched."""
    model = make_mlp()
    start = weights_of(model)
    engine = engines(model, TWO)
    TWO.check(engine_weights(engine), start)
    engine.close()
    TWO.check(weights_of(model), start)


def test_a_refused_engine_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="pin_model"):
        RoundPipe(make_mlp(), pin_model="nonsense", devices=3)
    assert set(threading.enumerate()) == before


def test_the_model_can_be_wrapped_again_after_close() -> None:
    """A notebook cell run twice: the second engine goes on from the first one's weights."""
    model = make_mlp()
    with RoundPipe(model, devices=2) as engine:
        train_steps(
            engine, torch.optim.SGD(engine.optim_parameters(), lr=0.1), BATCHES, 2, is_async=True
        )
    after_first = weights_of(model)
    plain = make_mlp()
    plain.load_state_dict(after_first)
    reference = Reference(plain, lambda params: torch.optim.SGD(params, lr=0.1))
    with RoundPipe(model, devices=3) as engine:
        train_steps(
            engine, torch.optim.SGD(engine.optim_parameters(), lr=0.1), BATCHES, 2, is_async=False
        )
    reference_steps(reference, BATCHES, 2)
    THREE.check(weights_of(model), reference.weights)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "forgotten"])
def test_the_model_can_be_trained_plainly_afterwards(is_closed: bool) -> None:
    """An optimizer over its parameters trains nothing while there is an engine, and is an ordinary
    one from then on."""
    engine = trained_engine()
    model = engine.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="close\\(\\) the engine to train the model without it"):
        optimizer.step()
    if is_closed:
        engine.close()
    else:
        engine.synchronize()
        del engine
        gc.collect()
    before = weights_of(model)
    BATCHES[0].loss_fn(model(*BATCHES[0].args), BATCHES[0].label).backward()
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in weights_of(model).items())
