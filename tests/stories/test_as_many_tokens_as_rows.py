"""XLNet puts the sequence first inside, and with as many tokens as rows its blocks were cut along
the sequence.

A part of a model used to be cut wherever its input was as long as the model's batch. That is not
enough to know: XLNet's hidden states are (tokens, rows, width). With 6 tokens and 6 rows each
microbatch held 3 tokens of all rows, which saw nothing of the other 3; the loss was a little off,
on two devices otherwise than on three. What a part returns can be mistaken in the same way, where a
microbatch has as many rows as there are tokens.
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
from roundpipe import RoundPipeRunConfig
from roundpipe.engine.partitioned import AutoRoundPipe
from roundpipe.engine.parts.find import num_bytes
from tests.support.branching import WIDTH
from tests.support.device_sets import ONE, THREE, VIRTUAL, DeviceSet

ROWS, COUNT = 6, 3
by_devices = pytest.mark.parametrize("devices", VIRTUAL, ids=str)
one_and_three = pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
Wrap = Callable[..., AutoRoundPipe]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """Wraps part by part, in microbatches of 2 rows; engines are closed afterwards."""
    with ExitStack() as stack:

        def make(model: nn.Module, devices: DeviceSet, **settings: Any) -> AutoRoundPipe:
            engine = roundpipe.wrap_model_to_roundpipe(
                model,
                devices=devices.argument,
                upper_threshold=settings.pop("upper_threshold", 0),
                model_run_config=RoundPipeRunConfig(num_microbatch=COUNT),
                **settings,
            )
            assert isinstance(engine, AutoRoundPipe)
            return stack.enter_context(engine)

        yield make


def check(engine: AutoRoundPipe, plain: nn.Module, devices: DeviceSet, **inputs: Any) -> None:
    """Loss and all gradients are those of plain PyTorch."""
    expected = plain(**inputs)["loss"]
    expected.backward()
    loss = engine(**inputs)["loss"]
    loss.backward()
    engine.synchronize()
    devices.check(loss, expected, bitwise=False)
    ours, theirs = (
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for model in (engine.model, plain)
    )
    devices.check(ours, theirs, bitwise=False)


def make_xlnet() -> nn.Module:
    from transformers import XLNetConfig, XLNetLMHeadModel

    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=50, d_model=WIDTH, n_layer=2, n_head=2, d_inner=2 * WIDTH, dropout=0.0
    )
    return XLNetLMHeadModel(config)


@by_devices
@pytest.mark.parametrize("tokens", [ROWS, ROWS // COUNT, ROWS + 1])
def test_xlnet_with_as_many_tokens_as_rows(
    wrap: Wrap, devices: DeviceSet, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the batch, as in a microbatch, and otherwise. The log says so where they are alike."""
    model = make_xlnet()
    ids = torch.randint(3, 50, (ROWS, tokens))
    plain = copy.deepcopy(model)
    engine = wrap(model, devices, lower_threshold=100)  # its own weights have 64 bytes
    with caplog.at_level(logging.WARNING, "roundpipe"):
        for _ in range(2):
            plain.zero_grad()
            engine.zero_grad()
            check(engine, plain, devices, input_ids=ids, labels=ids)
    said = [record.getMessage() for record in caplog.records if record.name == "roundpipe"]
    assert len(said) == (tokens == ROWS)
    assert all("transformer.layer.0 runs as one microbatch" in line for line in said)


