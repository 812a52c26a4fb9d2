"""What a rank of a pipeline does, one thing after another, and which rank holds which stage."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Kind(enum.StrEnum):
    """What is computed for a micro-batch in a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """All of backward: the input's gradient and the weights'."""
    INPUT = "I"
    """Backward as far as the previous stage waits for it: the input's gradient."""
    WEIGHT = "W"
    """The weights' gradients that an `INPUT` has left."""


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def is_backward(self) -> bool:
        """Whether it computes the gradient that the previous stage waits for."""
        return self.kind in (Kind.BACKWARD, Kind.INPUT)


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stages.

    Args:
        ranks: of the pipeline.
        stages_per_rank: how many each of them holds.
        shape: `loop` deals the stages out round and round: 0, 1, 2, 0, 1, 2; `v` (two a rank) there and back:
            0, 1, 2, 2, 1, 0.
    """

    ranks: int
    stages_per_rank: int = 1
    shape: Literal["loop", "v"] = "loop"

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Returns the rank that holds a stage."""
        if self.shape == "v" and stage >= self.ranks:
            return 2 * self.ranks - 1 - stage
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages that a rank holds, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def neighbours(self) -> list[tuple[int, int]]:
        """Returns the pairs of ranks between which hidden states pass."""
        steps = ((self.rank_of(stage), self.rank_of(stage + 1)) for stage in range(self.stages - 1))
        return [(one, other) for one, other in steps if one != other]
