"""Mixtures and orders at scale: exact shares at any position, each sample once per pass, on any number of ranks."""

from __future__ import annotations

import functools
import operator
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_framework.data import (
    BufferShuffle,
    GlobalShuffle,
    InOrder,
    Mixture,
    MixtureOrder,
    MixturePoint,
    Permutation,
    ResumableBatchSampler,
)
from dlo_framework.data.mixture import read_points
from dlo_framework.errors import DloError

RAMP = [
    MixturePoint(0, {"code": 0.3, "web": 0.7, "books": 0}),
    MixturePoint(10_010, {"code": 0, "web": 0.5, "books": 0.5}),
    MixturePoint(20_000, {"code": 0.1, "web": 0.1, "books": 0.8}),
]


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**60))
@settings(max_examples=60, deadline=None)
def test_a_permutation_has_each_element_once(size, seed):
    assert np.array_equal(np.sort(Permutation(size, seed)(np.arange(size))), np.arange(size))


def test_permutations_mix_well_and_differ_by_key():
    values = Permutation(100_000, 1, 2)(np.arange(100_000))
    assert abs(np.corrcoef(np.arange(100_000), values)[0, 1]) < 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    assert (values == Permutation(100_000, 1, 3)(np.arange(100_000))).mean() < 1e-3
    large = Permutation(10**12, 7)(np.arange(1000))
    assert large.max() < 10**12
    assert len(np.unique(large)) == 1000


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 1007])
def test_a_buffer_has_each_sample_once_and_draws_from_few_chunks(size):
    order = BufferShuffle(size, 3, chunk=16, buffer=160)
    placed = order.place(5, np.arange(size)).sample
    assert np.array_equal(np.sort(placed), np.arange(size))
    assert all(len(np.unique(placed[start : start + 160] // 16)) <= 11 for start in range(0, size, 160))
    some = np.array([size - 1, 0, size // 2])
    assert np.array_equal(order.place(5, some).sample, placed[some])
    if size > 100:
        assert not np.array_equal(placed, order.place(6, np.arange(size)).sample)
        assert (np.abs(np.diff(placed)) == 1).mean() < 0.05


def share(position: int, ramp: str) -> np.ndarray:
    """Integral of RAMP's weights over the samples before a position."""
    total, weights = np.zeros(3), [np.array(list(point.weights.values())) for point in RAMP]
    for number, point in enumerate(RAMP):
        length = RAMP[number + 1].samples - point.samples if number < 2 else np.inf
        past = np.clip(position - point.samples, 0, length)
        slope = (weights[number + 1] - weights[number]) / length if ramp == "linear" and number < 2 else 0
        total += weights[number] * past + slope * past**2 / 2
    return total


@pytest.mark.parametrize("ramp", ["step", "linear"])
def test_shares_are_within_one_sample_at_every_moment(ramp):
    mixture = Mixture(list(RAMP[0].weights), RAMP, ramp)
    assigned = mixture.assign(0, 30_000)
    counts = np.stack([np.cumsum(assigned.source == number) for number in range(3)], axis=1)
    shares = np.stack([share(position, ramp) for position in range(1, 30_001)])
    assert np.abs(counts - shares).max() < 1
    for number in range(3):  # each source gives its samples in order, without a gap
        own = assigned.number[assigned.source == number]
        assert np.array_equal(own, np.arange(len(own)))
    if ramp == "linear":  # the mean of the two ends, where the weights change evenly
        assert np.allclose(counts[10_009], [1501.5, 6006, 2502.5], atol=1)
    else:
        assert np.allclose(counts[10_009], [3003, 7007, 0], atol=1)


@given(start=st.integers(0, 2 * 10**9), length=st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_any_position_is_computed_without_those_before(start, length):
    mixture = Mixture(list(RAMP[0].weights), RAMP, "linear")
    whole = mixture.assign(start, start + length)
    middle = start + length // 2
    parts = [mixture.assign(start, middle), mixture.assign(middle, start + length)]
    assert np.array_equal(np.concatenate([part.source for part in parts]), whole.source)
    assert np.array_equal(np.concatenate([part.number for part in parts]), whole.number)


def test_ranks_share_one_mixture_with_its_proportions():
    world_size = 4
    weights = {"code": 0.123, "web": 0.8, "books": 0.077}
    sizes = [350, 10_000, 166]
    mixture = Mixture(list(weights), [MixturePoint(0, weights)])
    order = MixtureOrder(mixture, [GlobalShuffle(size, seed) for seed, size in enumerate(sizes)], 5_000)
    bounds = np.cumsum([0, *sizes])
    found = []
    for rank in range(world_size):
        sampler = ResumableBatchSampler(
            order.size, batch_size=80 // world_size, shuffle=True, rank=rank, world_size=world_size, drop_last=True,
            order=order,
        )  # fmt: skip
        sampler.set_epoch(1)
        found.append([[(draw.index, draw.seed) for draw in batch] for batch in sampler])
    together = [functools.reduce(operator.iadd, batches, []) for batches in zip(*found, strict=True)]
    one = ResumableBatchSampler(order.size, batch_size=80, shuffle=True, drop_last=True, order=order)
    one.set_epoch(1)
    assert together == [[(draw.index, draw.seed) for draw in batch] for batch in one]
    index = np.array([draw[0] for batch in together for draw in batch])
    shares = np.histogram(index, bounds)[0] / len(index)
    assert np.abs(shares - list(weights.values())).max() < 0.001
    assert len({draw for batch in together for draw in batch}) == len(index)  # also a repeated sample has other seeds


def test_a_source_gives_each_sample_once_per_pass_over_epochs():
    mixture = Mixture(["small", "large"], [MixturePoint(0, {"small": 1, "large": 1})])
    order = MixtureOrder(mixture, [GlobalShuffle(30, 0), BufferShuffle(5000, 0, chunk=8, buffer=64)], 250)
    drawn = np.concatenate([order.place(epoch, np.arange(250)).sample for epoch in range(4)])
    small = drawn[drawn < 30]
    assert len(small) == 500
    for first in range(0, 480, 30):
        assert np.array_equal(np.sort(small[first : first + 30]), np.arange(30))
    assert any(not np.array_equal(small[a : a + 30], small[b : b + 30]) for a, b in pairwise(range(0, 480, 30)))
    assert len(np.unique(drawn[drawn >= 30])) == 500  # its first pass is not over


def test_an_epoch_resumes_on_other_ranks_with_the_samples_left():
    mixture = Mixture(["a", "b"], [MixturePoint(0, {"a": 1, "b": 3}), MixturePoint(500, {"a": 3, "b": 1})], "linear")
    order = MixtureOrder(mixture, [GlobalShuffle(400, 1), InOrder(300)])

    def draws(world_size: int, start: int) -> list:
        ranks = [
            ResumableBatchSampler(
                700, batch_size=56 // world_size, shuffle=True, rank=rank, world_size=world_size, drop_last=True,
                order=order,
            ).batches_from(start)
            for rank in range(world_size)
        ]  # fmt: skip
        return [draw for batches in zip(*ranks, strict=True) for batch in batches for draw in batch]

    whole = draws(1, 0)
    for before, after in [(1, 2), (2, 4), (4, 1), (8, 7)]:
        assert draws(before, 0)[:168] + draws(after, 168) == whole


def test_a_billion_samples_take_no_memory():
    mixture = Mixture(["a", "b"], [MixturePoint(0, {"a": 1, "b": 2})])
    order = MixtureOrder(mixture, [GlobalShuffle(10**9, 0), BufferShuffle(2 * 10**9, 0, chunk=256, buffer=8192)])
    sampler = ResumableBatchSampler(order.size, batch_size=64, shuffle=True, drop_last=True, order=order)
    tracemalloc.start()
    batches = sampler.batches_from(1_500_000_000)
    first = [next(batches) for _ in range(3)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(len(batch) == 64 for batch in first)
    assert peak < 5 << 20


def moment(samples: int, code: float, web: float) -> dict:
    return {"samples": samples, "weights": {"code": code, "web": web}}


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"code": -0.1, "web": 1}, "mix.code must be positive, got -0.1"),
        ({"code": float("nan"), "web": 1}, "mix.code must be positive, got nan"),
        ({"coed": 1, "web": 1}, "mix must name sources, got 'coed'; did you mean"),
        ({"web": 1}, "mix must have a weight for each source, got none for code"),
        ([moment(5, 1, 1)], "mix must begin at samples: 0, got 5"),
        ([{"sample": 5}], "mix must be weights by source, or a list of moments"),
        ([moment(0, 1, 1), moment(0, 1, 1)], "mix must have moments with ascending samples, got 0 before 0"),
        ([moment(0, 0, 1), moment(9, 0, 0)], "mix must have a positive weight at each moment, got none at samples 9"),
    ],
)
def test_wrong_weights_are_refused(mix, message):
    with pytest.raises(DloError) as error:
        Mixture(["code", "web"], read_points(mix, ["code", "web"], [1, 1]))
    assert message in str(error.value)


def test_a_buffer_smaller_than_a_chunk_is_refused():
    with pytest.raises(DloError, match="buffer must have at least one chunk of 16 samples, got 8; set it to 64"):
        BufferShuffle(100, 0, chunk=16, buffer=8)
    with pytest.raises(DloError, match="chunk must be at least 1 sample, got 0"):
        BufferShuffle(100, 0, chunk=0, buffer=8)
