"""Listener for stop signals in a thread of its own, which works while the main thread waits in a collective.

Python runs its signal handlers in the main thread, between two bytecode instructions. A main thread that waits in a
collective executes none. The signal's number is still written into a pipe (``signal.set_wakeup_fd``), which a thread
reads here.
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

#: Signals that ask a run to stop; the last does what SIGTERM does.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
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
    owner = getattr(handler, "__module__", None) or type(handler).__module__
    return callable(handler) and str(owner).partition(".")[0] in _KNOWN


_forks: list[bool] = []


def _forget_in_forks() -> None:
    """Keeps processes that are forked from this one, such as loaders' workers, from writing into its pipe."""

    def forget() -> None:
        if _active:
            _active.clear()
            with contextlib.suppress(ValueError):  # The fork was not in the main thread.
                signal.set_wakeup_fd(-1)

    if not _forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
        _forks.append(True)
