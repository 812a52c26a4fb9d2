"""First failure of a run of several ranks: its record, its message, and how each process ends."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import ClassVar, NoReturn

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework._version import __version__
from dlo_framework.errors import DloError, worker_message
from dlo_framework.lock import release_all

#: Messages of gloo, NCCL and torch when another rank is dead or silent.
_LOST = re.compile(
    r"gloo/transport|connectFullMesh|Connection (closed|reset) by|Connection refused|Broken pipe|Socket Timeout"
    r"|Timed out waiting|Application timeout caused pair closure|NCCL (error|communicator)|ncclRemoteError"
    r"|ProcessGroupNCCL"
)
#: Most characters of a traceback, which is sent to every rank; a longer one loses its middle.
_MOST_DETAILS = 20_000


@dataclass(frozen=True)
class Failure:
    """First failure of a run, as every rank knows it.

    Attributes:
        rank: Rank that failed first.
        world_size: Number of ranks.
        summary: One line: ``ValueError: no such thing``, ``killed by SIGKILL``.
        details: Traceback; empty where there is none.
        exit_code: Exit code of the run.
        stacks: Whether ranks are ended where they wait, so that each prints its stack first.
        silent: Whether the rank sent nothing: its process may be stopped, and then no message ends it.
    """

    rank: int
    world_size: int
    summary: str
    details: str = ""
    exit_code: int = 1
    stacks: bool = False
    silent: bool = False

    @classmethod
    def from_error(cls, error: BaseException, rank: int, world_size: int) -> Failure:
        """Returns the failure for an exception; errors in the user's input get no traceback."""
        if isinstance(error, DloError | MisconfigurationException):
            return cls(rank, world_size, worker_message(error), exit_code=2)
        summary = traceback.format_exception_only(error)[-1].strip()
        details = "".join(traceback.format_exception(error))
        if len(details) > _MOST_DETAILS:
            half = _MOST_DETAILS // 2
            details = f"{details[:half]}\n[...]\n{details[-half:]}"
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        return cls(rank, world_size, summary, details, code)

    @classmethod
    def from_exit_code(cls, rank: int, world_size: int, code: int | None) -> Failure:
        """Returns the failure for a rank whose process has ended without reporting one.

        Args:
            rank: Rank whose process ended.
            world_size: Number of ranks.
            code: Exit code of the process, negative for a signal; None where it is not known.
        """
        if code is None:
            return cls(rank, world_size, "its process ended without a message (killed? out of memory?)")
        if code >= 0:
            return cls(rank, world_size, f"its process ended with exit code {code}", exit_code=code or 1)
        name = signal.Signals(-code).name
        hint = " (by hand, or by the system when out of memory)" if -code == signal.SIGKILL else ""
        return cls(rank, world_size, f"its process was killed by {name}{hint}", exit_code=128 - code)

    @property
    def is_reported(self) -> bool:
        """Whether the rank has reported the failure itself; else it has died, is silent or hangs."""
        return bool(self.details) or self.is_user_error or self.is_from_signal

    @property
    def is_user_error(self) -> bool:
        """Whether the failure is an error in the user's input: one line, and exit code 2."""
        return self.exit_code == 2 and not self.details

    @property
    def is_from_signal(self) -> bool:
        """Whether a stop signal has ended the ranks where they waited."""
        return self.stacks and self.exit_code > 128

    def __str__(self) -> str:
        failed = "" if self.is_from_signal else " failed"
        return f"rank {self.rank} of {self.world_size}{failed}: {self.summary}"

    def to_text(self) -> str:
        """Returns the failure as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Failure:
        """Returns the failure that :meth:`to_text` wrote; ValueError for any other text."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a failure: {text[:80]}") from error


class RankFailed(RuntimeError):
    """Error raised on a rank that ends because another rank has failed.

    Attributes:
        failure: Failure of the other rank.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure}\n{failure.details}".rstrip())
        self.failure = failure


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether an error comes from the end of another rank, not from this one."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


@dataclass(frozen=True)
class RunEnd:
    """End of a run of several ranks, as this process sees it.

    Attributes:
        failure: First failure of the run.
        rank: Rank of this process.
        printed_elsewhere: Whether the process that started this one prints the failure.
        by_launcher: Whether dlo has started the ranks of this host, so that one of them prints for all.
        last: End of the last run of several ranks in this process, for the code that ends it; None if none has failed.
    """

    failure: Failure
    rank: int
    printed_elsewhere: bool
    by_launcher: bool = False
    last: ClassVar[RunEnd | None] = None

    @property
    def own(self) -> bool:
        """Whether this rank failed first."""
        return self.failure.rank == self.rank


def print_run_end(ended: RunEnd) -> None:
    """Prints to standard error how the run ended, unless another process prints it."""
    name = f"dlo {__version__}"
    if ended.printed_elsewhere:
        return
    failure, first_process = ended.failure, ended.own or ended.by_launcher
    if first_process and failure.details:
        print(failure.details, file=sys.stderr)
    if failure.is_user_error and first_process:
        where = f" (rank {failure.rank})" if failure.rank else ""
        print(f"{name}: error{where}: {failure.summary}", file=sys.stderr)
    elif first_process:
        print(f"{name}: {failure}", file=sys.stderr)
    else:
        print(f"{name}: rank {ended.rank} ends because {failure}", file=sys.stderr)


def record_for_torchrun(error: BaseException) -> None:
    """Records an error in torchrun's error file, so that torchrun's closing table names the rank and the cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def exit_process(code: int) -> NoReturn:
    """Ends the process at once, after its data loader workers.

    It does not call ``sys.exit``: handlers at the interpreter's exit wait for ranks that wait for this one.
    """
    for child in multiprocessing.active_children():
        child.kill()
    release_all()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # The stream's reader has gone, or the stream is closed.
            stream.flush()
    os._exit(code)
