"""Grace period of a stop: time that a run may go on without progress after a stop signal, before it is ended."""

from __future__ import annotations

import time

from lightning.pytorch import Trainer

from dlo_framework.distributed.stacks import is_saving, main_frame

#: Seconds without a batch or a save after which a run that got a stop signal is ended, by default.
GRACE = 60.0
#: The same seconds where all ranks wait for each other.
_ALL_WAIT = 10.0
#: Factor on the longest time between two batches so far, which a run with slow batches has at least.
_TIMES_LONGEST = 2.0
#: Share of a core that a process must use during a save for the save to count as progress.
_BUSY = 0.1
#: Seconds over which that share is measured.
_WINDOW = 1.0


class ProgressCounter:
    """Counter of a rank's progress: batches of any loop, and seconds of work on a checkpoint.

    Args:
        trainer: Trainer of the run; None where there is none yet.
    """

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self._moves, self._batches = 0, _batches(trainer)
        self._cpu, self._looked = time.process_time(), time.monotonic()

    def moves(self) -> int:
        """Updates the count, and returns it."""
        batches, now = _batches(self._trainer), time.monotonic()
        self._moves += batches != self._batches
        self._batches = batches
        if now - self._looked >= _WINDOW:  # In a shorter window, this measurement itself would count as work.
            cpu = time.process_time()
            self._moves += cpu - self._cpu > _BUSY * (now - self._looked) and is_saving(main_frame())
            self._cpu, self._looked = cpu, now
        return self._moves


def _batches(trainer: Trainer | None) -> int:
    """Returns a number that each batch of any loop changes."""
    if trainer is None:
        return 0
    fit = trainer.fit_loop.epoch_loop
    loops = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    counts = [loop.batch_progress.total for loop in loops]
    return sum(count.ready + count.completed for count in counts)


class GracePeriod:
    """Timer that finds when a run that got a stop signal has made no progress for too long.

    Args:
        seconds: Seconds without progress after which the run is ended; longer where batches took longer before.
    """

    def __init__(self, seconds: float = GRACE) -> None:
        self.seconds = seconds
        self.signum = 0
        self.rank = 0
        self._moves, self._longest = 0, 0.0
        self._idle = self._idle_asked = 0.0

    def ask(self, signum: int, rank: int = 0) -> None:
        """Notes a stop signal that a rank got; the first one counts."""
        if not self.signum:
            self.signum, self.rank = signum, rank

    @property
    def limit(self) -> float:
        """Seconds without progress after which the run is ended."""
        return max(self.seconds, _TIMES_LONGEST * self._longest)

    def is_over(self, passed: float, moves: int, waiting: float = 0.0) -> bool:
        """Returns whether the grace period is over, so that the run must be ended.

        Args:
            passed: Seconds since the last call.
            moves: Sum of the ranks' progress counts.
            waiting: Seconds that every rank has waited for the others; 0 if a rank does not wait.
        """
        if moves != self._moves:
            if self._moves and not self.signum:  # Times before the first batch are not times between batches.
                self._longest = max(self._longest, self._idle)
            self._moves, self._idle, self._idle_asked = moves, 0.0, 0.0
        self._idle += passed
        self._idle_asked += passed if self.signum else 0.0
        if not self.signum:
            return False
        limit = min(self.limit, _ALL_WAIT) if waiting >= _ALL_WAIT else self.limit
        return self._idle_asked >= limit
