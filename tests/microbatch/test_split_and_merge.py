"""Split and merge: which tensors are cut, where, and what an output becomes."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.utils._pytree import register_pytree_node

from roundpipe.errors import ConfigError
from roundpipe.microbatch import Microbatches, batch_size_of, merge, split

Point = namedtuple("Point", ["x", "y"])


class Pair:
    """A pytree registered the way users do it: without key names."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


register_pytree_node(Pair, lambda p: ([p.left, p.right], None), lambda values, _: Pair(*values))


def batch(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def arg(cut: Microbatches, i: int = 0) -> list[Any]:
    return [args[i] for args, _ in cut.inputs]


def kwarg(cut: Microbatches, name: str) -> list[Any]:
    return [kwargs[name] for _, kwargs in cut.inputs]


def same_everywhere(values: list[Any], whole: Any) -> bool:
    return all(value is whole for value in values)


# --- which tensor gives the batch size ---


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((batch(3, 2),), {}, 3),
        ((2.0, torch.tensor(1.0), batch(4)), {"x": batch(5)}, 4),
        ((), {"scale": torch.tensor(2.0), "x": batch(5, 1)}, 5),
        (({"a": [None, (batch(6),)]},), {}, 6),
        ((), {"position_ids": batch(1, 7), "input_ids": batch(4, 7)}, 4),
        ((batch(1, 7),), {"inputs_embeds": batch(4, 7, 2)}, 4),
        ((batch(1, 7),), {"pixel_values": batch(4, 3, 2, 2)}, 4),
        ((), {"pixel_values": batch(9, 3), "input_ids": batch(2, 7)}, 2),
        ((batch(3),), {"input_ids": None}, 3),
        ((), {}, None),
        ((1, "a", torch.tensor(1)), {"flag": True}, None),
    ],
)
def test_batch_size_comes_from_the_named_kwargs_then_the_first_non_scalar_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: int | None
) -> None:
    assert batch_size_of(args, kwargs) == expected


# --- split: every row once, in order, evenly ---


@given(rows=st.integers(1, 40), num_microbatch=st.integers(1, 50), width=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_concatenating_the_split_gives_back_the_batch(
    rows: int, num_microbatch: int, width: int
) -> None:
    """Every row once and in order; never an empty microbatch; sizes as torch.tensor_split; fewer
    rows, fewer pieces."""
    x, y = batch(rows, width), torch.arange(rows)
    cut = split((x,), {"nested": [{"y": y}]}, y, num_microbatch)
    assert torch.equal(torch.cat(arg(cut)), x)
    assert torch.equal(torch.cat([n[0]["y"] for n in kwarg(cut, "nested")]), y)
    assert torch.equal(torch.cat(list(cut.labels)), y)
    count = min(rows, num_microbatch)
    assert len(cut.inputs) == len(cut.labels) == len(cut.rows) == count
    assert (
        cut.rows
        == tuple(len(piece) for piece in y.tensor_split(count))
        == tuple(map(len, arg(cut)))
    )
    assert min(cut.rows) >= 1
    assert max(cut.rows) - min(cut.rows) <= 1
    assert cut.batch_size == sum(cut.rows) == rows


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    rows=st.integers(2, 6),
    num_microbatch=st.integers(2, 7),
)
@settings(max_examples=60, deadline=None)
def test_a_tensor_is_cut_only_if_its_dim_0_is_the_batch_size(
    sizes: list[int], rows: int, num_microbatch: int
) -> None:
    others = [batch(size, 2) for size in sizes]
    cut = split((batch(rows, 3), *others), {}, None, num_microbatch)
    for i, other in enumerate(others, start=1):
        if len(other) == rows:
            assert tuple(map(len, arg(cut, i))) == cut.rows
        else:
            assert same_everywhere(arg(cut, i), other)


