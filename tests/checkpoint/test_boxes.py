"""Arithmetic on boxes, against brute force over the elements."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.shards import (
    Box,
    flat_slice_boxes,
    full_box,
    is_tiling,
    overlap,
    slice_view,
    split_box,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw, shape):
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def shape_and_boxes(draw, count):
    shape = draw(SHAPES)
    return shape, [draw(boxes_of(shape)) for _ in range(count)]


@st.composite
def flat_parts(draw):
    """A shape, and the bounds of flat slices that together make up a tensor of that shape."""
    shape = draw(SHAPES)
    count = math.prod(shape)
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    return shape, [0, *cuts, count]


def counted(shape, boxes):
    """Number of boxes that cover each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        slice_view(counts, full_box(shape), box).add_(1)
    return counts


@given(flat_parts())
def test_flat_slices_tile_a_tensor_and_hold_its_elements_in_order(case):
    shape, edges = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    everything = []
    for start, stop in itertools.pairwise(edges):
        boxes = flat_slice_boxes(shape, start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        parts = [slice_view(tensor, full_box(shape), box).reshape(-1) for box in boxes]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, stop))
        everything += boxes
    assert is_tiling(shape, everything)


@given(flat_parts(), st.data())
def test_a_tiling_with_a_box_moved_taken_or_doubled_is_none(case, data):
    shape, edges = case
    boxes = [box for a, b in itertools.pairwise(edges) for box in flat_slice_boxes(shape, a, b)]
    index = data.draw(st.integers(0, len(boxes) - 1))
    assert not is_tiling(shape, boxes[:index] + boxes[index + 1 :])
    assert not is_tiling(shape, [*boxes, boxes[index]])


@given(shape_and_boxes(1), st.integers(1, 100))
def test_pieces_are_the_box_in_order_and_none_is_too_large(case, most):
    shape, (box,) = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = list(split_box(box, 4, most))
    assert all(part.numel * 4 <= max(most, 4) for part in parts)
    values = [slice_view(tensor, full_box(shape), part).reshape(-1) for part in parts]
    expected = slice_view(tensor, full_box(shape), box).reshape(-1)
    assert torch.cat([torch.empty(0, dtype=torch.int64), *values]).tolist() == expected.tolist()


@given(shape_and_boxes(2))
def test_the_overlap_is_what_both_hold(case):
    shape, (one, other) = case
    both = (counted(shape, [one]) + counted(shape, [other])) == 2
    shared = overlap(one, other)
    assert torch.equal(both, (counted(shape, [shared]) if shared else torch.zeros(shape)) == 1)
