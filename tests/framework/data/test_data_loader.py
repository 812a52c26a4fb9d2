"""ResumableLoader: position, seeds, order, and no effect on the global random state; mixtures and orders at scale."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from dlo_framework.data import (
    BufferShuffle,
    Draw,
    GlobalShuffle,
    InOrder,
    Mixture,
    MixtureOrder,
    MixturePoint,
    Permutation,
    ResumableBatchSampler,
    ResumableLoader,
    Window,
    hash64,
    uniform,
)
from dlo_framework.data.mixture import read_points
from dlo_framework.errors import DloError


class Numbers(Dataset):
    """Items (index, three random numbers from the three global generators), class 1."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        values = [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(values, dtype=torch.float64), 1


class Refusing(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        raise DloError(f"item {index} is bad")


def loader(workers: int = 0, dataset: Dataset | None = None, **kwargs) -> ResumableLoader:
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "drop_last": True, "num_workers": workers} | kwargs
    return ResumableLoader(dataset or Numbers(), **options)


def rows(batches: list) -> list[list[float]]:
    return [row for images, _ in batches for row in images.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_at_the_next_sample_with_the_same_random_numbers(workers: int) -> None:
    whole = rows(list(loader()))
    first = loader(workers)
    batches = iter(first)
    seen = rows([next(batches) for _ in range(3)])
    assert first.state_dict() == {"epoch": 0, "samples": 12}
    second = loader(workers, batch_size=7)
    second.load_state_dict(first.state_dict())
    assert len(second) == 5
    seen += rows(list(second))
    assert seen == whole
    assert second.state_dict() == {"epoch": 0, "samples": 40}


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_random_state_alone(workers: int) -> None:
    data = loader(workers)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    batches = iter(data)
    next(batches)
    next(batches)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_an_unused_iterator_does_not_use_the_state_up() -> None:
    data = loader()
    data.load_state_dict({"epoch": 2, "samples": 8})
    iter(data)
    batches = iter(data)
    data.sampler.set_epoch(2)
    next(batches)
    assert data.state_dict() == {"epoch": 2, "samples": 12}


def test_a_finished_epoch_continues_with_the_next_from_its_start() -> None:
    data = loader()
    data.load_state_dict({"epoch": 2, "samples": 40})
    assert len(list(data)) == 10
    assert data.state_dict() == {"epoch": 3, "samples": 40}
    again = loader()
    again.load_state_dict({"epoch": 2, "samples": 40})
    again.sampler.set_epoch(2)
    assert list(again) == []


def test_a_batch_whose_step_is_not_done_does_not_count() -> None:
    busy = True
    data = loader(in_work=lambda: busy)
    batches = iter(data)
    next(batches)
    next(batches)
    assert data.state_dict()["samples"] == 4
    busy = False
    assert data.state_dict()["samples"] == 8


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(DloError, match=r"at least 41 samples, .* got 40; resume with the data"):
        loader().load_state_dict({"epoch": 0, "samples": 41})


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_for_the_user_arrives_as_it_was_raised(workers: int) -> None:
    with pytest.raises(DloError, match=r"^item \d is bad$"):
        list(loader(workers, Refusing()))


def test_a_rank_without_a_sample_needs_somebody_to_tell() -> None:
    options = {"dataset": Numbers(3), "shuffle": False, "drop_last": False, "world_size": 4}
    with pytest.raises(DloError, match=r"4 ranks must have a sample of each batch, got 3 samples .* fewer ranks"):
        loader(**options)
    told: list[int] = []
    data = loader(**options, rank=3, before_step=lambda samples: bool(told.append(samples)) or True)
    ((_, targets),) = list(data)
    assert told == [0]
    assert len(targets) == 1


def test_a_batch_dataset_gets_the_draws_and_returns_the_batch() -> None:
    class Whole:
        def __len__(self) -> int:
            return 8

        def fetch(self, draws: list[Draw]) -> list[int]:
            return [draw.index for draw in draws]

    assert sorted(index for part in loader(dataset=Whole()) for index in part) == list(range(8))


# --- the order of samples: every index once, for any ranks, batch size and position of a restart ---------------------


def whole_epoch(size: int, *, batch: int, world: int, epoch: int = 0, start: int = 0, **kwargs) -> list[list[Draw]]:
    """One list of draws for each rank."""
    drawn = []
    for rank in range(world):
        sampler = ResumableBatchSampler(size, batch_size=batch, rank=rank, world_size=world, **kwargs)
        sampler.set_epoch(epoch)
        drawn.append([draw for part in sampler.batches_from(start) for draw in part])
    return drawn


def test_the_hash_is_fixed_for_ever() -> None:
    # SplitMix64's published first outputs from seed 0, of which hash64 without keys is a double application.
    assert hash64(np.array([0]), 7).tolist() == hash64(np.array([0]), 7).tolist()
    assert [hex(h) for h in hash64(np.arange(2))] == ["0xe220a8397b1dcdaf", "0x910a2dec89025cc1"]
    numbers = uniform(np.arange(20_000), 3)
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01


@settings(max_examples=60)
@given(
    size=st.integers(1, 200),
    batch=st.integers(1, 20),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_training_visits_each_index_once_but_the_tail(size: int, batch: int, world: int, epoch: int, seed: int) -> None:
    step = batch * world
    if size < step:
        with pytest.raises(DloError, match="must fill one global batch"):
            ResumableBatchSampler(size, batch_size=batch, shuffle=True, world_size=world, drop_last=True)
        return
    by_rank = whole_epoch(size, batch=batch, world=world, epoch=epoch, shuffle=True, seed=seed, drop_last=True)
    seen = [draw.index for rank in by_rank for draw in rank]
    assert len(seen) == len(set(seen)) == size // step * step
    assert {len(rank) for rank in by_rank} == {size // step * batch}
    assert all(draw.real for rank in by_rank for draw in rank)


@settings(max_examples=200)
@given(size=st.integers(1, 60), batch=st.integers(1, 6), world=st.integers(1, 6), data=st.data())
def test_evaluation_deals_each_index_once_and_leaves_no_rank_out(size: int, batch: int, world: int, data) -> None:
    samplers = [
        ResumableBatchSampler(size, batch_size=batch, shuffle=False, rank=r, world_size=world, drop_last=False)
        for r in range(world)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert {len(rank) for rank in batches} == {len(samplers[0])} == {-(-size // (batch * world))}
    steps = list(zip(*batches, strict=True))
    real = [[draw.index for share in step for draw in share if draw.real] for step in steps]
    assert [index for step in real for index in step] == list(range(size))  # Also in the data's order, for predictions.
    for step in steps:
        counts = [sum(draw.real for draw in share) for share in step]
        assert max(counts) <= batch
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)
        assert all(share for share in step)
        if size >= world and batch > 1:
            assert min(counts) > 0
            assert all(draw.real for share in step for draw in share)
    assert samplers[0].leaves_ranks_out == any(len(step) < world for step in real)
    # From any batch on it is the same.
    start = data.draw(st.integers(0, len(steps) - 1))
    samples = sum(map(len, real[:start]))
    assert [list(sampler.batches_from(samples)) for sampler in samplers] == [rank[start:] for rank in batches]


@settings(max_examples=80)
@given(
    size=st.integers(30, 200),
    before=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    stop=st.integers(0, 8),
)
def test_resuming_with_other_ranks_repeats_and_misses_nothing(
    size: int, before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    options = {"shuffle": True, "seed": 5, "drop_last": True}
    first = whole_epoch(size, batch=before[0], world=before[1], **options)
    stop = min(stop, size // (before[0] * before[1]))
    done = [draw for rank in first for draw in rank[: stop * before[0]]]
    samples = stop * before[0] * before[1]
    rest = whole_epoch(size, batch=after[0], world=after[1], start=samples, **options)
    seen = [draw.index for draw in done] + [draw.index for rank in rest for draw in rank]
    assert len(seen) == len(set(seen))
    assert size - len(seen) < after[0] * after[1]


def test_seeds_depend_on_epoch_and_index_only() -> None:
    def seeds(batch: int, world: int, epoch: int) -> dict[int, int]:
        ranks = whole_epoch(60, batch=batch, world=world, epoch=epoch, shuffle=True, drop_last=True)
        return {draw.index: draw.seed for rank in ranks for draw in rank}

    one, four, later = seeds(60, 1, 0), seeds(5, 4, 0), seeds(60, 1, 1)
    assert one == four
    assert list(one) != list(later)
    assert all(0 <= seed < 2**63 for seed in one.values())
    assert len(set(one.values())) == 60
    assert not set(one.values()) & set(later.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 64, "size": 10}, "global batch size of at most 10"),
        ({"batch_size": 1, "size": 3, "world_size": 4}, "at most 3 data-parallel ranks"),
        ({"batch_size": 1, "size": 0}, "at least one sample, got none"),
        ({"batch_size": 0, "size": 3}, "at least 1"),
        ({"batch_size": 1, "size": 3, "rank": 2, "world_size": 2}, "rank 2 of world size 2"),
    ],
)
def test_impossible_sizes_are_refused_with_the_fix(options: dict, message: str) -> None:
    size = options.pop("size")
    with pytest.raises(DloError, match=message):
        ResumableBatchSampler(size, shuffle=True, drop_last=True, **options)


def test_planned_windows_and_sizes_are_the_same_on_every_rank_and_from_every_start() -> None:
    """10 steps of 4 samples, then of 8 in two batches; images grow from 16 to 24 pixels after 20 samples."""
    plan = {
        "window_at": lambda at: Window(4, 1) if at.epochs < 0.5 else Window(4, 2),
        "image_size_at": lambda at: 16 if at.samples < 20 else 24,
        "shuffle": True,
        "drop_last": True,
    }
    first, second = whole_epoch(83, batch=4, world=2, **plan)
    assert [draw.size for draw in first] == [(16, 16)] * 10 + [(24, 24)] * 30
    assert [draw.size for draw in second] == [draw.size for draw in first]
    assert len({draw.index for draw in [*first, *second]}) == 80
    assert whole_epoch(83, batch=4, world=2, start=28, **plan)[1] == second[14:]
    one = ResumableBatchSampler(83, batch_size=4, **plan)
    assert len(one) == 20
    # 44 samples are past half of 83, 40 are not; the last window's second batch is not full.
    assert [span.batches for span in one.planned()] == [1] * 11 + [2] * 8 + [1]
    assert [span.first for span in one.planned()[11:15]] == [11, 11, 13, 13]


def test_a_new_epoch_is_planned_anew() -> None:
    sampler = ResumableBatchSampler(
        40, batch_size=4, shuffle=True, drop_last=True, window_at=lambda at: Window(4 * (1 + at.epoch), 1)
    )
    lengths = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        lengths.append(len(sampler))
        assert len(list(sampler)) == len(sampler)
    assert lengths == [10, 5, 3]


# --- mixtures and orders at scale: exact shares at any position, each sample once per pass, on any ranks ------------


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


def by_batches(ranks: list[list[Draw]], batch: int) -> list[Draw]:
    """Returns the draws of all ranks, batch by batch."""
    return [draw for first in range(0, len(ranks[0]), batch) for rank in ranks for draw in rank[first : first + batch]]


def test_ranks_share_one_mixture_with_its_proportions():
    weights = {"code": 0.123, "web": 0.8, "books": 0.077}
    sizes = [350, 10_000, 166]
    mixture = Mixture(list(weights), [MixturePoint(0, weights)])
    order = MixtureOrder(mixture, [GlobalShuffle(size, seed) for seed, size in enumerate(sizes)], 5_000)
    bounds = np.cumsum([0, *sizes])
    options = {"epoch": 1, "shuffle": True, "drop_last": True, "order": order}
    together = by_batches(whole_epoch(order.size, batch=20, world=4, **options), 20)
    assert [together] == whole_epoch(order.size, batch=80, world=1, **options)
    index = np.array([draw.index for draw in together])
    shares = np.histogram(index, bounds)[0] / len(index)
    assert np.abs(shares - list(weights.values())).max() < 0.001
    assert len(set(together)) == len(index)  # also a repeated sample has other seeds


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

    def draws(world: int, start: int) -> list[Draw]:
        options = {"start": start, "shuffle": True, "drop_last": True, "order": order}
        return by_batches(whole_epoch(700, batch=56 // world, world=world, **options), 56 // world)

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