@given(rows=st.integers(1, 12), num_microbatch=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_merging_what_split_gave_is_the_identity(rows: int, num_microbatch: int) -> None:
    tree = {
        "x": batch(rows, 2),
        "flag": "a",
        "none": None,
        "pair": (torch.arange(rows), [torch.tensor(3)]),
    }
    cut = split((tree,), {}, None, num_microbatch)
    merged = merge(arg(cut), cut.rows)
    assert torch.equal(merged["x"], tree["x"])
    assert torch.equal(merged["pair"][0], torch.arange(rows))
    assert (merged["flag"], merged["none"], merged["pair"][1]) == ("a", None, [torch.tensor(3)])


@pytest.mark.parametrize(
    ("rows", "expected"), [(5, (2, 1, 1, 1)), (1, (1,)), (3, (1, 1, 1)), (4, (1, 1, 1, 1))]
)
def test_rows_that_do_not_divide_by_four_microbatches(rows: int, expected: tuple[int, ...]) -> None:
    assert (
        split((), {"input_ids": torch.zeros(rows, 12)}, torch.zeros(rows, 12), 4).rows == expected
    )


def test_offsets_and_scalars_of_packed_rows_are_not_cut() -> None:
    """Cumulative lengths cover the whole batch; their dim 0 is no batch."""
    offsets, longest, positions = torch.tensor([0, 5, 12, 16, 24]), torch.tensor(8), batch(1, 12)
    cut = split(
        (),
        {
            "cu_seq_lens_q": offsets,
            "max_length_q": 8,
            "longest": longest,
            "position_ids": positions,
            "input_ids": batch(2, 12),
        },
        None,
        2,
    )
    assert cut.rows == (1, 1)
    assert same_everywhere(kwarg(cut, "cu_seq_lens_q"), offsets)
    assert same_everywhere(kwarg(cut, "longest"), longest)
    assert same_everywhere(kwarg(cut, "position_ids"), positions)
    assert kwarg(cut, "max_length_q") == [8, 8]


def test_one_packed_row_stays_whole_with_everything_that_comes_with_it() -> None:
    kwargs = {
        "input_ids": batch(1, 12),
        "position_ids": batch(1, 12),
        "cu_seq_lens_q": torch.tensor([0, 5, 12]),
    }
    cut = split((), kwargs, batch(1, 12), 4)
    assert cut.rows == (1,)
    assert cut.inputs[0][1] is kwargs


def test_trees_keep_their_types() -> None:
    """Lists, dicts, named tuples and registered pytrees come out as what they were, in every
    microbatch."""
    tree = (OrderedDict(a=batch(4)), Point(batch(4), [None]), Pair(batch(4, 1), 7), [], {})
    cut = split(tree, {}, None, 2)
    for args, _ in cut.inputs:
        assert [type(part) for part in args] == [OrderedDict, Point, Pair, list, dict]
        assert args[0]["a"].shape == args[1].x.shape == (2,)
        assert args[1].y == [None]
        assert args[2].right == 7
        assert args[2].left.shape == (2, 1)


def test_non_tensors_are_shared_not_copied() -> None:
    state = object()
    assert same_everywhere(kwarg(split((batch(3),), {"state": state}, None, 3), "state"), state)


def test_without_a_tensor_there_is_one_microbatch() -> None:
    assert split((1, "a"), {"t": torch.tensor(2.0)}, None, 4) == Microbatches(
        inputs=(((1, "a"), {"t": torch.tensor(2.0)}),), labels=(None,), rows=(0,), batch_size=0
    )
    assert split((), {}, None, 4).inputs == (((), {}),)


def test_slices_are_views_and_keep_autograd() -> None:
    x = batch(5, 2).requires_grad_()
    pieces = arg(split((x,), {}, None, 3))
    assert all(
        piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in pieces
    )
    weights = [1.0, 10.0, 100.0]
    sum((piece * w).sum() for piece, w in zip(pieces, weights, strict=True)).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1.0, 1.0, 10.0, 10.0, 100.0]


def test_a_layer_may_change_its_slice_in_place() -> None:
    """Views made by one multi-output call could not be changed under autograd."""
    x = batch(4, 2).requires_grad_()
    for piece in arg(split((x * 1,), {}, None, 2)):
        piece.mul_(2).sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full((4, 2), 2.0))


def test_zero_rows_are_an_error_that_names_the_tensor() -> None:
    with pytest.raises(ConfigError, match=r"no rows: kwargs\['input_ids'\].*\(0, 7\)"):
        split((), {"input_ids": torch.zeros(0, 7)}, None, 2)
    with pytest.raises(ConfigError, match=r"no rows: args\[1\]\['x'\]"):
        split((3, {"x": torch.zeros(0)}), {}, None, 2)


