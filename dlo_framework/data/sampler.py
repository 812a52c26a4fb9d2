"""Order of the samples as a pure function of (seed, epoch), independent of ranks, workers and restarts.

The default order of :class:`ResumableBatchSampler` sorts one hash per sample, which takes gigabytes for a billion
samples. A :class:`SampleOrder` takes a position in an epoch and returns the sample, in constant memory:

* :class:`GlobalShuffle`: any sample at any position, for data with random access.
* :class:`BufferShuffle`: neighbours stay near each other, for data that is fetched in blocks.
* :class:`InOrder`: the dataset's own order.
* :class:`dlo_framework.data.mixture.MixtureOrder`: several sources with weights.

:class:`Permutation` is a balanced Feistel network on the integers below the next power of four; values outside the size
are mapped again until they fall inside it (cycle walking: Black & Rogaway 2002, "Ciphers with Arbitrary Finite
Domains"). The round function is :func:`hash64`. Four rounds make a pseudorandom permutation
of a random function (Luby & Rackoff 1988); small domains need more, so that there are six.

Random numbers are hashes of integers, and no generator is advanced. A generator's next number depends on the number of
earlier calls, and so on the number of workers, on the rank and on where a run was stopped. A hash of (seed, epoch,
index) depends on those three alone. The hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable
pseudorandom number generators"), applied once per key; it is implemented here, so that no library's new version changes
the order of anyone's data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from torch.utils.data import SequentialSampler

from dlo_framework.errors import DloError, check_number

_GLOBAL, _CHUNKS, _BUFFER = 11, 12, 13  # streams of random numbers


class Placed(NamedTuple):
    """Samples at some positions of an epoch.

    Attributes:
        sample: Indices of the samples in the dataset, int64 [P].
        copy: Number of earlier occurrences of each sample since the beginning of the run that its epoch does not
            count, int64 [P]. Random choices of a draw depend on it.
    """

    sample: np.ndarray
    copy: np.ndarray


class SampleOrder(Protocol):
    """Order of a dataset's samples in each epoch."""

    size: int
    """Number of samples per epoch."""

    def place(self, epoch: int, positions: np.ndarray) -> Placed:
        """Returns the samples at ``positions``, int64 [P] in 0..size - 1, of an epoch."""


class InOrder:
    """The dataset's own order, in each epoch.

    Args:
        size: Number of samples.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def place(self, epoch: int, positions: np.ndarray) -> Placed:
        """Returns the positions themselves."""
        return Placed(positions.astype(np.int64), np.zeros(len(positions), np.int64))


class GlobalShuffle:
    """Another permutation of all samples in each epoch.

    Args:
        size: Number of samples.
        seed: Seed of the permutations.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def place(self, epoch: int, positions: np.ndarray) -> Placed:
        """Returns the samples at these positions."""
        index = Permutation(self.size, self.seed, epoch, _GLOBAL)(positions)
        return Placed(index, np.zeros(len(positions), np.int64))


class BufferShuffle:
    """Shuffles chunks of neighbours, and then samples inside a buffer of several chunks.

    It is what a shuffle buffer does to a stream of shards, but as a function of the position: readers fetch a chunk
    once, and resuming needs no state of the buffer. Samples of one buffer come from ``buffer // chunk`` random places.

    Args:
        size: Number of samples.
        seed: Seed of the order.
        chunk: Number of neighbouring samples that stay together, usually those of a few blocks of a remote file.
        buffer: Number of samples that are shuffled together; a larger one is nearer to a global shuffle.

    Raises:
        DloError: If ``chunk`` or ``buffer`` is out of range.
    """

    def __init__(self, size: int, seed: int, *, chunk: int, buffer: int) -> None:
        check_number("chunk", chunk, "at least 1 sample", "use 256")
        if buffer < chunk:
            raise DloError(
                f"buffer must have at least one chunk of {chunk} samples, got {buffer}; set it to {4 * chunk}"
            )
        self.size, self.seed, self.chunk, self.buffer = size, seed, chunk, buffer

    def place(self, epoch: int, positions: np.ndarray) -> Placed:
        """Returns the samples at these positions."""
        positions = positions.astype(np.int64)
        shuffled = np.empty_like(positions)
        for number in np.unique(positions // self.buffer).tolist():
            chosen = positions // self.buffer == number
            start = number * self.buffer
            length = min(self.buffer, self.size - start)
            within = Permutation(length, self.seed, epoch, _BUFFER, number)
            shuffled[chosen] = start + within(positions[chosen] - start)
        chunks = self.size // self.chunk  # The rest, less than a chunk, stays at the end.
        index = shuffled
        if chunks:
            inside = shuffled < chunks * self.chunk
            order = Permutation(chunks, self.seed, epoch, _CHUNKS)
            moved = order(shuffled[inside] // self.chunk) * self.chunk + shuffled[inside] % self.chunk
            index = shuffled.copy()
            index[inside] = moved
        return Placed(index, np.zeros(len(positions), np.int64))


_ROUNDS = 6


class Permutation:
    """Permutation of ``0 .. size - 1``, selected by keys; any element is computed without the others.

    Args:
        size: Number of elements, at least 1 and below 2**62.
        keys: Integers that select the permutation, such as (seed, epoch).
    """

    def __init__(self, size: int, *keys: int) -> None:
        assert 1 <= size < 1 << 62
        self.size, self.keys = size, keys
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)

    def __len__(self) -> int:
        return self.size

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Returns the images of ``index``, int64 of its shape.

        Args:
            index: Integers of any shape, each below ``size``.
        """
        permuted = self._encrypt(np.asarray(index).astype(np.uint64))
        while True:  # The domain is less than four times the size: few elements are left after a few rounds.
            outside = permuted >= np.uint64(self.size)
            if not outside.any():
                return permuted.astype(np.int64)
            permuted[outside] = self._encrypt(permuted[outside])

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (hash64(right, *self.keys, number) & self._mask)
        return (left << self._half) | right


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def _scramble(x: np.ndarray) -> np.ndarray:
    x = x + _GOLDEN  # arrays of unsigned integers wrap silently, as a hash needs
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLY_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLY_2
    return x ^ (x >> np.uint64(31))


def hash64(values: np.ndarray, *keys: int) -> np.ndarray:
    """Returns a well-mixed 64-bit hash of each value, under the given keys.

    Args:
        values: Integers of any shape and integer type.
        keys: Further integers to hash with, such as (seed, epoch); their order matters.

    Returns:
        ``uint64`` array of ``values``' shape.
    """
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = _scramble(state ^ np.array([key & _WORD], dtype=np.uint64))
    return _scramble(values.astype(np.uint64) ^ state)


def uniform(values: np.ndarray, *keys: int) -> np.ndarray:
    """Returns a number in [0, 1) for each value: the top 53 bits of :func:`hash64` as ``float64``."""
    return (hash64(values, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


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
