"""Order of the samples as a pure function of (seed, epoch), independent of ranks, workers and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import SequentialSampler

from dlo_framework.data.order import SampleOrder, hash64
from dlo_framework.errors import DloError, check_number

VOID = -1
"""Deprecated: the target that earlier versions gave to samples which only padded a batch. No batch is padded now."""

_ORDER, _AUGMENT = 1, 2  # stream of random numbers that a hash belongs to


class Draw(NamedTuple):
    """Sample to load.

    Attributes:
        index: Index of the item in the dataset.
        seed: Seed of every random choice for this sample; 0 <= seed < 2**63. It is a function of (sampler seed, epoch,
            index, repeat, earlier passes over the source) alone.
        real: False for the one draw of a rank that has no sample in a batch. The loader does not pass such a draw on:
            every draw that a dataset receives is real.
        size: (height, width) of the image to make of it, equal for all draws of a batch; None for the dataset's own.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which a draw does not need
    seed: int
    real: bool
    size: tuple[int, int] | None = None


class Position(NamedTuple):
    """Position in training, between two batches.

    Attributes:
        epoch: Index of the epoch, from 0.
        samples: Number of the epoch's samples before it, over all ranks.
        size: Number of samples in the dataset.
    """

    epoch: int
    samples: int
    size: int

    @property
    def epochs(self) -> float:
        """The number of epochs before it: 2.5 in the middle of the third."""
        return self.epoch + self.samples / self.size


class Window(NamedTuple):
    """Batches of one optimizer step.

    Attributes:
        batch_size: Number of samples in each batch, over all ranks.
        batches: Number of batches.
    """

    batch_size: int
    batches: int


class Span(NamedTuple):
    """Samples of one batch, in the epoch's order.

    Attributes:
        start: Index of the first sample, over all ranks.
        stop: Index after the last sample.
        first: Index, in the epoch, of the first batch of this batch's window.
        batches: Number of batches in the window; fewer than planned at the end of the epoch.
    """

    start: int
    stop: int
    first: int
    batches: int


