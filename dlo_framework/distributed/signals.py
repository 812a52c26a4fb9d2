"""Stop signals: a listener that works while the main thread waits in a collective, and the grace period of a stop.

Python runs its signal handlers in the main thread, between two bytecode instructions. A main thread that waits in a
collective executes none. The signal's number is still written into a pipe (``signal.set_wakeup_fd``), which a thread
reads here. After a stop signal a run may go on without progress for a grace period, before it is ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from dlo_framework.distributed.stacks import is_saving, main_frame, module_of

#: Signals that ask a run to stop; the last does what SIGTERM does.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
#: Packages whose signal handlers stop the run. A signal with any other handler is left to the user.
_KNOWN = ("dlo_framework", "lightning", "pytorch_lightning", "_signal", "signal")
#: Listener of this process, for processes that are forked from it.
_active: list[SignalListener] = []


class SignalListener:
    """Calls a function, in a thread of its own, for each stop signal; one a process, nested listeners do nothing.

    Only signals whose handler is Python's, Lightning's or dlo's count; those with a handler of the user's are ignored.
    An earlier reader of the signals, such as asyncio in a notebook, still gets them.

    Args:
        hear: Function that is called with each signal's number.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        self._previous = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to listen; does nothing outside of the main thread, where Python lets no one listen to signals."""
        if threading.current_thread() is not threading.main_thread() or _active:
            return
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._ends = (reader, writer)
        self._previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        _active.append(self)
        _forget_in_forks()
        self._thread = threading.Thread(target=self._listen, args=(reader,), name="stop-signals", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops listening; a reader of the signals that was installed later stays installed."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        (reader, writer), self._ends = self._ends, None
        ours = writer.fileno()
        current = signal.set_wakeup_fd(self._previous)
        if current not in (ours, self._previous):
            signal.set_wakeup_fd(current)  # A later reader stays installed.
        _active.remove(self)
        with contextlib.suppress(OSError):  # The thread reads the end of the stream.
            writer.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        writer.close()
        reader.close()

    def _listen(self, reader: socket.socket) -> None:
        while True:
            try:
                select.select([reader], [], [])
                received = reader.recv(64)
            except BlockingIOError:
                continue
            except (OSError, ValueError):
                return
            if not received:
                return
            # Handlers are looked up first: the earlier reader may install another one.
            stops = [signum for signum in received if signum in STOP_SIGNALS and means_stop(signal.getsignal(signum))]
            self._pass_on(received)
            for signum in stops:
                self._hear(signum)

    def _pass_on(self, received: bytes) -> None:
        """Writes the signals to the earlier reader, which may be a socket or a pipe."""
        if self._previous >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous, received)


def means_stop(handler: Any) -> bool:
    """Returns whether a signal's handler is one that stops the run, not a user's."""
    owner = module_of(handler) or type(handler).__module__
    return callable(handler) and owner.partition(".")[0] in _KNOWN


@functools.cache
def _forget_in_forks() -> None:
    """Keeps processes that are forked from this one, such as loaders' workers, from writing into its pipe."""

    def forget() -> None:
        if _active:
            _active.clear()
            with contextlib.suppress(ValueError):  # The fork was not in the main thread.
                signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


# --- grace period ----------------------------------------------------------------------------------------------


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
