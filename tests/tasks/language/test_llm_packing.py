"""Cutting and packing documents: pure functions, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_tasks.language.packing import count_targets, cut_documents, pack_best_fit
from dlo_tasks.language.step_tokens import bucket_by_length


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best fit, decreasing, by its definition; returns the room left in each window."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 50))
    return draw(st.lists(st.integers(1, capacity), max_size=120)), capacity


@given(lengths_and_capacity())
def test_packing_is_best_fit_decreasing(case):
    lengths, capacity = case
    packed = pack_best_fit(np.array(lengths, dtype=int), capacity)
    used = np.bincount(packed.window, lengths, packed.windows).astype(int) if lengths else np.zeros(0, int)
    assert sorted((capacity - used).tolist()) == one_by_one(lengths, capacity)


@given(lengths_and_capacity())
def test_no_two_pieces_overlap_and_each_window_is_filled_from_its_start(case):
    lengths, capacity = case
    packed = pack_best_fit(np.array(lengths, dtype=int), capacity)
    taken = np.zeros((packed.windows, capacity), int)
    for window, offset, length in zip(packed.window, packed.offset, lengths, strict=True):
        taken[window, offset : offset + length] += 1
    assert taken.max(initial=0) <= 1
    assert (np.diff(taken, axis=1) <= 0).all()
    assert taken.sum() == sum(lengths)


@pytest.mark.parametrize("lengths", [[0, 3], [3, 6]])
def test_lengths_out_of_range_are_refused(lengths):
    with pytest.raises(DloError, match=r"lengths must be in 1\.\.5"):
        pack_best_fit(np.array(lengths), 5)


BOUNDS = np.array([0, 1, 5, 16, 16, 20])  # documents of 1, 4, 11, 0 and 4 tokens: 0, 3, 10, none and 3 positions
ALL = np.arange(5)


def cut_to(policy, documents=ALL, seq_len=4):
    pieces = cut_documents(BOUNDS, documents, seq_len, policy)
    return list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)), pieces


def test_a_document_too_long_is_split_truncated_or_dropped():
    split, pieces = cut_to("split")
    assert split == [(1, 1, 3), (2, 5, 4), (2, 9, 4), (2, 13, 2), (4, 16, 3)]
    assert (pieces.too_long, pieces.too_short) == (1, 2)
    assert cut_to("truncate")[0] == [(1, 1, 3), (2, 5, 4), (4, 16, 3)]
    assert cut_to("drop")[0] == [(1, 1, 3), (4, 16, 3)]


def test_a_document_too_long_is_an_error_that_names_it_and_what_it_needs():
    with pytest.raises(
        DloError,
        match=r"document 2: document must have at most 5 tokens to fit seq_len, got 11 \(1 .*raise seq_len by 6",
    ):
        cut_to("error")
    assert cut_to("error", seq_len=10)[1].too_long == 0


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["split", "truncate", "drop"]),
    st.integers(0, 2**32 - 1),
)
def test_targets_are_counted_as_one_would(sizes, seq_len, policy, seed):
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    learned = np.random.default_rng(seed).random(int(bounds[-1])) < 0.5
    pieces = cut_documents(bounds, np.arange(len(sizes)), seq_len, policy)
    expected = [
        int(learned[start + 1 : start + length + 1].sum())
        for start, length in zip(pieces.start, pieces.length, strict=True)
    ]
    assert count_targets(learned, pieces).tolist() == expected
    if policy == "split":  # each position is in one piece
        assert pieces.length.sum() == sum(max(0, size - 1) for size in sizes)


def test_bucketed_batches_have_like_lengths_and_the_order_is_a_permutation():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 1003), 1, 512).astype(int)
    order = bucket_by_length(lengths, 8, seed=3, epoch=1)
    assert sorted(order.tolist()) == list(range(1003))
    assert order[1000:].tolist() == [1000, 1001, 1002]  # what fills no batch is what was drawn last
    batches = lengths[order[:1000]].reshape(-1, 8)
    plain = lengths[:1000].reshape(-1, 8)
    padded, unsorted = (int(some.max(axis=1).sum()) * 8 / int(lengths[:1000].sum()) for some in (batches, plain))
    assert padded < 1.1 < 1.8 < unsorted
    assert not (np.diff(batches[:, 0]) >= 0).all()  # batches are not in the order of their lengths
    assert not np.array_equal(order, bucket_by_length(lengths, 8, seed=3, epoch=2))
