"""Slices of the parameters that a rank's segment of their flat buffer holds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class FlatSlice:
    """Slice of a parameter's elements in a rank's flat partition.

    Attributes:
        parameter: Index of the parameter in its group.
        start: First element of the slice in the flattened parameter.
        length: Number of elements.
        offset: Offset of the slice in the rank's partition, in elements.
    """

    parameter: int
    start: int
    length: int
    offset: int


def find_flat_slices(places: Iterable[tuple[int, int]], low: int, high: int) -> list[FlatSlice]:
    """Returns the slices of the parameters that lie in a segment of their buffer, in its order.

    Args:
        places: Begin and end of each parameter in the buffer, in elements.
        low: Begin of the segment.
        high: End of the segment.
    """
    slices = []
    for number, (start, stop) in enumerate(places):
        first, last = max(start, low), min(stop, high)
        if first < last:
            slices.append(FlatSlice(number, first - start, last - first, first - low))
    return slices


@dataclass(frozen=True)
class FlatPartition:
    """Partition of a flat buffer of parameters into equal segments.

    Attributes:
        numels: Number of elements of each parameter, in order.
        ranks: Number of ranks, which is the number of segments.
        align: Alignment in elements; parameters and segments begin at its multiples.
    """

    numels: tuple[int, ...]
    ranks: int
    align: int = 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each parameter in the buffer, and the end of the last one with its padding."""
        return (0, *itertools.accumulate(self._aligned(numel) for numel in self.numels))

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the buffer's runs: each parameter and the padding after it, which may have none, in turn."""
        ends = (*self.starts[1:-1], self.padded)
        runs = zip(self.numels, self.starts, ends, strict=False)
        return [length for numel, start, end in runs for length in (numel, end - start - numel)]

    @cached_property
    def segment(self) -> int:
        """Number of elements of a segment, padding included."""
        return self._aligned(-(-self.starts[-1] // self.ranks))

    @property
    def padded(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.segment * self.ranks

    def pieces(self, rank: int) -> list[FlatSlice]:
        """Returns the pieces of parameters that a rank owns, in the order of the buffer."""
        places = ((start, start + numel) for start, numel in zip(self.starts, self.numels, strict=False))
        return find_flat_slices(places, rank * self.segment, (rank + 1) * self.segment)

    def _aligned(self, count: int) -> int:
        return -(-count // self.align) * self.align


def assign_balanced(numels: list[int], ranks: int) -> list[int]:
    """Assigns full tensors to ranks so that the largest load is small; returns each tensor's owner.

    The longest-processing-time rule (Graham 1969): largest first, each to the rank with the smallest load. The largest
    load is at most 4/3 of the optimum. Ties go to the lower rank, so that all ranks compute the same result.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(numels)
    for number in sorted(range(len(numels)), key=lambda n: (-numels[n], n)):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + numels[number], rank))
    return owners
