"""Division of a tensor among ranks: pure arithmetic, without a process group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlo_framework.errors import DloError
from dlo_framework.shards import TensorSlice


@dataclass(frozen=True)
class Division:
    """Division of a tensor among ranks along one dim.

    Attributes:
        dim: Dimension that is divided.
        pieces: Sizes of the consecutive slices along it, such as queries, keys and values; each slice is divided among
            the ranks.
    """

    dim: int
    pieces: tuple[int, ...]

    def slice_for(self, ranks: int, rank: int) -> TensorSlice:
        """Returns a rank's slice."""
        runs, at = [], 0
        for size in self.pieces:
            first, count = local_range(size, ranks, rank)
            runs.append((at + first, count))
            at += size
        return TensorSlice(self.dim, at, tuple(runs))


def local_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns a rank's range of a size, `(first, count)`; if it is not divisible, the first ranks have one more."""
    least, more = divmod(size, ranks)
    return rank * least + min(rank, more), least + (rank < more)


@dataclass(frozen=True)
class Divisibility:
    """Count that must be divisible by the number of ranks.

    Attributes:
        owner: Name of the module with the counted items.
        count: Number of items.
        what: Kind of the items, in the plural.
    """

    owner: str
    count: int
    what: str


def check_divisibility(demands: Iterable[Divisibility], tp: int) -> None:
    """Checks that all counts are divisible by the number of ranks.

    Raises:
        DloError: If one is not; the message has the sizes of the axis that divide all of them.
    """
    demands = list(demands)
    common = math.gcd(*(demand.count for demand in demands))
    for demand in demands:
        if demand.count % tp == 0:
            continue
        fits = [n for n in range(1, common + 1) if common % n == 0]
        others = ", ".join(map(str, fits))
        fix = min(fits, key=lambda n: (abs(n - tp), n))
        raise DloError(
            f"tp must divide the {demand.count} {demand.what} of '{demand.owner}', got {tp}; set tp={fix} (sizes that"
            f" fit all of the model: {others})"
        )
