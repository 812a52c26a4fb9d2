"""The options of data from several sources: weights, shuffle, length of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dlo_framework.data.hashing import hash64
from dlo_framework.data.mixture import Mixture, MixtureOrder, Ramp, read_points
from dlo_framework.data.order import BufferShuffle, GlobalShuffle, SampleOrder
from dlo_framework.errors import DloError

ShuffleName = Literal["global", "buffer"]


class MixOptions(NamedTuple):
    """How sources are mixed and shuffled.

    Attributes:
        mix: Value of the option; see :func:`dlo_framework.data.mixture.read_points`.
        ramp: Change of the weights between two moments.
        shuffle: Shuffle inside a source: ``global`` or ``buffer``.
        chunk: Number of samples that stay together, under ``buffer``.
        buffer: Number of samples that are shuffled together, under ``buffer``.
        epoch_samples: Number of samples per epoch; None for those of all sources.
    """

    mix: Any
    ramp: Ramp
    shuffle: ShuffleName
    chunk: int
    buffer: int
    epoch_samples: int | None

    def order(self, names: Sequence[str], sizes: Sequence[int], seed: int) -> MixtureOrder:
        """Returns the order of the samples of all sources.

        Args:
            names: Names of the sources.
            sizes: Number of samples of each source.
            seed: Seed of the run's order.
        """
        mixture = Mixture(names, read_points(self.mix, names, sizes), self.ramp)
        seeds = (hash64(np.arange(len(names)), seed) >> np.uint64(1)).tolist()
        orders = [self._order_of(size, own) for size, own in zip(sizes, seeds, strict=True)]
        return MixtureOrder(mixture, orders, self.epoch_samples)

    def _order_of(self, size: int, seed: int) -> SampleOrder:
        if self.shuffle == "global":
            return GlobalShuffle(size, seed)
        return BufferShuffle(size, seed, chunk=self.chunk, buffer=self.buffer)

    def check(self, names: Sequence[str]) -> None:
        """Checks the options before files are opened.

        Raises:
            DloError: If weights are invalid, or a size is out of range.
        """
        if self.epoch_samples is not None and self.epoch_samples < 1:
            raise DloError(f"epoch_samples must be at least 1, got {self.epoch_samples}; leave it out for all samples")
        self.order(names, [1] * len(names), 0)
