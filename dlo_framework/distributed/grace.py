"""How long a run that was asked to stop may go on without a move before it is ended where it is."""

from __future__ import annotations

import time

from lightning.pytorch import Trainer

from dlo_framework.distributed.stacks import is_saving, main_frame

#: Seconds that a run which was asked to stop may take no batch and save nothing, by default.
GRACE = 60.0
#: The same where all ranks wait for each other.
_ALL_WAIT = 10.0
#: A run whose batches take long gets this many times the longest time it has gone without one so far.
_TIMES_LONGEST = 2.0
#: A process that saves and uses at least this share of a core gets on with it.
_BUSY = 0.1
#: Seconds over which that is measured.
_WINDOW = 1.0


class Progress:
    """Counts the moves of a rank: batches taken in any loop, and seconds of work on a checkpoint.

    Args:
        trainer: Trainer of the run; None where there is none yet.
    """

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self._moves, self._batches = 0, _batches(trainer)
        self._cpu, self._looked = time.process_time(), time.monotonic()

    def moves(self) -> int:
        """Looks once more, and returns the number of moves so far."""
        batches, now = _batches(self._trainer), time.monotonic()
        self._moves += batches != self._batches
        self._batches = batches
        if now - self._looked >= _WINDOW:  # Within less, looking itself is work.
            cpu = time.process_time()
            self._moves += cpu - self._cpu > _BUSY * (now - self._looked) and is_saving(main_frame())
            self._cpu, self._looked = cpu, now
        return self._moves


def _batches(trainer: Trainer | None) -> int:
    """Returns a number that each batch changes, of whatever loop."""
    if trainer is None:
        return 0
    fit = trainer.fit_loop.epoch_loop
    loops = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    counts = [loop.batch_progress.total for loop in loops]
    return sum(count.ready + count.completed for count in counts)


class Grace:
    """Says when a run that was asked to stop has not moved for too long.

    Args:
        seconds: Seconds without a move; more where moves have taken long before.
    """

    def __init__(self, seconds: float = GRACE) -> None:
        self.seconds = seconds
        self.signum = 0
        self.rank = 0
        self._moves, self._longest = 0, 0.0
        self._idle = self._idle_asked = 0.0

    def ask(self, signum: int, rank: int = 0) -> None:
        """Notes a request to stop that a rank has got; the first one counts."""
        if not self.signum:
            self.signum, self.rank = signum, rank

    @property
    def limit(self) -> float:
        """Seconds without a move after which the run is ended."""
        return max(self.seconds, _TIMES_LONGEST * self._longest)

    def is_over(self, passed: float, moves: int, waiting: float = 0.0) -> bool:
        """Returns whether the run is to be ended where it is.

        Args:
            passed: Seconds since this was last asked.
            moves: Number of moves so far, of all ranks.
            waiting: Seconds that every rank has waited for the others; 0 if one of them does not.
        """
        if moves != self._moves:
            if self._moves and not self.signum:  # What comes before the first batch says nothing of batches.
                self._longest = max(self._longest, self._idle)
            self._moves, self._idle, self._idle_asked = moves, 0.0, 0.0
        self._idle += passed
        self._idle_asked += passed if self.signum else 0.0
        if not self.signum:
            return False
        limit = min(self.limit, _ALL_WAIT) if waiting >= _ALL_WAIT else self.limit
        return self._idle_asked >= limit
