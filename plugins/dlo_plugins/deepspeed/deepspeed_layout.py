"""Layout of DeepSpeed's partitions: the slices of the parameters that each rank holds.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054; in the layout of DeepSpeed (0.15 to 0.19).

- Stages 1 and 2: the parameters of an optimizer's group are concatenated in a flat buffer, perhaps in another order
  (``round_robin_gradients``) or with gaps (``parameter_alignment``). Its length is rounded up to an even number of
  elements for each rank, and each rank holds one of as many equal segments.
- Stage 3: every parameter is split by itself into as many equal segments as there are ranks, the last ones padded. A
  rank's segments of the parameters of a sub-group are concatenated, padding included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlo_plugins.sharding.flat_slices import FlatSlice, find_flat_slices

#: Segments of stages 1 and 2 begin at a multiple of this number of elements: NCCL's 4 bytes in half precision.
ALIGNMENT = 2


@dataclass(frozen=True)
class Stage12Layout:
    """Layout of a group's parameters in the flat buffer of stages 1 and 2.

    Attributes:
        numels: Number of elements of each parameter, in the buffer's order.
        ranks: Number of segments of the buffer, one for each rank.
        aligned: Number of elements to whose multiples parameters are aligned (``parameter_alignment``); 1 leaves no
            gaps.
    """

    numels: tuple[int, ...]
    ranks: int
    aligned: int = 1

    @property
    def starts(self) -> list[int]:
        """The offset of each parameter in the buffer, in elements."""
        found, at = [], 0
        for numel in self.numels:
            found.append(at)
            at += numel
            at += -at % self.aligned
        return found

    @property
    def segment(self) -> int:
        """The number of elements of a rank's segment, padding included."""
        held = self.starts[-1] + self.numels[-1] if self.numels else 0
        unit = ALIGNMENT * self.ranks
        return math.ceil(held / unit) * unit // self.ranks

    def slices(self, rank: int) -> list[FlatSlice]:
        """Returns the slices of the parameters in a rank's segment, in the order of the buffer."""
        places = ((start, start + numel) for start, numel in zip(self.starts, self.numels, strict=True))
        return find_flat_slices(places, rank * self.segment, (rank + 1) * self.segment)


@dataclass(frozen=True)
class Stage3Layout:
    """Layout of a sub-group's parameters in stage 3.

    Attributes:
        numels: Number of elements of each parameter, in order.
        ranks: Number of segments of each parameter, one for each rank.
    """

    numels: tuple[int, ...]
    ranks: int

    @property
    def segments(self) -> list[int]:
        """The number of elements of each parameter's segment, padding included."""
        return [math.ceil(numel / self.ranks) for numel in self.numels]

    def slices(self, rank: int) -> list[FlatSlice]:
        """Returns the slices of the parameters on a rank, in the order of its flat partition, without the padding."""
        found, at = [], 0
        for number, (numel, segment) in enumerate(zip(self.numels, self.segments, strict=True)):
            first, last = min(rank * segment, numel), min((rank + 1) * segment, numel)
            if first < last:
                found.append(FlatSlice(number, first, last - first, at))
            at += segment
        return found