@pytest.mark.parametrize("number", [0, -3])
def test_num_microbatch_below_one_is_an_error_with_the_number(number: int) -> None:
    with pytest.raises(ConfigError, match=str(number)):
        split((batch(2),), {}, None, number)


# --- labels ---


def test_labels_follow_the_rows_of_the_inputs() -> None:
    label = {"ids": torch.arange(5), "weight": torch.tensor(0.5), "classes": batch(3), "kind": "x"}
    cut = split((batch(5, 2),), {}, label, 2)
    assert [part["ids"].tolist() for part in cut.labels] == [[0, 1, 2], [3, 4]]
    for key in ("weight", "classes", "kind"):
        assert same_everywhere([part[key] for part in cut.labels], label[key])


def test_a_label_without_the_batch_size_goes_to_every_microbatch() -> None:
    label = batch(3)
    assert same_everywhere(list(split((batch(4),), {}, label, 2).labels), label)


def test_no_label_is_none_for_each_microbatch() -> None:
    assert split((batch(4),), {}, None, 4, split_label=lambda label, n: 1 / 0).labels == (None,) * 4


def test_an_empty_label_tree_is_given_to_each() -> None:
    assert split((batch(4),), {}, {}, 2).labels == ({}, {})


# --- overriding with a function ---


def test_a_function_splits_the_inputs_and_the_labels_follow_its_rows() -> None:
    def uneven(
        args: tuple[Any, ...], kwargs: dict[str, Any], n: int
    ) -> tuple[list[Any], list[Any]]:
        assert n == 3
        return [(args[0][:1],), [args[0][1:]]], [{}, {"last": True}]

    cut = split((batch(4, 2),), {}, torch.arange(4), 3, split_input=uneven)
    assert cut.rows == (1, 3)
    assert cut.batch_size == 4
    assert [type(args) for args, _ in cut.inputs] == [tuple, tuple]
    assert [kwargs for _, kwargs in cut.inputs] == [{}, {"last": True}]
    assert [label.tolist() for label in cut.labels] == [[0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (([()], [{}, {}]), "1 args but 2 kwargs"),
        (([(1,), (2,), (3,)], [{}] * 3), "3 microbatches; num_microbatch is 2"),
        (([], []), "0 microbatches"),
        ([((), {})], "must return"),
        (([batch(2)], [{}]), "not a Tensor and a dict"),
        (([(batch(2),), (batch(0),)], [{}, {}]), "no rows for microbatch 1 of 2"),
    ],
)
def test_what_a_split_function_returns_is_checked(returned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"split_input.*{message}"):
        split((batch(4),), {}, None, 2, split_input=lambda args, kwargs, n: returned)


def test_a_label_that_cannot_follow_the_function_is_an_error_not_a_silent_broadcast() -> None:
    """One packed row of 12 tokens, unpacked by the function into two rows: the (1, 12) label fits
    neither."""

    def unpack(
        args: tuple[Any, ...], kwargs: dict[str, Any], n: int
    ) -> tuple[list[Any], list[Any]]:
        return [(args[0][:, :5],), (args[0][:, 5:],)], [{}, {}]

    with pytest.raises(ConfigError, match=r"2 rows of 1.*label.*\(1, 12\).*split_label"):
        split((batch(1, 12),), {}, batch(1, 12), 2, split_input=unpack)
    cut = split(
        (batch(1, 12),),
        {},
        batch(1, 12),
        2,
        split_input=unpack,
        split_label=lambda y, n: y.split([5, 7], 1),
    )
    assert [tuple(label.shape) for label in cut.labels] == [(1, 5), (1, 7)]


def test_a_label_function_gets_the_number_of_microbatches_there_are() -> None:
    cut = split(
        (batch(2),), {}, "ab", 8, split_label=lambda label, n: list(label) if n == 2 else None
    )
    assert cut.labels == ("a", "b")