class ResumableBatchSampler:
    """Yields this rank's share of each global batch, from any position in an epoch.

    The epoch's order is divided into global batches of ``batch_size * world_size`` samples, and rank r takes the r-th
    slice of each. So the samples of an optimizer step do not depend on the number of ranks as long as the global batch
    stays the same, and "n samples into epoch e" means the same for any number of ranks.

    Args:
        size: Number of items in the dataset.
        batch_size: Number of samples per batch on one rank.
        shuffle: True for a new random order each epoch (training), False for the dataset's own (evaluation).
        seed: Seed of the order and of all draws; equal on all ranks.
        rank: This process's index among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        drop_last: True for training, where every rank must have full batches: up to one global batch less one sample is
            left out of each epoch, other samples each time. False for evaluation, where each sample occurs exactly
            once. All ranks then have equally many batches, and the last global batch is divided evenly: the ranks'
            shares of it differ by one sample at most. If it has fewer samples than there are ranks, it takes some from
            the batch before. If that batch has none to spare, a rank without a sample gets one draw whose ``real`` is
            False.
        repeats: Number of differently augmented copies of an image in a batch (repeated augmentation, Hoffer et al.
            2020, arXiv:1901.09335; DeiT-3 uses 3). The epoch keeps its length, so it then visits ``1 / repeats`` of the
            images.
        window_at: Function that plans an optimizer step from its position, in training whose batch size changes; each
            of its batches must be divisible by the ranks. If less than a batch is left, the epoch ends. It is called
            once an epoch for all steps, from the epoch's start. None for ``batch_size`` throughout.
        image_size_at: Function from a batch's position to the height and width of its images; None for the dataset's
            own.
        order: Order of the samples in each epoch, computed position by position, for data whose order does not fit in
            memory, or that is mixed from several sources. None sorts hashes of all indices. Without ``shuffle``, each
            epoch has the order of the first.

    Raises:
        DloError: for sizes that give no batch at all, and for a rank outside the world size.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool,
        repeats: int = 1,
        window_at: Callable[[Position], Window] | None = None,
        image_size_at: Callable[[Position], int] | None = None,
        order: SampleOrder | None = None,
    ) -> None:
        assert order is None or order.size == size
        check_number("batch_size", batch_size, "at least 1")
        check_number("repeats", repeats, "at least 1")
        if not 0 <= rank < world_size:
            raise DloError(f"rank must be in 0..world_size-1, got rank {rank} of world size {world_size}")
        if size < 1:
            raise DloError("the dataset must have at least one sample, got none")
        if drop_last and size < batch_size * world_size:
            fix = f"set a global batch size of at most {size // world_size * world_size}"
            if size < world_size:
                fix = f"use at most {size} data-parallel ranks"
            raise DloError(
                f"the training set must fill one global batch of {batch_size * world_size} samples "
                f"({batch_size} on each of {world_size} ranks), got {size}; {fix}"
            )
        self.size = size
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.repeats = repeats
        self.window_at = window_at
        self.image_size_at = image_size_at
        self.order = order
        self.epoch = 0
        #: Whether a last batch of fewer samples than ranks takes some from the batch before.
        self.evens_out = not drop_last
        #: Function that reorders an epoch: it gets the shuffled indices and the epoch, and returns a permutation.
        self.order_at: Callable[[np.ndarray, int], np.ndarray] | None = None
        self._planned: tuple[int, list[Span]] | None = None

    @property
    def global_batch_size(self) -> int:
        """The number of samples per batch over all data-parallel ranks, if it does not change."""
        return self.batch_size * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, and plans its windows."""
        self.epoch = epoch
        self._planned = None

    def __len__(self) -> int:
        """The number of batches in a full epoch, the same on every rank."""
        if self.window_at is not None:
            return len(self.planned())
        full, tail = divmod(self.size, self.global_batch_size)
        return full if self.drop_last or not tail else full + 1

    def __iter__(self) -> Iterator[list[Draw]]:
        return self.batches_from(0)

    @property
    def leaves_ranks_out(self) -> bool:
        """Whether a batch has fewer samples than there are ranks: in evaluation of few samples, or one by one."""
        return not self.drop_last and any(stop - start < self.world_size for start, stop in self.spans_from(0))

    def planned(self) -> list[Span]:
        """Returns the batches of the current epoch, if windows are planned."""
        assert self.window_at is not None
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, plan_epoch(self.window_at, self.epoch, self.size))
        return self._planned[1]

    def spans_from(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yields (start, stop) of each batch of the current epoch, after the first ``samples`` samples."""
        if self.window_at is not None:
            yield from ((span.start, span.stop) for span in self.planned() if span.start >= samples)
            return
        step, start = self.global_batch_size, samples
        while start < self.size:
            left = self.size - start
            if left < step and self.drop_last:
                return
            stop = start + min(step, left)
            if self.evens_out and 0 < left - step < self.world_size:  # too few for the next batch
                stop -= min(self.world_size - (left - step), step - self.world_size)
            yield start, stop
            start = stop

    def batches_from(self, samples: int) -> Iterator[list[Draw]]:
        """Yields this rank's batches of the current epoch, after the first ``samples`` of the global order."""
        draws_between = self._draw_function()
        for start, stop in self.spans_from(samples):
            share, over = divmod(stop - start, self.world_size)  # only evaluation's last batches have a remainder
            first = start + self.rank * share + min(self.rank, over)
            last = first + share + (self.rank < over)
            side = self.image_size_at and self.image_size_at(Position(self.epoch, start, self.size))
            size = (side, side) if side else None
            real = last > first
            indices, seeds = draws_between(first, last) if real else draws_between(start, start + 1)
            yield [Draw(index, seed, real, size) for index, seed in zip(indices.tolist(), seeds.tolist(), strict=True)]

    def draws_at(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the dataset indices and the draws' seeds at some positions of ``order``, both int64 [P]."""
        assert self.order is not None
        repeat = positions % self.repeats
        placed = self.order.place(epoch if self.shuffle else 0, positions // self.repeats)
        return placed.sample, self._seeds(placed.sample, epoch, placed.copy * self.repeats + repeat)

    def _draw_function(self) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
        """Returns a function that returns the indices and seeds between two positions of the current epoch."""
        if self.order is not None:
            epoch = self.epoch
            return lambda first, last: self.draws_at(epoch, np.arange(first, last))
        indices, seeds = self._epoch_draws()
        return lambda first, last: (indices[first:last], seeds[first:last])

    def _epoch_draws(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epoch's dataset indices and the draws' seeds, both int64 of shape [size]."""
        indices = np.arange(self.size)
        if self.shuffle:
            indices = np.argsort(hash64(indices, self.seed, self.epoch, _ORDER), kind="stable")
            if self.order_at is not None:
                indices = self.order_at(indices, self.epoch)
        copy = np.zeros_like(indices)
        if self.repeats > 1:
            copy = np.arange(self.size) % self.repeats
            indices = np.repeat(indices, self.repeats)[: self.size]
        return indices, self._seeds(indices, self.epoch, copy)

    def _seeds(self, indices: np.ndarray, epoch: int, copy: np.ndarray) -> np.ndarray:
        seeds = hash64(hash64(indices, self.seed, epoch, _AUGMENT) + copy.astype(np.uint64))
        return (seeds >> np.uint64(1)).astype(np.int64)


def plan_epoch(window_at: Callable[[Position], Window], epoch: int, size: int) -> list[Span]:
    """Returns the batches of an epoch of ``size`` samples, window by window.

    The last window has fewer batches if the epoch ends in it; less than a batch is left out.
    """
    spans: list[Span] = []
    start = 0
    while True:
        window = window_at(Position(epoch, start, size))
        batches = min(window.batches, (size - start) // window.batch_size)
        if batches < 1:
            return spans
        first = len(spans)
        for _ in range(batches):
            spans.append(Span(start, start + window.batch_size, first, batches))
            start += window.batch_size


class InOrderBatchSampler(ResumableBatchSampler, SequentialSampler):  # type: ignore[misc]
    """A :class:`ResumableBatchSampler` without shuffling, which Lightning recognises as such.

    ``Trainer(overfit_batches=...)`` and Lightning's warnings about shuffled validation data test whether a sampler is a
    ``SequentialSampler``.
    """
