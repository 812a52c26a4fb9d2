"""Slices of the parameters that a rank's segment of their flat buffer holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
    found = []
    for number, (start, stop) in enumerate(places):
        first, last = max(start, low), min(stop, high)
        if first < last:
            found.append(FlatSlice(number, first - start, last - first, first - low))
    return found
