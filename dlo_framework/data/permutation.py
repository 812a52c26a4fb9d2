"""Keyed permutation of the integers below a size, without an array of them.

A balanced Feistel network permutes the integers below the next power of four, and values outside the size are mapped
again until they fall inside it (cycle walking: Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). The
round function is :func:`dlo_framework.data.hashing.hash64`. Four rounds make a pseudorandom permutation of a random
function (Luby & Rackoff 1988); small domains need more, so that there are six.
"""

from __future__ import annotations

import numpy as np

from dlo_framework.data.hashing import hash64

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