def test_a_label_function_of_the_wrong_length_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="3 labels for 2 microbatches"):
        split((batch(2),), {}, 0, 2, split_label=lambda label, n: [label] * 3)
    with pytest.raises(ConfigError, match="not a Tensor"):
        split((batch(2),), {}, batch(2), 2, split_label=lambda label, n: label)


# --- overriding with a spec ---


def test_a_spec_cuts_along_its_dim_and_replicates_what_it_marks() -> None:
    x, table = batch(3, 4), batch(4, 2)
    cut = split((x, table), {}, None, 2, split_input=((TensorChunkSpec(1), _Replicate()), None))
    assert [tuple(piece.shape) for piece in arg(cut)] == [(3, 2), (3, 2)]
    assert cut.rows == (2, 2)
    assert same_everywhere(arg(cut, 1), table)
    assert torch.equal(torch.cat(arg(cut), 1), x)


@pytest.mark.parametrize("marker", [_Replicate, _Replicate()])
def test_the_replicate_marker_counts_as_class_and_as_instance(marker: Any) -> None:
    x, y = batch(3), batch(6)
    cut = split((x,), {"y": y}, x, 2, split_input=(marker, None), split_label=marker)
    assert cut.rows == (3, 3)
    assert same_everywhere(arg(cut), x)
    assert same_everywhere(list(cut.labels), x)


def test_one_marker_covers_everything_below_it() -> None:
    """Tensors that lack the dim, and non-tensors, stay with the rule."""
    lengths = torch.tensor([3, 4])
    cut = split(
        ({"x": batch(5, 2), "y": [batch(7, 2, 3), 1]}, lengths),
        {},
        None,
        2,
        split_input=TensorChunkSpec(1),
    )
    assert [tuple(part["x"].shape) for part in arg(cut)] == [(5, 1)] * 2
    assert [tuple(part["y"][0].shape) for part in arg(cut)] == [(7, 1, 3)] * 2
    assert [part.tolist() for part in arg(cut, 1)] == [[3], [4]]
    assert split((batch(4),), {}, None, 2, split_input=_Replicate()).rows == (0,)


def test_a_dict_spec_may_name_only_some_keys() -> None:
    mask = batch(4, 4)
    cut = split(
        (),
        {"input_ids": batch(4, 3), "mask": mask},
        None,
        2,
        split_input=(None, {"mask": _Replicate()}),
    )
    assert cut.rows == (2, 2)
    assert same_everywhere(kwarg(cut, "mask"), mask)


def test_tensors_with_specs_may_differ_in_size_and_the_smallest_bounds_the_microbatches() -> None:
    cut = split((batch(6), batch(2)), {}, None, 4, split_input=TensorChunkSpec(0))
    assert cut.rows == (3, 3)
    assert [len(piece) for piece in arg(cut, 1)] == [1, 1]


def test_an_optional_input_left_out_is_no_mistake_of_the_spec() -> None:
    cut = split(
        (batch(2),), {"mask": None}, None, 2, split_input=(None, {"mask": TensorChunkSpec(0)})
    )
    assert kwarg(cut, "mask") == [None, None]


def test_label_specs_cut_along_their_dim() -> None:
    cut = split((batch(4),), {}, batch(3, 4), 2, split_label=TensorChunkSpec(-1))
    assert [tuple(label.shape) for label in cut.labels] == [(3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ((TensorChunkSpec(0),), None),
            r"does not fit args: it has \[0\] where the value has \[0\], \[1\]",
        ),
        (
            (None, {"y": TensorChunkSpec(0)}),
            r"does not fit kwargs: it has \['y'\] where the value has \['x'\]",
        ),
        (((TensorChunkSpec(2), None), None), r"TensorChunkSpec\(2\) for args\[0\] .*no such dim"),
        ((None, {"x": TensorChunkSpec(0)}), r"TensorChunkSpec\(0\) for kwargs\['x'\] \(3\)"),
        (((0, None), None), r"has 0 for args\[0\]; use TensorChunkSpec"),
        ((None, {"x": [None]}), r"for kwargs\['x'\]"),
        ((None, None, None), "a spec is a pair"),
        ({"x": None}, "a spec is a pair"),
    ],
)
def test_a_spec_that_does_not_fit_is_an_error_that_names_the_place(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"split_input.*{message}"):
        split((batch(4, 2), batch(4)), {"x": 3}, None, 2, split_input=spec)


