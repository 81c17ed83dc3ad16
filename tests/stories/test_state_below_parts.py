"""A model that runs by parts forgot what their forwards had noted below their own module.

Its own code sees copies of all modules, and engines write what forwards have set to the user's
modules. When the model's forward was over, every difference between the two went to the user's
module, as if own code had made it: a counter in a module below a part went back to what it was when
the forward began, and a running average with it. Nor did the two see each other's within a forward:
a part did not see what own code had set in it, own code read what was there before.

Now the user's modules have the state, and copies are brought in step where one side hands over to
the other.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, RoundPipeRunConfig
from roundpipe.engine.partitioned import AutoRoundPipe
from tests.support.branching import WIDTH
from tests.support.device_sets import ONE, THREE, DeviceSet

ROWS, STEPS = 6, 5
one_and_three = pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
Wrap = Callable[..., AutoRoundPipe]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """Wraps by parts that run as one microbatch, as plain PyTorch counts; closed afterwards."""
    with ExitStack() as stack:

        def make(model: nn.Module, devices: DeviceSet, count: int = 1) -> AutoRoundPipe:
            engine = roundpipe.wrap_model_to_roundpipe(
                model,
                devices=devices.argument,
                lower_threshold=8,
                upper_threshold=0,
                model_run_config=RoundPipeRunConfig(num_microbatch=count),
            )
            assert isinstance(engine, AutoRoundPipe)
            return stack.enter_context(engine)

        yield make


class Noting(nn.Module):
    """Notes of its calls in all forms that a module has, and goes by what it has noted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.count, self.is_warm, self.gain = 0, False, 1.0
        self.shape: tuple[int, ...] = ()
        self.counts: list[int] = []
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.is_warm = self.count > 1
        self.shape, self.counts = tuple(x.shape), [*self.counts, self.count]
        with torch.no_grad():
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return self.linear(x) * (0.5 if self.is_warm else 1.0) * self.gain + self.average

    def noted(self) -> tuple[Any, ...]:
        return self.count, self.is_warm, self.gain, self.shape, self.counts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.inner = Noting()
        self.drop = nn.Dropout(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + self.drop(x) + self.bias


class Model(nn.Module):
    """Own code reads in the first block what its forward has just set, and sets something in the
    second, which that goes by; the second drops nothing because it is told so in time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(1))  # too small for a part
        self.seen: list[int] = []
        self.latest = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.first.inner.count
        x = self.first(x * self.scale)
        self.seen = [*self.seen, before, self.first.inner.count]
        self.second.inner.gain = 1.0 / self.first.inner.count
        self.second.eval()
        object.__setattr__(self, "latest", self.second.inner)  # not one more child
        return self.second(x)


@one_and_three
def test_five_steps_note_what_plain_steps_note(wrap: Wrap, devices: DeviceSet) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    engine = wrap(model, devices)
    assert engine.statistics()["engines"].keys() == {"first", "second"}
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        expected = plain(x).square().mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        loss = engine(x).square().mean()
        loss.backward()
        engine.step(optimizer.step, is_async=False)
        devices.check(loss, expected, bitwise=False)
    engine.synchronize()
    for name in ("first", "second"):
        found, wanted = model.get_submodule(name).inner, plain.get_submodule(name).inner
        assert found.noted() == wanted.noted()
        assert found.count == STEPS
    assert model.seen == plain.seen
    assert model.latest is model.second.inner
    assert [m.training for m in model.modules()] == [m.training for m in plain.modules()]
    devices.check(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=False)


def test_a_single_engine_keeps_lists_too() -> None:
    """Those that a forward sets anew were lost there as well, unlike numbers."""
    torch.manual_seed(0)
    layer = Noting()
    plain = copy.deepcopy(layer)
    model_run_config = RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.RoundPipe(layer, devices=1, model_run_config=model_run_config) as engine:
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            ONE.check(engine(x), plain(x))
    assert layer.noted() == plain.noted()


class Masking(nn.Module):
    """Own code leaves in a part what that needs beside its input, a row for each of the batch's."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.embed, self.part = nn.Linear(WIDTH, WIDTH), Masked()
        self.is_trained = is_trained

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        self.part.inner.mask = hidden if self.is_trained else (hidden > 0).float()
        return self.part(hidden)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.inner.mask.flip(0)[: len(x)]


@one_and_three
def test_tensors_set_below_a_part_are_of_all_rows(
    wrap: Wrap, devices: DeviceSet, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows which rows of them belong to which microbatch, so the part is not cut, and the
    log says so."""
    torch.manual_seed(0)
    model, x = Masking(is_trained=False), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    engine = wrap(model, devices, count=3)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        for _ in range(2):
            devices.check(engine(x), plain(x), bitwise=False)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "part runs as one microbatch" in said
    assert "'mask'" in said
    ONE.check(model.part.inner.mask, plain.part.inner.mask)


def test_gradients_through_what_own_code_sets_below_a_part_are_refused(wrap: Wrap) -> None:
    """They would end in the module that holds the tensor. Without grad there are none to lose."""
    torch.manual_seed(0)
    model, x = Masking(is_trained=True), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    engine = wrap(model, ONE)
    with pytest.raises(ConfigError, match=r"sets 'mask' inside of a module that an engine runs"):
        engine(x)
    with torch.no_grad():
        ONE.check(engine(x), plain(x), bitwise=False)


class Recurrent(nn.Module):
    """A recurrent module keeps a list of its weights; this one is left to own code."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def test_a_module_keeps_the_weights_it_holds_in_a_list() -> None:
    """The list of its copy, which holds copies' weights, was put in its place."""
    torch.manual_seed(0)
    model = Recurrent()
    with roundpipe.wrap_model_to_roundpipe(
        model, devices=1, lower_threshold=1, upper_threshold=0, skip_modules=[model.lstm]
    ) as engine:
        engine(torch.randn(2, 3, WIDTH)).sum().backward()
    own = [getattr(model.lstm, name) for name in model.lstm._flat_weights_names]
    assert all(a is b for a, b in zip(model.lstm._flat_weights, own, strict=True))


def test_a_forward_that_fails_lets_go_of_its_copies(wrap: Wrap) -> None:
    """The next call makes others, of the model as it is then."""
    torch.manual_seed(0)
    model = Model()
    engine = wrap(model, ONE)
    with pytest.raises(RuntimeError):
        engine(torch.randn(ROWS, WIDTH + 1))
    plain = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH)
    ONE.check(engine(x), plain(x), bitwise=False)
    assert model.first.inner.noted() == plain.first.inner.noted()


class Failing(Block):
    """Raises where it is told to, before anything is noted in it."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("told to")
        return super().forward(x)


class ThenFailing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Failing()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * self.scale))


@one_and_three
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_parts_before_a_failing_one_have_noted_stays(
    wrap: Wrap, is_async: bool, devices: DeviceSet
) -> None:
    """As in plain PyTorch: they have succeeded, each as a whole. Training goes on from there, and
    the failed forward leaves no gradients."""
    torch.manual_seed(0)
    model = ThenFailing().eval()
    plain = copy.deepcopy(model)
    engine = wrap(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(STEPS):
        model.second.fails = plain.second.fails = step in (1, 2)
        x = torch.randn(ROWS, WIDTH)
        if model.second.fails:
            for run in (engine, plain):
                with pytest.raises(ValueError, match="told to"):
                    run(x)
        else:
            expected = plain(x).square().mean()
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            loss = engine(x).square().mean()
            loss.backward()
            engine.step(update, is_async=is_async)
            engine.synchronize()  # so that no gradient is a step old
            devices.check(loss, expected, bitwise=False)
        for found, wanted in zip(parts_of(model), parts_of(plain), strict=True):
            assert found.noted() == wanted.noted()
        devices.check(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=False)
    assert [part.count for part in parts_of(model)] == [STEPS, STEPS - 2]


def parts_of(model: ThenFailing) -> list[Noting]:
    return [model.first.inner, model.second.inner]


@one_and_three
def test_a_part_that_fails_in_its_last_microbatch_has_noted_nothing(
    wrap: Wrap, devices: DeviceSet
) -> None:
    """A loop over its microbatches would have noted the first ones."""
    torch.manual_seed(0)
    model = Model()
    engine = wrap(model, devices, count=2)
    x = torch.randn(ROWS, WIDTH)
    inner = model.first.inner
    inner.register_forward_pre_hook(_raise_for_negatives)
    x[:-1], x[-1] = x[:-1].abs(), -x[-1].abs()
    with pytest.raises(ValueError, match="negative"):
        engine(x)
    assert inner.noted() == (0, False, 1.0, (), [])
    assert not inner.average.any()


def _raise_for_negatives(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if bool((inputs[0] < 0).any()):
        raise ValueError("negative")


class Penalised(nn.Module):
    """Own code adds to the output what its part has left in an attribute, as losses that balance
    experts are."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.embed, self.part = nn.Linear(WIDTH, WIDTH), Penalising()
        self.is_read = is_read

    def forward(self, x: Tensor) -> Tensor:
        output = self.part(self.embed(x))
        return output + self.part.penalty if self.is_read else output


class Penalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return x * self.weight


@one_and_three
@pytest.mark.filterwarnings("ignore:Penalising.forward sets the tensor attribute")
def test_own_code_that_reads_a_tensor_which_a_part_has_set_is_refused(
    wrap: Wrap, devices: DeviceSet
) -> None:
    """It got what was there before, 0, and trained without the penalty. Only whoever reads it is
    told."""
    torch.manual_seed(0)
    model, x = Penalised(is_read=True), torch.randn(ROWS, WIDTH)
    engine = wrap(model, devices)
    with pytest.raises(ConfigError, match=r"reads Penalising.penalty, a tensor that a module has"):
        engine(x)
    model.is_read = False
    devices.check(engine(x), copy.deepcopy(model)(x), bitwise=False)
    assert model.part.penalty == 0.0
