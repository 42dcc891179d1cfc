"""Joins and splits by hand, and that they undo each other for any sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimectl.architectures.mapping import (
    ConcatRows,
    Deinterleave,
    Identity,
    InterleaveGatedGroups,
    InterleaveGroups,
    Merge,
    ParamMapping,
    TensorParallelSplit,
)
from slimectl.errors import CheckpointError

sizes = st.integers(1, 4)


def column(*values: int) -> torch.Tensor:
    """A matrix of one column: a number for each row."""
    return torch.tensor(values)[:, None]


def rows(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().tolist()


def test_same_is_the_tensor_itself():
    tensor = column(1, 2)
    assert Identity().whole([tensor]) is tensor
    assert Identity().parts(tensor, [(2, 1)]) == (tensor,)


def test_gate_lies_over_up():
    gate, up = column(1, 2), column(3, 4)
    assert rows(ConcatRows().whole([gate, up])) == [1, 2, 3, 4]
    assert [rows(part) for part in ConcatRows().parts(column(1, 2, 3, 4), [(2, 1), (2, 1)])] == [[1, 2], [3, 4]]


def test_fused_qkv_goes_group_by_group():
    # Two groups of two query heads, heads one row wide: [q0 q1 k0 v0 | q2 q3 k1 v1].
    query, key, value = column(10, 11, 12, 13), column(20, 21), column(30, 31)
    fused = InterleaveGroups(2).whole([query, key, value])
    assert rows(fused) == [10, 11, 20, 30, 12, 13, 21, 31]
    back = InterleaveGroups(2).parts(fused, [(4, 1), (2, 1), (2, 1)])
    assert [rows(part) for part in back] == [[10, 11, 12, 13], [20, 21], [30, 31]]


def test_fused_qkv_biases_go_group_by_group():
    fused = InterleaveGroups(2).whole([torch.tensor([10, 11]), torch.tensor([20, 21]), torch.tensor([30, 31])])
    assert fused.tolist() == [10, 20, 30, 11, 21, 31]


def test_gates_of_a_group_follow_its_queries():
    # Two groups of two heads, two rows wide. Query 0 is rows 0 1, its gate rows 2 3, query 1 rows 4 5, ...
    both, key, value = column(*range(16)), column(20, 21, 22, 23), column(30, 31, 32, 33)
    fused = InterleaveGatedGroups(2, 2).whole([both, key, value])
    first = [0, 1, 4, 5, 2, 3, 6, 7, 20, 21, 30, 31]
    second = [8, 9, 12, 13, 10, 11, 14, 15, 22, 23, 32, 33]
    assert rows(fused) == first + second
    back = InterleaveGatedGroups(2, 2).parts(fused, [(16, 1), (4, 1), (4, 1)])
    assert [rows(part) for part in back] == [list(range(16)), [20, 21, 22, 23], [30, 31, 32, 33]]


def test_projections_of_key_heads_are_gathered_by_kind():
    # Two key heads; of each: q and k one row, v and z two, then b and a two each.
    first, second = column(0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15), column(20, 21, 22, 23, 30, 31, 32, 33)
    join = Deinterleave(2, ((1, 1, 2, 2), (2, 2)))
    whole = join.whole([first, second])
    q, k, v, z = [0, 10], [1, 11], [2, 3, 12, 13], [4, 5, 14, 15]
    b, a = [20, 21, 30, 31], [22, 23, 32, 33]
    assert rows(whole) == q + k + v + z + b + a
    assert [rows(part) for part in join.parts(whole, [(12, 1), (8, 1)])] == [rows(first), rows(second)]


def test_rank_holds_its_part_of_every_block():
    split = TensorParallelSplit(0, (4, 2))
    whole = column(0, 1, 2, 3, 10, 11)
    assert rows(split.shard(whole, 0, 2)) == [0, 1, 10]
    assert rows(split.shard(whole, 1, 2)) == [2, 3, 11]
    assert rows(split.joined([column(0, 1, 10), column(2, 3, 11)])) == rows(whole)


def test_columns_are_cut_alike():
    whole = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert TensorParallelSplit(1).shard(whole, 1, 2).tolist() == [[3, 4], [7, 8]]


def test_block_that_cannot_be_cut_is_refused():
    with pytest.raises(CheckpointError, match="3 rows or columns cannot be split into 2 equal parts"):
        TensorParallelSplit(0, (4, 3)).shard(torch.zeros(7, 1), 0, 2)


def test_padding_rows_are_cut_off():
    link = ParamMapping(
        "embedding.word_embeddings.weight", ("embed",), ((3, 2),), split=TensorParallelSplit(0), padded=True
    )
    ((name, tensor),) = link.to_hf(torch.arange(8).reshape(4, 2))
    assert (name, tensor.tolist()) == ("embed", [[0, 1], [2, 3], [4, 5]])


def test_shape_of_another_model_is_refused_in_both_directions():
    link = ParamMapping("norm.weight", ("norm",), ((4,),))
    with pytest.raises(CheckpointError, match=r"norm has shape \[3\], but \[4\] is expected"):
        link.to_megatron([torch.zeros(3)])
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[5\], expected \[4\]"):
        link.to_hf(torch.zeros(5))


@st.composite
def joins(draw) -> tuple[Merge, list[tuple[int, ...]]]:
    """Some join and shapes that fit it, matrices or vectors."""
    groups, dim, heads = draw(sizes), draw(sizes), draw(sizes)
    tail = draw(st.sampled_from([(), (3,)]))
    key = (groups * dim, *tail)
    kind = draw(st.sampled_from(["rows", "grouped", "gated", "ungrouped"]))
    if kind == "rows":
        return ConcatRows(), [(count, *tail) for count in draw(st.lists(sizes, min_size=1, max_size=3))]
    if kind == "grouped":
        return InterleaveGroups(groups), [(heads * groups * dim, *tail), key, key]
    if kind == "gated":
        return InterleaveGatedGroups(groups, dim), [(2 * heads * groups * dim, *tail), key, key]
    bands = tuple(map(tuple, draw(st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=3))))
    return Deinterleave(groups, bands), [(groups * sum(band), *tail) for band in bands]


@given(joins())
def test_parts_undo_whole(drawn):
    join, shapes = drawn
    first, parts = 0, []
    for shape in shapes:
        count = torch.Size(shape).numel()
        parts.append(torch.arange(first, first + count).reshape(shape))
        first += count
    whole = join.whole(parts)
    assert tuple(whole.shape) == join.shape(shapes)
    assert sorted(whole.flatten().tolist()) == list(range(first))
    for part, back in zip(parts, join.parts(whole, shapes), strict=True):
        assert torch.equal(part, back)


@given(st.lists(sizes, max_size=3), sizes, st.integers(0, 1))
def test_joined_undoes_shard(blocks, ranks, axis):
    cut = tuple(block * ranks for block in blocks)
    length = sum(cut) or ranks * 2
    whole = torch.arange(length * 3).reshape(length, 3)
    whole = whole.T if axis else whole
    split = TensorParallelSplit(axis, cut)
    shards = [split.shard(whole, rank, ranks) for rank in range(ranks)]
    assert torch.equal(split.joined(shards), whole)
    assert len({tuple(shard.shape) for shard in shards}) == 1