def test_specs_check_sizes() -> None:
    with pytest.raises(ConfigError, match=r"no rows: args\[1\]"):
        split((batch(4), batch(2, 0)), {}, None, 2, split_input=((None, TensorChunkSpec(1)), None))
    with pytest.raises(ConfigError, match=r"cannot cut label .* into 4 microbatches along dim 0"):
        split((batch(4),), {}, batch(3), 4, split_label=TensorChunkSpec(0))


# --- merge ---


def test_one_microbatch_comes_back_as_it_is() -> None:
    output = {"x": batch(2), "state": object()}
    assert merge([output], (2,)) is output
    assert merge([output], (2,), how={"x": TensorChunkSpec(0)}) is output


def test_rows_concatenate_in_order_and_keep_autograd() -> None:
    a, b = batch(2, 3).requires_grad_(), batch(1, 3).requires_grad_()
    merged = merge([(a, [a * 2]), (b, [b * 2])], (2, 1))
    assert torch.equal(merged[0], torch.cat([a, b]))
    assert merged[1][0].shape == (3, 3)
    merged[1][0].sum().backward()
    assert a.grad is not None
    assert a.grad.eq(2).all()
    assert b.grad is not None
    assert b.grad.eq(2).all()


def test_scalars_average_weighted_by_rows_and_keep_autograd() -> None:
    a, b = torch.tensor(1.0, requires_grad=True), torch.tensor(4.0, requires_grad=True)
    merged = merge([{"loss": a}, {"loss": b}], (2, 1))["loss"]
    assert merged.item() == 2.0
    assert merged.ndim == 0
    merged.backward()
    assert a.grad is not None
    assert b.grad is not None
    torch.testing.assert_close((a.grad, b.grad), (torch.tensor(2 / 3), torch.tensor(1 / 3)))


@given(rows=st.lists(st.integers(1, 9), min_size=2, max_size=6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_average_of_microbatch_means_is_the_mean_over_all_rows(
    rows: list[int], data: st.DataObject
) -> None:
    x = torch.tensor(
        data.draw(st.lists(st.integers(-9, 9), min_size=sum(rows), max_size=sum(rows)))
    ).double()
    torch.testing.assert_close(merge([piece.mean() for piece in x.split(rows)], rows), x.mean())


def test_low_precision_scalars_are_averaged_in_fp32_and_keep_their_dtype() -> None:
    """The sum of these would overflow fp16."""
    merged = merge([torch.tensor(6e4, dtype=torch.float16)] * 3, (2, 2, 2))
    assert merged.dtype == torch.float16
    assert merged == torch.tensor(6e4, dtype=torch.float16)


def test_scalars_without_rows_average_plainly() -> None:
    assert merge([torch.tensor(1.0), torch.tensor(2.0)], (0, 0)).item() == 1.5


@pytest.mark.parametrize(
    "make", [lambda n: torch.tensor(n), lambda n: torch.tensor(n > 3), lambda n: n, str, float]
)
def test_integers_booleans_and_non_tensors_must_agree(make: Callable[[int], Any]) -> None:
    assert merge([make(3), make(3)], (1, 1)) == make(3)
    with pytest.raises(ConfigError, match=r"output\['n'\].*merge_output"):
        merge([{"n": make(3)}, {"n": make(3)}, {"n": make(4)}], (1, 1, 1))


def test_tensors_that_are_not_rows_must_agree() -> None:
    table = batch(5, 2)
    assert merge([table, table.clone()], (2, 1)) is table
    with pytest.raises(ConfigError, match=r"cannot merge output: .*\(5, 2\).*microbatch 1"):
        merge([table, table + 1], (2, 1))
    with pytest.raises(ConfigError, match="cannot merge"):
        merge([table, table.double()], (2, 1))


def test_a_tensor_must_have_the_rows_in_every_microbatch_to_concatenate() -> None:
    """A (2, 3) buffer looks like rows in the first microbatch only."""
    buffer = batch(2, 3)
    assert merge([buffer, buffer], (2, 1)) is buffer


def test_with_one_row_each_a_tensor_of_one_row_concatenates_unless_marked() -> None:
    positions = batch(1, 4)
    assert merge([positions, positions], (1, 1)).shape == (2, 4)
    assert merge([positions, positions], (1, 1), how=_Replicate()) is positions


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (batch(1, 3), batch(1, 4)),
        (batch(1, 3), batch(1, 3, 1)),
        (None, batch(1)),
        (batch(1), 3),
        (batch(1), None),
    ],
)
def test_what_neither_concatenates_nor_agrees_is_an_error_that_names_the_leaf(
    first: Any, second: Any
) -> None:
    with pytest.raises(ConfigError, match=r"output\[0\]\.y: .*merge_output") as caught:
        merge([[Point(0, first)], [Point(0, second)]], (1, 1))
    assert "microbatch 1" in str(caught.value)


