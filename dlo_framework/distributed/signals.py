"""Signals that are heard while the main thread cannot hear them.

Python runs its signal handlers in the main thread, between two of its instructions. A main thread that waits in a
collective has none. What the system delivers is written into a pipe all the same (``signal.set_wakeup_fd``), which a
thread reads here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

#: The requests to stop; the last does what SIGTERM does.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
#: Packages whose handlers mean that the run is to stop. Any other is a user's, whose business the signal then is.
_KNOWN = ("dlo_framework", "lightning", "pytorch_lightning", "_signal", "signal")
#: The listener of this process, for processes that are forked from it.
_active: list[SignalListener] = []


class SignalListener:
    """Calls a function, in a thread of its own, for each request to stop. One a process; nested ones do nothing.

    Only signals whose handler is Python's, Lightning's or dlo's count: a handler that a user has installed is left
    alone. What was told of signals before, as asyncio in a notebook is, goes on to be told.

    Args:
        hear: Function that is called with each signal's number.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        self._previous = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to listen. Only in the main thread: no other may take a process's signals."""
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
        """Stops listening, unless something else has taken the signals over meanwhile."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        (reader, writer), self._ends = self._ends, None
        ours = writer.fileno()
        current = signal.set_wakeup_fd(self._previous)
        if current not in (ours, self._previous):
            signal.set_wakeup_fd(current)  # Whoever came later keeps it.
        _active.remove(self)
        with contextlib.suppress(OSError):  # The thread sees the end of it.
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
            # Asked for at once: whoever is told next may install another handler.
            stops = [signum for signum in received if signum in STOP_SIGNALS and means_stop(signal.getsignal(signum))]
            self._pass_on(received)
            for signum in stops:
                self._hear(signum)

    def _pass_on(self, received: bytes) -> None:
        """Tells whoever listened before; it is a socket for some, a pipe for others."""
        if self._previous >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous, received)


def means_stop(handler: Any) -> bool:
    """Returns whether a signal's handler is one that ends the run, rather than a user's."""
    owner = getattr(handler, "__module__", None) or type(handler).__module__
    return callable(handler) and str(owner).partition(".")[0] in _KNOWN


_forks: list[bool] = []


def _forget_in_forks() -> None:
    """Keeps processes that are forked from this one, such as loaders' workers, from writing into its pipe."""

    def forget() -> None:
        if _active:
            _active.clear()
            with contextlib.suppress(ValueError):  # Not forked from the main thread: then it is no main thread.
                signal.set_wakeup_fd(-1)

    if not _forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
        _forks.append(True)
