"""The mesh: the layout of a run's ranks along the axes of parallelism.

Axes, outer to inner: `pp` (pipeline stages), `dp_replicate` (copies of the model), `dp_shard` (ranks that share one
copy's state), `cp` (parts of the sequence), `tp` (parts of each layer). Ranks next to each other differ in the inner
axes first: tensor parallelism, which talks most, has the fastest links (Narayanan et al. 2021, arXiv 2104.04473).

`ep` (experts of a mixture) adds no ranks to these: it divides the ranks of `dp_shard` x `cp` again, for the experts'
parameters alone, since their tokens come from these ranks. Ranks next to each other differ in `ep` first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dlo_framework.errors import DloError, check_number

#: Names of the axes, outer to inner.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Coordinates(NamedTuple):
    """Coordinates of a rank on the axes."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the axes.

    Args:
        pp: Number of pipeline ranks.
        dp_replicate: Number of copies of the model.
        dp_shard: Number of ranks that share one copy's parameters, gradients and optimizer state.
        cp: Number of ranks that share a sequence.
        tp: Number of ranks that share each layer.
        ep: Number of ranks among which the experts of each mixture are divided; it divides `dp_shard` x `cp`.

    Each is at least 1; one of them, but not `ep`, may be -1, for all remaining ranks.

    Raises:
        DloError: for another size, or more than one -1.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        check_number("ep", self.ep, "at least 1", "use 1 to keep all experts on each rank")
        for axis, size in self.sizes.items():
            if size == 0 or size < -1:
                raise DloError(f"{axis} must be at least 1, or -1 for all remaining ranks, got {size}")
        rest = [axis for axis, size in self.sizes.items() if size == -1]
        if len(rest) > 1:
            raise DloError(f"at most one axis must be -1, got {' and '.join(rest)}; set {rest[0]} to 1")

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' sizes by name, outer to inner."""
        return {axis: getattr(self, axis) for axis in AXES}

    def axis_size(self, axis: str) -> int:
        """Returns the size of an axis, or of `ep`."""
        return self.ep if axis == "ep" else self.sizes[axis]

    @property
    def expert_shards(self) -> int:
        """The number of ranks that share one rank's experts: those of `dp_shard` x `cp` with the same place in `ep`."""
        return self.dp_shard * self.cp // self.ep

    def expert_rank(self, place: Coordinates) -> int:
        """Returns a rank's number in `ep`."""
        return (place.dp_shard * self.cp + place.cp) % self.ep

    @property
    def data_size(self) -> int:
        """The number of rank groups that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return math.prod(self.sizes.values())

    def resolve(self, world_size: int) -> MeshSpec:
        """Returns the mesh with -1 filled in.

        Raises:
            DloError: if the product of the sizes is not the world size; the message computes sizes that fit.
        """
        open_axis = next((axis for axis, size in self.sizes.items() if size == -1), None)
        given = {axis: size for axis, size in self.sizes.items() if size != -1}
        product = math.prod(given.values())
        shown = " x ".join(f"{axis} {size}" for axis, size in given.items() if size > 1) or "1"
        if open_axis is not None:
            if world_size % product:
                raise DloError(
                    f"world size must be divisible by {shown}, got {world_size};"
                    f" {_fixes(given, world_size, open_ended=True)}"
                )
            return replace(self, **{open_axis: world_size // product})._check_experts()
        if product != world_size:
            raise DloError(
                f"world size must be {shown}{f' = {product}' if ' x ' in shown else ''}, got {world_size}; set an axis"
                f" to -1, or {_fixes(given, world_size, open_ended=False)}"
            )
        return self._check_experts()

    def _check_experts(self) -> MeshSpec:
        ranks = self.dp_shard * self.cp
        if ranks % self.ep:
            raise DloError(
                f"ep must divide the {ranks} ranks of dp_shard x cp, whose tokens the experts get, got {self.ep}; set"
                f" ep={nearest_divisor(self.ep, ranks)}"
            )
        return self

    def coordinates(self, rank: int) -> Coordinates:
        """Returns a global rank's coordinates; the mesh must have no -1."""
        return Coordinates(*map(int, np.unravel_index(rank, tuple(self.sizes.values()))))

    def rank(self, place: Coordinates) -> int:
        """Returns the global rank at some coordinates."""
        return int(np.ravel_multi_index(place, tuple(self.sizes.values())))

    def data_rank(self, rank: int) -> int:
        """Returns the index of the samples' share that a rank sees: ranks with the same index see the same samples."""
        place = self.coordinates(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size != 1) or "one rank"
        return axes if self.ep == 1 else f"{axes}, ep {self.ep}"


def _fixes(given: dict[str, int], world_size: int, *, open_ended: bool) -> str:
    """Returns fixes that make the sizes fit the world size, as text: another size of one axis, or other ranks."""
    product = math.prod(given.values())
    axis_fixes = []
    for axis, size in given.items():
        room, left = divmod(world_size, product // size)
        if size > 1 and left == 0:
            axis_fixes.append(f"{axis}={nearest_divisor(size, room) if open_ended else room}")
    below = world_size // product * product
    ranks = f"{below} or {below + product}" if open_ended and below else f"{product}"
    return " or ".join([*([f"use {' or '.join(axis_fixes)}"] if axis_fixes else []), f"run {ranks} processes"])


def nearest_divisor(size: int, of: int) -> int:
    """Returns the divisor of ``of`` that is nearest to ``size``; the smaller of two."""
    return min((n for n in range(1, of + 1) if of % n == 0), key=lambda n: (abs(n - size), n))
