"""Clock of the time that training waits for data, through Lightning's profiler hooks, at almost no cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.profilers import Profiler

FETCH = "[_TrainingEpochLoop].train_dataloader_next"


class _Nothing:
    """Context that does nothing, with C functions as methods: ``"".format`` takes any arguments and returns ``""``."""

    __enter__ = __exit__ = staticmethod("".format)


#: ``contextlib.nullcontext`` would call two Python functions each time: 180 calls a step.
_NOTHING: Any = _Nothing()


class StepClock(Profiler):
    """Adds up the seconds that training waits for its data loader; on by default where no profiler is set.

    Lightning enters a profiler some twenty times a step, each time through a generator. This one returns the same
    context each time, which does nothing, and reads the clock only where data is fetched.

    Attributes:
        on_fetch: Function that is called before a batch is fetched with True, and after it with False; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0
        self.on_fetch: Callable[[bool], None] | None = None
        self._since = 0.0

    def start(self, action_name: str) -> None:
        """Starts the clock when a batch is fetched."""
        if action_name == FETCH:
            self._since = time.perf_counter()
            if self.on_fetch is not None:
                self.on_fetch(True)

    def stop(self, action_name: str) -> None:
        """Stops the clock when the batch has been fetched."""
        if action_name == FETCH:
            self.waited += time.perf_counter() - self._since
            if self.on_fetch is not None:
                self.on_fetch(False)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Returns a context that does nothing: fetching is timed through :meth:`start` and :meth:`stop`."""
        return _NOTHING

    def pop_waited(self) -> float:
        """Returns the seconds waited since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited
