"""Queues of bundles on one direction of a link, for many states at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LinkQueues:
    """Bundles that a link copies one after another, of which each stays in memory until it is copied as a whole.

    A queue has a fixed number of places, the oldest bundle first; a place without a bundle has 0 bytes.

    Attributes:
        left: Bytes that the link has yet to copy until each bundle is copied, ascending, [places, states].
        sizes: Bytes of each bundle, [places, states].
    """

    left: np.ndarray
    sizes: np.ndarray

    @classmethod
    def empty(cls, places: int) -> LinkQueues:
        """Returns one queue without bundles."""
        return cls(np.zeros((places, 1)), np.zeros((places, 1)))

    @property
    def held(self) -> np.ndarray:
        """Bytes in memory once all bundles before each place are copied, and once all are, [places + 1, states]."""
        sums = np.cumsum(self.sizes[::-1], axis=0)[::-1]
        return np.concatenate([sums, np.zeros_like(sums[:1])])

    @property
    def total(self) -> np.ndarray:
        """Bytes that the link has yet to copy, [states]."""
        return self.left[-1]

    def take(self, index: Any) -> LinkQueues:
        """Returns some of the queues: those of an index or a mask."""
        return LinkQueues(self.left[:, index], self.sizes[:, index])

    def bytes_until(self, free: np.ndarray) -> np.ndarray:
        """Returns the bytes to copy until no more than `free` bytes are held, [states]; `free` is at least 0."""
        return (self.left * (self.held[:-1] > free)).max(axis=0)

    def copy(self, count: np.ndarray) -> LinkQueues:
        """Returns the queues after the link has copied some bytes of each, [states]."""
        left = np.maximum(0.0, self.left - count)
        return LinkQueues(left, self.sizes * (left > 0))

    def append(self, size: np.ndarray) -> LinkQueues:
        """Returns the queues with one more bundle each, [states].

        Where all places have a bundle, the two oldest become one, which is held until both are copied.
        """
        left = np.concatenate([self.left[1:], (self.total + size)[None]])
        sizes = np.concatenate([self.sizes[1:], np.broadcast_to(size, self.total.shape)[None]])
        sizes[0] += self.sizes[0]
        return LinkQueues(left, sizes)

    @staticmethod
    def concat(items: list[LinkQueues]) -> LinkQueues:
        """Returns all queues of several sets."""
        left = np.concatenate([item.left for item in items], axis=1)
        return LinkQueues(left, np.concatenate([item.sizes for item in items], axis=1))
