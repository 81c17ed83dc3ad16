"""Which modules become engines. Sizes are bytes of fp32 parameters."""

from typing import Any

import torch
from torch import nn

from roundpipe.engine.parts.find import (
    default_upper_threshold,
    find_parts,
    has_batch_second,
    is_sequence,
    layers_of,
    num_bytes,
    whole,
)


class Two(nn.Module):
    """A forward, and two children."""

    def __init__(self, first: nn.Module, second: nn.Module, own: int = 0) -> None:
        super().__init__()
        self.first = first
        self.second = second
        if own:
            self.own = nn.Parameter(torch.zeros(own))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def linear(num_bytes: int) -> nn.Linear:
    return nn.Linear(num_bytes // 4, 1, bias=False)


def found(model: nn.Module, lower: int = 1000, upper: int = 0, skip: Any = ()) -> list[str]:
    return [
        part.path
        for part in find_parts(model, lower_threshold=lower, upper_threshold=upper, skip=skip)
    ]


def test_sequences_become_engines_of_their_children() -> None:
    model = Two(nn.Sequential(linear(40), nn.Tanh()), linear(2000))
    parts = find_parts(model, lower_threshold=1000, upper_threshold=0)
    assert [(part.path, len(layers_of(part.module))) for part in parts] == [
        ("first", 2),
        ("second", 1),
    ]


def test_own_parameters_from_the_lower_threshold_on() -> None:
    assert found(Two(linear(1000), linear(996))) == ["first"]
    assert found(Two(linear(40), linear(40), own=250)) == [""]


def test_all_parameters_up_to_the_upper_threshold() -> None:
    model = Two(Two(linear(40), linear(60)), linear(104))
    assert found(model, upper=100) == ["first"]
    assert found(model, upper=99) == ["first.first", "first.second"]
    assert found(model, upper=104) == ["first", "second"]
    assert found(model, upper=204) == [""]


def test_small_parts_are_not_cut() -> None:
    """Below the lower threshold in total: one microbatch; a sequence is cut whatever its size."""
    model = Two(linear(996), nn.Sequential(linear(996)))
    parts = find_parts(model, lower_threshold=1000, upper_threshold=996)
    assert [part.config.num_microbatch for part in parts] == [1, None]
    assert whole(linear(996), lower_threshold=1000).config.num_microbatch == 1
    assert whole(linear(1000), lower_threshold=1000).config.num_microbatch is None


def test_modules_with_the_batch_in_the_second_dimension_are_not_cut() -> None:
    """Torch's own; what a user's module does with one inside is not known."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(0, 1)
            return self.attention(x, x, x)[0].transpose(0, 1)

    layer = nn.TransformerEncoderLayer(4, 2, 8)
    batch_first = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    second = [nn.GRU(4, 4, batch_first=True), nn.MultiheadAttention(4, 2), layer, encoder]
    first = [
        nn.MultiheadAttention(4, 2, batch_first=True),
        batch_first,
        Turning(),
        nn.Conv1d(4, 4, 1),
    ]
    assert [has_batch_second(module) for module in (*second, nn.Sequential(nn.Tanh(), layer))] == [
        True
    ] * 5
    assert [has_batch_second(module) for module in first] == [False] * 4
    (part,) = find_parts(second[0], lower_threshold=1, upper_threshold=10**9)
    assert part.config.num_microbatch == 1


def test_elements_of_a_module_list() -> None:
    """Whatever their size, also containers within; all but the last leave their output on the
    devices."""
    model = Two(
        nn.ModuleList([linear(40), nn.Sequential(linear(40)), Two(linear(40), linear(2000))]),
        linear(40),
    )
    parts = find_parts(model, lower_threshold=1000, upper_threshold=0)
    assert [(part.path, part.config.merge_output) for part in parts] == [
        ("first.0", False),
        ("first.1", False),
        ("first.2", None),
    ]
    nested = nn.ModuleList(
        [nn.ModuleList([linear(40), linear(40)]), nn.ModuleDict({"a": linear(2000)})]
    )
    assert found(Two(nested, linear(40))) == ["first.0.0", "first.0.1", "first.1.a"]


def test_skipped_modules_stay_out_of_every_part() -> None:
    model = Two(
        nn.Sequential(linear(2000), linear(2000)), Two(linear(2000), linear(2000), own=1000)
    )
    assert found(model, skip=[model.first]) == ["second"]
    assert found(model, skip=[model.first[0], model.second.first]) == ["first.1", "second.second"]


def test_a_shared_module_is_one_part() -> None:
    shared = linear(2000)
    assert found(Two(shared, Two(linear(2000), shared))) == ["first", "second.first"]


def test_what_has_no_parameters_stays_on_the_cpu() -> None:
    assert found(Two(nn.Sequential(nn.Tanh()), nn.Dropout()), upper=10**9) == []


def test_a_sequence_with_a_forward_of_its_own_is_none() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    residual = Residual(linear(40), linear(40))
    assert not is_sequence(residual)
    assert layers_of(residual) == [residual]
    assert found(Two(residual, linear(40)), upper=80) == ["first", "second"]


def test_the_upper_threshold_by_default() -> None:
    """The model's bytes, shared ones once, over the devices + 1."""
    shared = linear(400)
    model = Two(shared, Two(shared, linear(800)))
    assert num_bytes(model) == 1200
    assert default_upper_threshold(model, 2) == 400
