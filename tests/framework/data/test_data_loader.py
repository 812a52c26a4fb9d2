"""ResumableLoader: its position, its seeds, its order, and no effect on the global random state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from dlo_framework.data import Draw, ResumableBatchSampler, ResumableLoader, Window, hash64, uniform
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


def test_repeated_augmentation_puts_differently_seeded_copies_side_by_side() -> None:
    draws = whole_epoch(90, batch=30, world=1, shuffle=True, drop_last=True, repeats=3)[0]
    assert len(draws) == 90
    assert len({draw.index for draw in draws}) == 30
    assert len({draw.seed for draw in draws}) == 90
    assert draws[0].index == draws[1].index == draws[2].index


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
