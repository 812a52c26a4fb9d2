"""ResumableLoader: its position, its seeds, and no effect on the global random state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from dlo_framework.data import Draw, ResumableLoader
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