def test_nones_and_the_same_object_agree() -> None:
    state = float("nan")
    assert merge([(None, state), (None, state)], (1, 1)) == (None, state)


def test_numpy_leaves_agree_by_value() -> None:
    numpy = pytest.importorskip("numpy")
    assert merge([numpy.arange(3), numpy.arange(3)], (1, 1)).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError):
        merge([numpy.arange(3), numpy.ones(3)], (1, 1))


def test_different_structures_are_an_error_that_names_the_first_difference() -> None:
    with pytest.raises(ConfigError, match=r"microbatches 0 and 1 .* first at output\['b'\]"):
        merge([{"a": 1, "b": 2}, {"a": 1}], (1, 1))
    with pytest.raises(ConfigError, match="different structures"):
        merge([[1], (1,)], (1, 1))


def test_merged_trees_keep_their_types() -> None:
    merged = merge([Pair(batch(2), Point(1, [])), Pair(batch(1), Point(1, []))], (2, 1))
    assert type(merged) is Pair
    assert merged.left.shape == (3,)
    assert merged.right == Point(1, [])


def test_model_outputs_stay_model_outputs() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    make = outputs.CausalLMOutputWithPast
    merged = merge(
        [
            make(loss=torch.tensor(1.0), logits=batch(1, 2)),
            make(loss=torch.tensor(3.0), logits=batch(1, 2)),
        ],
        (1, 1),
    )
    assert type(merged) is make
    assert merged.loss.item() == 2.0
    assert merged.logits.shape == (2, 2)
    cut = split((merged,), {}, None, 2)
    assert all(type(part) is make and part.logits.shape == (1, 2) for part in arg(cut))
    with pytest.raises(ConfigError, match=r"output\['logits'\]"):
        merge([make(logits=batch(1, 2)), make(logits=batch(1, 3))], (1, 1))


def test_a_function_merges_a_single_microbatch_too() -> None:
    """Else the form of the result would depend on the size of the batch."""
    for outputs, rows in (([1], (5,)), ([1, 2], (3, 2))):
        assert merge(outputs, rows, how=lambda o, r: (list(o), tuple(r))) == (outputs, rows)


def test_a_merge_spec_concatenates_along_its_dim() -> None:
    """Marked leaves need no rows; a dict spec leaves the other keys to the rule; so does True."""
    outputs = [{"hidden": batch(3, 2, 1), "loss": torch.tensor(n)} for n in (1.0, 3.0)]
    merged = merge(outputs, (2, 2), how={"hidden": TensorChunkSpec(1)})
    assert merged["hidden"].shape == (3, 4, 1)
    assert merged["loss"].item() == 2.0
    assert merge([batch(3, n) for n in (1, 2)], (1, 2), how=TensorChunkSpec(-1)).shape == (3, 3)
    assert merge([batch(1), batch(1)], (1, 1), how=True).shape == (2,)


def test_a_merge_spec_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"merge_output has TensorChunkSpec\(1\) for output\[0\]"):
        merge([[batch(1)], [batch(1)]], (1, 1), how=[TensorChunkSpec(1)])
    with pytest.raises(ConfigError, match="merge_output"):
        merge([batch(1), batch(2)], (1, 2), how=_Replicate())
    with pytest.raises(ConfigError, match="merge_output has 7"):
        merge([batch(1), batch(2)], (1, 2), how=7)
