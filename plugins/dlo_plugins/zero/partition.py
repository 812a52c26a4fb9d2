"""Who holds what: the arithmetic of ZeRO's partition.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054.

The parameters of a group stand one after the other in a flat buffer, which is cut into as many equal segments as
there are ranks: rank r owns segment r, whatever parameters it cuts through. That is exactly 1/N for each rank, but for
the few elements by which parameters and segments begin where an accelerator's kernels read them fastest, and right for
every optimizer that treats each element by itself. One that needs a whole tensor (its norm, its rows, its
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
        align: parameters and segments begin at multiples of so many elements.
    """

    numels: tuple[int, ...]
    ranks: int
    align: int = 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the buffer, and where the last one's room ends."""
        return (0, *itertools.accumulate(self._aligned(numel) for numel in self.numels))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where each parameter begins and ends in the buffer."""
        return tuple((start, start + numel) for start, numel in zip(self.starts, self.numels, strict=False))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where what is no parameter's begins and ends in the buffer."""
        ends = (end for _, end in self.places)
        between = zip(ends, self.starts[1:], strict=True)
        return tuple((low, high) for low, high in (*between, (self.starts[-1], self.padded)) if low < high)

    @cached_property
    def _runs(self) -> list[tuple[int, int, bool]]:
        """Where each run of the buffer begins and ends, and whether it is a gap, in order."""
        runs = [(*place, False) for place in self.places] + [(*gap, True) for gap in self.gaps]
        return sorted(runs, key=lambda run: (run[0], run[1]))

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths of the buffer's runs, parameters and gaps, in order."""
        return [end - start for start, end, _ in self._runs]

    @cached_property
    def filled(self) -> list[int]:
        """Which of the runs is each parameter's."""
        return [number for number, (*_, gap) in enumerate(self._runs) if not gap]

    @cached_property
    def padding(self) -> list[int]:
        """Which of the runs are gaps."""
        return [number for number, (*_, gap) in enumerate(self._runs) if gap]

    @cached_property
    def segment(self) -> int:
        """Elements of a segment; the last ones are padded where the ranks do not divide the parameters."""
        return self._aligned(-(-self.starts[-1] // self.ranks))

    @cached_property
    def padded(self) -> int:
        """Elements of the buffer."""
        return self.segment * self.ranks

    def pieces(self, rank: int) -> list[Piece]:
        """Returns what a rank owns, in the order of the buffer."""
        return pieces_within(self.places, rank * self.segment, (rank + 1) * self.segment)

    def _aligned(self, count: int) -> int:
        return -(-count // self.align) * self.align


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
