"""Slices of tensors under tensor parallelism, and their boxes in a checkpoint."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_framework.shards import (
    FlatShard,
    SlicedShard,
    TensorSlice,
    held_boxes,
    is_tiling,
    make_equal_slice,
    slice_view,
)
from dlo_framework.shards import full_box as whole_box


@st.composite
def cut_tensors(draw):
    """A tensor, sliced for some ranks along a dim of some pieces, and the number of flat shards of each slice."""
    pieces, ranks, share = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = pieces * ranks * share
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    return (
        whole,
        [make_equal_slice(dim, shape[dim], ranks, rank, pieces) for rank in range(ranks)],
        draw(st.integers(1, 3)),
    )


@given(cut_tensors())
def test_flat_shards_of_cut_parts_tile_the_whole(case):
    whole, cuts, shards = case
    boxes = []
    for cut in cuts:
        part = cut.slice_tensor(whole)
        assert cut.full_shape(part.shape) == whole.shape
        edges = [part.numel() * n // shards for n in range(shards + 1)]
        for first, last in itertools.pairwise(edges):
            shard = SlicedShard(FlatShard(part.view(-1)[first:last], part.shape, first), cut)
            assert shard.shape == whole.shape
            for box, view in held_boxes(shard):
                assert torch.equal(view, slice_view(whole, whole_box(tuple(whole.shape)), box))
                boxes.append(box)
    assert is_tiling(tuple(whole.shape), boxes)


def test_what_is_written_into_the_boxes_fills_the_part():
    cut = make_equal_slice(0, 12, 2, 1, pieces=3)
    assert cut.runs == ((2, 2), (6, 2), (10, 2))
    part = torch.zeros(6, 5)
    whole = torch.arange(60.0).view(12, 5)
    for box, view in held_boxes(SlicedShard(part, cut)):
        view.copy_(slice_view(whole, whole_box((12, 5)), box))
    assert torch.equal(part, whole[[2, 3, 6, 7, 10, 11]])


def test_pieces_of_different_sizes_are_runs_too():
    packed = TensorSlice(0, 12, ((0, 4), (8, 1), (10, 1)))  # of queries 8, keys 2 and values 2, the first of two ranks
    assert packed.length == 6
    assert list(packed.overlaps(3, 3)) == [(3, 3, 1), (4, 8, 1), (5, 10, 1)]


def test_a_size_that_ranks_do_not_divide_is_refused():
    with pytest.raises(DloError, match=r"size must be divisible by 4 \(4 ranks\), got 10"):
        make_equal_slice(0, 10, 4, 0)
