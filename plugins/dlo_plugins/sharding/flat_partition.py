"""Computes which rank owns which elements of ZeRO's flat buffers.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054.

The parameters of a group are concatenated in a flat buffer, which is cut into one equal segment per rank: rank r owns
segment r, which may begin and end inside a parameter. Each rank owns exactly 1/N, except for the few elements of
padding that align parameters and segments for an accelerator's kernels. This suits every elementwise optimizer. An
optimizer that needs full tensors (their norm, rows or singular values) gets full tensors, assigned to ranks so that
the loads are balanced.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import cached_property

from dlo_plugins.sharding.flat_slices import FlatSlice, find_flat_slices


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
    def places(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each parameter in the buffer."""
        return tuple((start, start + numel) for start, numel in zip(self.starts, self.numels, strict=False))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each run of padding in the buffer."""
        ends = (end for _, end in self.places)
        between = zip(ends, self.starts[1:], strict=True)
        return tuple((low, high) for low, high in (*between, (self.starts[-1], self.padded)) if low < high)

    @cached_property
    def _runs(self) -> list[tuple[int, int, bool]]:
        """Start and end of each run of the buffer, and whether it is a gap, in order."""
        runs = [(*place, False) for place in self.places] + [(*gap, True) for gap in self.gaps]
        return sorted(runs, key=lambda run: (run[0], run[1]))

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the buffer's runs, parameters and gaps, in order."""
        return [end - start for start, end, _ in self._runs]

    @cached_property
    def filled(self) -> list[int]:
        """Index of each parameter's run."""
        return [number for number, (*_, gap) in enumerate(self._runs) if not gap]

    @cached_property
    def padding(self) -> list[int]:
        """Indices of the runs that are gaps."""
        return [number for number, (*_, gap) in enumerate(self._runs) if gap]

    @cached_property
    def segment(self) -> int:
        """Number of elements of a segment, padding included."""
        return self._aligned(-(-self.starts[-1] // self.ranks))

    @cached_property
    def padded(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.segment * self.ranks

    def pieces(self, rank: int) -> list[FlatSlice]:
        """Returns the pieces of parameters that a rank owns, in the order of the buffer."""
        return find_flat_slices(self.places, rank * self.segment, (rank + 1) * self.segment)

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
