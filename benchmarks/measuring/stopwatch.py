"""Callback that times the batches of a Lightning fit."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from measuring.rounds import Clock


class Stopwatch(Callback):
    """Times the batches of a fit after the warm-up, from the end of one batch to the end of another.

    Args:
        clock: Clock to use.
        warm: Batches before the clock starts; with 0 it starts in the constructor, before the fit.
        steps: Number of timed batches.
    """

    def __init__(self, clock: Clock, warm: int, steps: int) -> None:
        self.clock, self.warm, self.steps, self.seen = clock, warm, steps, 0
        self._begin: Any = None if warm else clock.mark()
        self._end: Any = None

    def on_train_batch_end(self, *_: object) -> None:
        self.seen += 1
        if self.seen == self.warm:
            self.clock.settle()
            self._begin = self.clock.mark()
        elif self.seen == self.warm + self.steps:
            self._end = self.clock.mark()

    @property
    def seconds_of_a_step(self) -> float:
        """Mean over the timed steps, in seconds."""
        assert self._end is not None, f"the fit ended after {self.seen} batches of {self.warm + self.steps}"
        return self.clock.between(self._begin, self._end) / self.steps
