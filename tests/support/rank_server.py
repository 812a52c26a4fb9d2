"""Server from which ranks and commands are forked: a copy of this process, which has imported everything.

``multiprocessing`` starts a new interpreter for it, which takes twenty seconds of a core to import the same again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import warnings
from multiprocessing import connection, forkserver
from typing import Any

#: Standard output and error while pytest imports this module, which are those of its own.
_AT_IMPORT = sys.stdout, sys.stderr


def fork_server(filters: list[Any]) -> None:
    """Makes a fork of this process ``multiprocessing``'s server (Python 3.11 to 3.13); call it before the first test.

    Args:
        filters: Filters of warnings that imports have added, which pytest has removed from this process.
    """
    server: Any = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, own = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(own)
                _leave_pytest()
                warnings.filters[:0] = filters  # type: ignore[index]
                warnings._filters_mutated()  # type: ignore[attr-defined]
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, own, pid


def _leave_pytest() -> None:
    """Undoes what pytest has changed in the process: its streams, its handlers of logs and its hooks of exceptions."""
    out, err = ({id(stream) for stream in (_AT_IMPORT[n], (sys.stdout, sys.stderr)[n])} for n in (0, 1))
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()
    for name in logging.root.manager.loggerDict:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in out | err:
                handler.setStream(sys.stdout if id(handler.stream) in out else sys.stderr)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
