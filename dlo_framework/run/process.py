"""Settings of the process that a run needs: which warnings are shown, how CUDA is looked for, how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from dlo_framework._version import __version__

#: File that the NVIDIA driver provides.
DRIVER = Path("/proc/driver/nvidia/version")
#: ``PR_SET_PDEATHSIG`` of Linux's prctl.
_PDEATHSIG = 1


def disable_nvml_check() -> None:
    """Resets a Lightning setting that costs a library lookup per step on machines without an NVIDIA driver.

    ``import lightning`` sets ``PYTORCH_NVML_BASED_CUDA_CHECK=1`` so that ``torch.cuda.is_available()`` does not
    start CUDA before a fork. Optimizers call that function at each step, and without a driver each call is a
    failed ``dlopen`` of NVML: a third of a small model's step. Without a driver CUDA cannot start anyway.
    """
    if sys.platform == "linux" and not DRIVER.exists():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


#: Warnings of other libraries that a user of dlo cannot act on.
_SILENCED = (
    ".*pkg_resources is deprecated.*",
    ".*does not have many workers.*",
    "Using `DistributedSampler` with the dataloaders.*",  # dlo's strategies repeat no sample.
    ".*LeafSpec.* is deprecated.*",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from .*",
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint.*",
    # torch.compile's pickler looks for a function's module in all modules, jsonargparse's deprecated ones too.
    r"\s*(By default only one JsonargparseDeprecationWarning|Only use the public API as described)",
)


def silence_warnings() -> None:
    """Silences warnings and log lines that a user cannot act on."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for message in _SILENCED:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_is_relevant)


def shorten_warnings() -> None:
    """Makes Python print a warning of dlo's own, or of a pack `dlo_...`, as one line, without the code that raised it.

    Lightning (2.6) sets the same hook for its own warnings when it is imported, so this must be called afterwards.
    """
    before = warnings.formatwarning
    if before.__module__ == __name__:
        return

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not any(part.startswith("dlo_") for part in Path(filename).parts[:-1]):
            return before(message, category, filename, lineno, line)
        return f"warning: {message}\n"

    warnings.formatwarning = format_warning


def _is_relevant(record: logging.LogRecord) -> bool:
    """Returns False for tips, for accelerators that were not asked for, and for what torchao's import deprecates.

    One tip is to set the precision of float32 products, as AcceleratorSettings does.
    """
    text = record.getMessage()
    return not (
        text.startswith(("💡 Tip", "You are using a CUDA device", "TPU available: False", "HPU available: False"))
        or "register_constant() on Enum subclasses" in text
    )


@contextlib.contextmanager
def import_without_collection() -> Iterator[None]:
    """Pauses Python's collection of reference cycles while libraries are imported.

    Their million objects last as long as the process, so that collections free nothing, and take a fifth of the time of
    the imports. The first time in a process, what exists at the end is exempt from later collections too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if not gc.get_freeze_count():
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def end_with_parent(parent: int, signum: int) -> Callable[[], None] | None:
    """Returns a function for a new process that lets it end when its parent does; None where only Linux can.

    Args:
        parent: Process id of the parent. The process ends with the thread that has started it.
        signum: Signal that the process gets.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def set_signal() -> None:
        prctl(_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return set_signal


# --- Ctrl-C while a command starts ---------------------------------------------------------------------------


INTERRUPTED_CODE = 128 + signal.SIGINT
INTERRUPTED_MESSAGE = f"dlo {__version__}: interrupted; checkpoints saved before the interrupt are complete"


def exit_interrupted(*_: Any) -> NoReturn:
    """Ends the process with the message of Ctrl-C, which the first rank prints."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        # Unbuffered: the signal may have come in the middle of a print.
        os.write(2, f"{INTERRUPTED_MESSAGE}\n".encode())
    os._exit(INTERRUPTED_CODE)


@contextlib.contextmanager
def exits_on_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the process inside the block, if it would raise KeyboardInterrupt: one line and exit code 130.

    A KeyboardInterrupt in the middle of an import leaves half a library, which crashes when it is imported again, or
    when the interpreter ends.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with contextlib.suppress(ValueError):  # Only the main thread may set handlers.
        if raises:
            signal.signal(signal.SIGINT, exit_interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is exit_interrupted and raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
