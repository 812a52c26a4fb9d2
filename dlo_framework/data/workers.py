"""Keeps the signals that stop a run from ending its loading processes: senders often signal the whole process group.

A terminal sends Ctrl-C to all processes of its foreground group; ``timeout`` and batch systems send SIGTERM to all of a
job. If a worker ended on it, the run would fail before it has saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

#: Signals that ask a run to stop.
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])}


def ignore_stop_signals(worker: int = 0) -> None:
    """Makes this loading process ignore requests to stop, because the run ends it in the end: a ``worker_init_fn``.

    SIGINT, SIGTERM and SIGUSR1 stay blocked. But SIGTERM from the run's own process counts, because ``torch`` and
    ``multiprocessing`` end a worker with it that does not exit by itself; on systems that do not report the sender of a
    signal (macOS), it counts from every sender.

    Args:
        worker: Number of the worker, from ``DataLoader``.
    """
    tells = hasattr(signal, "sigwaitinfo")
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Threads that start later inherit it.
    run = multiprocessing.parent_process()
    if tells and run is not None and run.pid is not None:
        threading.Thread(target=_end_when_told_by, args=(run.pid,), daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Blocks requests to stop while workers start, which inherit that: none receives one too early."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_told_by(run: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != run:
        pass
    os._exit(0)