@one_and_three
@pytest.mark.parametrize("tokens", [ROWS, ROWS // COUNT])
def test_xlnet_whose_transformer_is_one_part(wrap: Wrap, devices: DeviceSet, tokens: int) -> None:
    """That is given rows first, and has the sequence first inside."""
    model = make_xlnet()
    ids = torch.randint(3, 50, (ROWS, tokens))
    plain = copy.deepcopy(model)
    engine = wrap(model, devices, lower_threshold=1)
    assert "transformer" in engine.statistics()["engines"]
    check(engine, plain, devices, input_ids=ids, labels=ids)


class Turning(nn.Module):
    """A part that is given rows first and returns tokens first, as torch's transformer wants
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": self.encoder(self.embed(ids)).cumsum(0).square().mean()}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).transpose(0, 1)


@one_and_three
@pytest.mark.parametrize("tokens", [ROWS, ROWS // COUNT])
def test_a_part_that_turns_its_output(wrap: Wrap, devices: DeviceSet, tokens: int) -> None:
    torch.manual_seed(0)
    model = Turning()
    plain = copy.deepcopy(model)
    engine = wrap(model, devices, lower_threshold=1, upper_threshold=num_bytes(model.embed))
    assert "embed" in engine.statistics()["engines"]
    check(engine, plain, devices, ids=torch.randint(50, (ROWS, tokens)))


class Placed(nn.Module):
    """Takes positions of three kinds, as the language models of Qwen that see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x``: (rows, tokens, width); ``positions``: (kinds, rows, tokens)."""
        made: Tensor = self.linear(x) + positions.float().mean(0).cos().unsqueeze(-1)
        return made


class Placing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(50, WIDTH), Placed(), Placed()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        positions = torch.stack([ids, ids.flip(1), ids + 1])
        x = self.second(self.first(self.embed(ids), positions), positions)
        return {"loss": x.square().mean()}


@one_and_three
def test_an_input_with_rows_second(wrap: Wrap, devices: DeviceSet) -> None:
    """Its three kinds are not the batch, so it was not cut, and each microbatch of the others met
    the positions of all rows."""
    torch.manual_seed(0)
    model = Placing()
    plain = copy.deepcopy(model)
    engine = wrap(model, devices, lower_threshold=1, upper_threshold=num_bytes(model.first))
    assert "first" in engine.statistics()["engines"]
    check(engine, plain, devices, ids=torch.randint(50, (ROWS, 4)))


class Seen(nn.Module):
    """Notes the shapes that it is called with."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return self.inner(x)


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = Seen(first), Seen(second)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.first(x)).square().mean()}


class Rowless(Two):
    """Is not told of a batch: it makes one itself."""

    def forward(self, size: int) -> dict[str, Tensor]:
        return super().forward(torch.arange(float(size * WIDTH)).view(size, WIDTH).cumsum(0) / 100)


def images() -> nn.Module:
    return nn.Conv2d(ROWS, ROWS, 3, padding=1)


def features() -> nn.Module:
    return nn.Sequential(nn.Linear(ROWS, ROWS), nn.Tanh())


@pytest.mark.parametrize(
    ("make", "shape"), [(images, (ROWS, ROWS, 5, 5)), (features, (ROWS, ROWS))], ids=["cnn", "mlp"]
)
def test_as_many_channels_or_features_as_rows_are_cut(
    wrap: Wrap, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """What modules over images and those over features take has the batch first."""
    torch.manual_seed(0)
    model = Two(make(), make())
    plain = copy.deepcopy(model)
    engine = wrap(model, THREE, lower_threshold=1, upper_threshold=num_bytes(model.first))
    check(engine, plain, THREE, x=torch.randn(shape))
    for part in (model.first, model.second):
        assert part.shapes
        assert {len(each) for each in part.shapes} == {len(shape)}
        assert all(each == (ROWS // COUNT, *shape[1:]) for each in part.shapes)


def test_what_is_said_of_a_part_is_done(wrap: Wrap) -> None:
    """Only the user knows that the first of two alike is the batch."""
    torch.manual_seed(0)
    model = Two(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    cut = {model.first: RoundPipeRunConfig(num_microbatch=COUNT)}
    engine = wrap(
        model, ONE, lower_threshold=1, upper_threshold=num_bytes(model.first), override_config=cut
    )
    check(engine, plain, ONE, x=torch.randn(ROWS, ROWS, WIDTH))
    assert set(model.first.shapes) == {(ROWS // COUNT, ROWS, WIDTH)}
    assert set(model.second.shapes) == {(ROWS, ROWS, WIDTH)}


def test_a_model_that_is_given_no_rows(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """What its parts get may be anything."""
    torch.manual_seed(0)
    model = Rowless(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    engine = wrap(model, THREE, lower_threshold=1, upper_threshold=num_bytes(model.first))
    with caplog.at_level(logging.WARNING, "roundpipe"):
        check(engine, plain, THREE, size=ROWS)
    assert set(model.first.shapes) == {(ROWS, WIDTH)}
    assert "no tensor whose rows could be counted" in caplog.text
