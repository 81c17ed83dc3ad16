"""Which rows a loss is asked about, as pure decisions on host tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from roundpipe_hf.loss.sample import IGNORED, Trait, sample_of, telling_rows, traits_of


def classes(*labels: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.arange(len(labels) * 2.0).view(-1, 2), "labels": tensor(labels)}


@pytest.mark.parametrize(
    ("batch", "shown", "rows"),
    [
        pytest.param(classes(0, 0, 0, 1), set(), [0, 3], id="another class"),
        pytest.param(classes(0, 0, 0), set(), [0, 1], id="all alike"),
        pytest.param(classes(0, 1, 2, 3, 4), set(), [0, 1, 2, 3], id="four at most"),
        pytest.param(
            classes(0, 1, 2, 0), {("labels", 0), ("labels", 1)}, [2, 0, 1], id="new ones first"
        ),
        pytest.param(classes(1), set(), [], id="one row"),
        pytest.param(
            classes(0, 0, 0) | {"weights": tensor([1.0, 1.0, 7.0])},
            set(),
            [0, 2],
            id="a column of numbers",
        ),
        pytest.param(
            {"labels": tensor([[0, 0], [0, 0], [1, 0]])}, set(), [2, 0], id="classes of tokens"
        ),
        pytest.param(
            {"labels": tensor([[99, -100], [99, 98], [97, 96]])}, set(), [1, 2], id="a vocabulary"
        ),
        pytest.param({"x": tensor(1.0)}, set(), [], id="no rows"),
    ],
)
def test_rows_that_differ(batch: dict[str, Any], shown: set[Trait], rows: list[int]) -> None:
    assert telling_rows(batch, shown) == rows


def test_a_number_is_the_least_of_its_batch_or_more() -> None:
    assert traits_of({"weights": tensor([0.5, 2.0, 3.0])}) == [
        {("weights", False)},
        {("weights", True)},
        {("weights", True)},
    ]


def test_labels_of_a_sample_are_far_apart_in_number() -> None:
    """So that nothing but their number weighs rows like it. The first is kept, and the last of
    many."""
    labels = torch.arange(100, 180).view(2, 40)
    sample = sample_of({"labels": labels, "length": 40, "mask": labels > 0}, [1, 0])
    kept = sample["labels"].ne(IGNORED)
    assert kept.sum(dim=1).tolist() == [12, 36]
    assert sample["labels"][kept].tolist() == labels[[1, 0]][kept].tolist()
    assert bool(kept[:, [0, -1]].all())
    assert sample["length"] == 40
    assert sample["mask"].shape == (2, 40)


def test_labels_of_a_sample_show_every_class() -> None:
    labels = torch.zeros(2, 12, dtype=torch.long)
    labels[0, 9], labels[1, 10] = 1, 2
    sample = sample_of({"labels": labels}, [0, 1])
    assert [row.unique().tolist() for row in sample["labels"]] == [[IGNORED, 0, 1], [IGNORED, 0, 2]]
