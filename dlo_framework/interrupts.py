"""Ctrl-C while a command starts: one line and exit code 130, whatever is being imported.

A KeyboardInterrupt in the middle of an import leaves half a library, which crashes when it is imported again, or when
the interpreter ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, NoReturn

from dlo_framework._version import __version__

CODE = 128 + signal.SIGINT
MESSAGE = f"dlo {__version__}: interrupted; checkpoints saved before the interrupt are complete"


def exit_interrupted(*_: Any) -> NoReturn:
    """Ends the process with the message of Ctrl-C, which the first rank prints."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        # Unbuffered: the signal may have come in the middle of a print.
        os.write(2, f"{MESSAGE}\n".encode())
    os._exit(CODE)


@contextlib.contextmanager
def exits_on_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the process inside the block, if it would raise KeyboardInterrupt."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with contextlib.suppress(ValueError):  # Only the main thread may set handlers.
        if raises:
            signal.signal(signal.SIGINT, exit_interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is exit_interrupted and raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
