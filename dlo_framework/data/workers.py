"""Loading processes, and the signals that ask a run to stop: many senders mean the whole group, workers included.

A terminal sends Ctrl-C to all processes of its foreground group; ``timeout`` and batch systems send SIGTERM to all of a
job. A worker that ended on it would take the run down before it has saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

#: What asks a run to stop.
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])}


def ignore_stop_signals(worker: int = 0) -> None:
    """Makes this loading process leave requests to stop to the run, which ends it at its own end: a ``worker_init_fn``.

    SIGINT, SIGTERM and SIGUSR1 are held back for good. But SIGTERM counts from the run's own process, for that is how
    ``torch`` and ``multiprocessing`` end a worker that does not end by itself; where the system does not tell who sent
    a signal (macOS), it counts from everybody.

    Args:
        worker: its number, which ``DataLoader`` gives.
    """
    tells = hasattr(signal, "sigwaitinfo")
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Threads that begin later inherit it.
    run = multiprocessing.parent_process()
    if tells and run is not None and run.pid is not None:
        threading.Thread(target=_end_when_told_by, args=(run.pid,), daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Holds requests to stop back while workers are started, which are born with that: none is caught unprepared."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_told_by(run: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != run:
        pass
    os._exit(0)
