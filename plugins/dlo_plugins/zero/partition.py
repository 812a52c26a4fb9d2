"""Who holds what: the arithmetic of ZeRO's partition.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054.

The parameters of a group stand one after the other in a flat buffer, which is cut into as many equal segments as
there are ranks: rank r owns segment r, whatever parameters it cuts through. That is exactly 1/N for each rank, and
right for every optimizer that treats each element by itself. One that needs a whole tensor (its norm, its rows, its
singular values) gets whole tensors, dealt out so that the ranks' loads are balanced.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import cached_property

from dlo_framework.checkpoint.pieces import Piece, pieces_within


@dataclass(frozen=True)
class FlatPartition:
    """A flat buffer of parameters, cut into equal segments.

    Attributes:
        numels: elements of each parameter, in order.
        ranks: how many segments.
    """

    numels: tuple[int, ...]
    ranks: int

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the buffer, and where the last one ends."""
        return (0, *itertools.accumulate(self.numels))

    @property
    def segment(self) -> int:
        """Elements of a segment; the last ones are padded where the ranks do not divide the parameters."""
        return -(-self.starts[-1] // self.ranks)

    @property
    def padded(self) -> int:
        """Elements of the buffer."""
        return self.segment * self.ranks

    def pieces(self, rank: int) -> list[Piece]:
        """Returns what a rank owns, in the order of the buffer."""
        return pieces_within(itertools.pairwise(self.starts), rank * self.segment, (rank + 1) * self.segment)


def balance(numels: list[int], ranks: int) -> list[int]:
    """Deals whole tensors out to ranks so that the largest load is small; returns each tensor's owner.

    The longest-processing-time rule (Graham 1969): largest first, each to the rank with the least so far, which is
    at most 4/3 of the best there is. Ties go to the lower rank, so that all ranks find the same.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(numels)
    for number in sorted(range(len(numels)), key=lambda n: (-numels[n], n)):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + numels[number], rank))
    return owners
