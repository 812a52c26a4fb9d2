"""Which part of a tensor each rank gets: pure arithmetic, without a process group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlo_framework.cuts import Cut
from dlo_framework.errors import DloError


@dataclass(frozen=True)
class Division:
    """How a tensor is divided among ranks along one dim.

    Attributes:
        dim: that is divided.
        pieces: sizes of what follows one another along it, such as queries, keys and values: of each of them each rank
            has a share.
    """

    dim: int
    pieces: tuple[int, ...]

    def cut(self, ranks: int, rank: int) -> Cut:
        """Returns a rank's part."""
        runs, at = [], 0
        for size in self.pieces:
            first, count = share(size, ranks, rank)
            runs.append((at + first, count))
            at += size
        return Cut(self.dim, at, tuple(runs))


def share(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns a rank's share of a size, `(first, how many)`: as equal as can be, the first ranks having one more."""
    least, more = divmod(size, ranks)
    return rank * least + min(rank, more), least + (rank < more)


@dataclass(frozen=True)
class Demand:
    """Something of which each rank has to have the same number of whole ones.

    Attributes:
        owner: the name of the module that has them.
        count: how many it has.
        what: what they are.
    """

    owner: str
    count: int
    what: str


def check_demands(demands: Iterable[Demand], tp: int) -> None:
    """Checks that the ranks divide everything that is to be shared equally.

    Raises:
        DloError: with the sizes of the axis that work for the whole model.
    """
    demands = list(demands)
    common = math.gcd(*(demand.count for demand in demands))
    for demand in demands:
        if demand.count % tp == 0:
            continue
        fits = [n for n in range(1, common + 1) if common % n == 0]
        others = ", ".join(map(str, fits))
        lack = f", fewer than tp={tp}" if demand.count < tp else f", not divisible by tp={tp}"
        fix = min(fits, key=lambda n: (abs(n - tp), n))
        raise DloError(
            f"tensor parallelism gives each rank as many {demand.what}: '{demand.owner}' has {demand.count}"
            f" {demand.what}{lack}; use tp={fix} (of {others}, which suit the whole model)"
        )
