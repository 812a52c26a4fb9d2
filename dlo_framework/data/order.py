"""Orders of the samples of data at scale: pure functions from a position in an epoch to a sample, without arrays.

The default order of :class:`dlo_framework.data.sampler.ResumableBatchSampler` sorts one hash per sample, which takes
gigabytes for a billion samples. The orders here take a position and return the sample, in constant memory:

* :class:`GlobalShuffle`: any sample at any position, for data with random access.
* :class:`BufferShuffle`: neighbours stay near each other, for data that is fetched in blocks.
* :class:`InOrder`: the dataset's own order.
* :class:`dlo_framework.data.mixture.MixtureOrder`: several sources with weights.

:class:`Permutation` is a balanced Feistel network on the integers below the next power of four; values outside the size
are mapped again until they fall inside it (cycle walking: Black & Rogaway 2002, "Ciphers with Arbitrary Finite
Domains"). The round function is :func:`dlo_framework.data.order.hash64`. Four rounds make a pseudorandom permutation
of a random function (Luby & Rackoff 1988); small domains need more, so that there are six.

Random numbers are hashes of integers, and no generator is advanced. A generator's next number depends on the number of
earlier calls, and so on the number of workers, on the rank and on where a run was stopped. A hash of (seed, epoch,
index) depends on those three alone. The hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable
pseudorandom number generators"), applied once per key; it is implemented here, so that no library's new version changes
the order of anyone's data.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

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
        found = self._encrypt(np.asarray(index).astype(np.uint64))
        while True:  # The domain is less than four times the size: few elements are left after a few rounds.
            outside = found >= np.uint64(self.size)
            if not outside.any():
                return found.astype(np.int64)
            found[outside] = self._encrypt(found[outside])

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
