"""Each sample of a torch DistributedSampler counts once over the ranks, which have equally many batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from dlo_framework.data.evaluation import DistributedEvalLoader, UnrepeatedSampler, without_repeats
from dlo_framework.run.resume import give_generator

SIZES = st.integers(1, 23), st.integers(1, 5), st.integers(1, 4)


def shares(kind: type, total: int, ranks: int, batch_size: int, drop_last: bool, **options: Any) -> list[Any]:
    dealt = [kind(range(total), ranks, rank, **options) for rank in range(ranks)]
    return [UnrepeatedSampler(sampler, batch_size, drop_last) for sampler in dealt]


@given(*SIZES, st.booleans())
def test_each_sample_counts_once_and_ranks_have_equally_many_batches(total, ranks, batch_size, shuffle):
    kinds = [DistributedSampler] + ([UnrepeatedDistributedSampler] if total >= ranks else [])
    for kind in kinds:
        found = shares(kind, total, ranks, batch_size, False, shuffle=shuffle)
        assert sorted(index for share in found for index in list(share)[: share.samples]) == list(range(total))
        assert all(len(list(share)) == len(share) for share in found)
        assert len({-(-len(share) // batch_size) for share in found}) == 1
        # Only a batch without any sample that counts holds another.
        assert all(len(share) == share.samples or share.samples % batch_size == 0 for share in found)


@given(*SIZES)
def test_with_drop_last_no_sample_counts_twice(total, ranks, batch_size):
    found = shares(DistributedSampler, total, ranks, batch_size, True, shuffle=False)
    kept = [index for share in found for index in share]
    assert len(set(kept)) == len(kept) == total // ranks * ranks


class Stage:
    """A trainer in one of its stages, or in training."""

    def __init__(self, name: str = "") -> None:
        for other in ("sanity_checking", "validating", "testing", "predicting"):
            setattr(self, other, other == name)


def stage(name: str = "") -> Any:
    return Stage(name)


def dealt_loader(total: int = 9, **options: Any) -> DataLoader:
    return DataLoader(range(total), sampler=DistributedSampler(range(total), 2, 1, shuffle=False), **options)  # type: ignore[arg-type]


def test_what_needs_no_change_has_none():
    for loader in ([1, 2], DataLoader(range(9)), dealt_loader(8)):  # type: ignore[arg-type]
        assert without_repeats(loader, stage("validating")) is loader
    loader = dealt_loader()
    assert without_repeats(loader, stage()) is loader, "in training shares are equally long"
    changed = without_repeats(loader, stage("testing"))
    assert isinstance(changed, DistributedEvalLoader)
    assert len(list(loader)) == 5, "the user's own is as it was"
    assert changed.dataset is loader.dataset


class Pairs(BatchSampler):
    """A batch sampler whose batches are its own affair."""


def test_a_batch_sampler_of_ones_own_is_warned_of():
    sampler = DistributedSampler(range(9), 2, 1, shuffle=False)
    loader = DataLoader(range(9), batch_sampler=Pairs(sampler, 2, False))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="each of 9 samples once, got Pairs, so that some may be evaluated twice"):
        assert without_repeats(loader, stage("validating")) is loader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = DataLoader(range(9), batch_sampler=Pairs(SequentialSampler(range(9)), 2, False))  # type: ignore[arg-type]
        assert without_repeats(plain, stage("validating")) is plain


class InChunks(DistributedSampler):
    """A sampler that deals a chunk of consecutive samples to each rank, so that the repeated ones are one rank's."""

    def __iter__(self):
        indices = [index % len(self.dataset) for index in range(self.total_size)]  # type: ignore[arg-type]
        return iter(indices[self.rank * self.num_samples :][: self.num_samples])


def test_a_sampler_with_its_own_order_is_warned_of():
    loader = DataLoader(range(10), sampler=InChunks(range(10), 4, 3, shuffle=False))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="each of 10 samples once, got InChunks, so that some may be evaluated twice"):
        assert without_repeats(loader, stage("validating")) is loader


def test_what_lightning_and_an_exact_resume_set_reaches_the_loader(monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    changed = without_repeats(dealt_loader(), stage("validating"))
    _auto_add_worker_init_fn(changed, 0)
    give_generator(changed)
    before = torch.get_rng_state()
    iter(changed.loader)
    assert torch.equal(torch.get_rng_state(), before), "a validation must not draw from the training's stream"
    assert changed.loader.worker_init_fn is not None


def test_a_second_trainer_gets_a_loader_of_its_own():
    first = without_repeats(dealt_loader(), stage("validating"))
    trainer = stage("testing")
    second = without_repeats(first, trainer)
    assert second._trainer() is trainer
    assert second.loader is first.loader
