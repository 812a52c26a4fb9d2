"""What of a group of parameters, one after the other in a flat buffer, lies in a rank's segment of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements in a rank's flat partition.

    Attributes:
        parameter: the parameter's number in its group.
        start: the piece's first element in the flattened parameter.
        length: how many elements.
        offset: where the piece stands in the rank's partition.
    """

    parameter: int
    start: int
    length: int
    offset: int


def pieces_within(places: Iterable[tuple[int, int]], low: int, high: int) -> list[Piece]:
    """Returns what of parameters lies in a segment of their buffer, in its order.

    Args:
        places: where each parameter begins and ends in the buffer.
        low: where the segment begins.
        high: where it ends.
    """
    found = []
    for number, (start, stop) in enumerate(places):
        first, last = max(start, low), min(stop, high)
        if first < last:
            found.append(Piece(number, first - start, last - first, first - low))
    return found
