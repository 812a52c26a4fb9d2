"""Actions of a pipeline's ranks (forward, backward and their parts), and the placement of stages on ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple


class ActionKind(enum.StrEnum):
    """Kind of computation that a stage runs for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: the input gradient and the weight gradients."""
    INPUT = "I"
    """First part of backward: the input gradient, for which the previous stage waits."""
    WEIGHT = "W"
    """Second part of backward: the weight gradients that an `INPUT` has deferred."""
    RECOMPUTE = "R"
    """Forward again, with the activations for backward. A stage's `FORWARD` keeps only its input if one follows."""


class Action(NamedTuple):
    """One computation of a rank: its kind, the stage and the micro-batch.

    A negative micro-batch is one of the step before, counted from its end; see `Schedule.flushes`.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def is_backward(self) -> bool:
        """Whether the action computes the input gradient, for which the previous stage waits."""
        return self.kind in (ActionKind.BACKWARD, ActionKind.INPUT)


@dataclass(frozen=True)
class Placement:
    """Placement of a pipeline's stages on its ranks.

    Args:
        ranks: Number of ranks in the pipeline.
        stages_per_rank: Number of stages that each rank holds.
        shape: Order in which ranks get the stages: `loop` is 0, 1, 2, 0, 1, 2; `v` (two stages a rank) is
            0, 1, 2, 2, 1, 0.
    """

    ranks: int
    stages_per_rank: int = 1
    shape: Literal["loop", "v"] = "loop"

    @property
    def stages(self) -> int:
        """Number of stages of all ranks."""
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
        """Returns the pairs of ranks that exchange hidden states."""
        steps = ((self.rank_of(stage), self.rank_of(stage + 1)) for stage in range(self.stages - 1))
        return [(one, other) for one, other in steps if one != other]
