"""The clock inside a fit of Lightning's."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from measuring.rounds import Clock


class Stopwatch(Callback):
    """Times the batches of a fit after those that warm up, from the end of one to the end of another.

    Args:
        clock: by which.
        warm: batches before the clock starts; with 0 it starts here, before the fit.
        steps: batches that are timed.
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
        """The mean over the steps that were timed."""
        assert self._end is not None, f"the fit ended after {self.seen} batches of {self.warm + self.steps}"
        return self.clock.between(self._begin, self._end) / self.steps
