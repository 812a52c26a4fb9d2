"""Where the time of a step goes, through Lightning's profiler hooks, at almost no cost."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.profilers import Profiler

FETCH = "[_TrainingEpochLoop].train_dataloader_next"


class _Nothing:
    """A context that does nothing. Its methods are C's: ``"".format`` takes any arguments and returns ``""``."""

    __enter__ = __exit__ = staticmethod("".format)


#: ``contextlib.nullcontext`` would call two functions of Python's each time: 180 a step.
_NOTHING: Any = _Nothing()


class StepClock(Profiler):
    """Adds up the seconds that training waits for its data loader; on by default where no profiler is set.

    Lightning enters a profiler some twenty times a step, each time through a generator; this one hands out one
    context that does nothing, and is told apart from that only where data is fetched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0
        self._since = 0.0

    def start(self, action_name: str) -> None:
        """Starts the clock when a batch is asked for."""
        if action_name == FETCH:
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Stops it when the batch has come."""
        if action_name == FETCH:
            self.waited += time.perf_counter() - self._since

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Returns a context that does nothing: fetching is timed through :meth:`start` and :meth:`stop`."""
        return _NOTHING

    def take(self) -> float:
        """Returns the seconds waited since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited
