"""How a run of several ranks ends when one of them fails: what the first failure was, and how to leave."""

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
from typing import NoReturn

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework._version import __version__
from dlo_framework.errors import DloError, worker_message
from dlo_framework.run_lock import release_all

#: What the libraries under us say when another rank is gone or silent.
_LOST = re.compile(
    r"gloo/transport|connectFullMesh|Connection (closed|reset) by|Connection refused|Broken pipe|Socket Timeout"
    r"|Timed out waiting|Application timeout caused pair closure|NCCL (error|communicator)|ncclRemoteError"
    r"|ProcessGroupNCCL"
)
#: A traceback longer than this is cut in the middle: it travels to every rank.
_MOST_DETAILS = 20_000


@dataclass(frozen=True)
class Failure:
    """The failure that ended a run, as every rank knows it.

    Attributes:
        rank: the rank that failed first.
        world_size: how many there are.
        summary: one line: ``ValueError: no such thing``, ``killed by SIGKILL``.
        details: the traceback; empty where there is none.
        exit_code: of the whole run.
        stacks: Whether ranks are ended where they are, so that each prints its stack first.
        silent: Whether nothing was heard of the rank: its process may be stopped, and then ends by no message.
    """

    rank: int
    world_size: int
    summary: str
    details: str = ""
    exit_code: int = 1
    stacks: bool = False
    silent: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, world_size: int) -> Failure:
        """Returns the failure that an exception is; what a user can mend needs no traceback."""
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
    def ended(cls, rank: int, world_size: int, code: int | None) -> Failure:
        """Returns the failure of a rank whose process has ended without a word.

        Args:
            rank: which.
            world_size: of how many.
            code: its exit code, negative for a signal; None where nobody can tell.
        """
        if code is None:
            return cls(rank, world_size, "its process ended without a word (killed? out of memory?)")
        if code >= 0:
            return cls(rank, world_size, f"its process ended with exit code {code}", exit_code=code or 1)
        name = signal.Signals(-code).name
        hint = " (by hand, or by the system for want of memory)" if -code == signal.SIGKILL else ""
        return cls(rank, world_size, f"its process was killed by {name}{hint}", exit_code=128 - code)

    @property
    def told(self) -> bool:
        """Whether the rank has told of it itself; else it has died, is silent or hangs."""
        return bool(self.details) or self.of_user or self.by_signal

    @property
    def of_user(self) -> bool:
        """Whether it is bad input: one line, and exit code 2."""
        return self.exit_code == 2 and not self.details

    @property
    def by_signal(self) -> bool:
        """Whether a request to stop has ended the ranks where they were."""
        return self.stacks and self.exit_code > 128

    def __str__(self) -> str:
        failed = "" if self.by_signal else " failed"
        return f"rank {self.rank} of {self.world_size}{failed}: {self.summary}"

    def to_text(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Failure:
        """Returns what :meth:`to_text` wrote; ValueError if it is something else."""
        fields = json.loads(text)
        try:
            return cls(
                int(fields["rank"]),
                int(fields["world_size"]),
                str(fields["summary"]),
                str(fields["details"]),
                int(fields["exit_code"]),
                bool(fields["stacks"]),
                bool(fields["silent"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no failure: {text[:80]}") from error


class RankFailed(RuntimeError):
    """Raised on a rank that has to end because another one has failed.

    Attributes:
        failure: the other's.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure}\n{failure.details}".rstrip())
        self.failure = failure


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether an error is what a rank sees of another's end, rather than a fault of its own."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


@dataclass(frozen=True)
class Ended:
    """How a run of several ranks ended in this process.

    Attributes:
        failure: the first one.
        rank: this process's.
        told_elsewhere: whether the process that started this one says what happened.
        by_launcher: Whether dlo has started the ranks of this host, so that one of them tells for all.
    """

    failure: Failure
    rank: int
    told_elsewhere: bool
    by_launcher: bool = False

    @property
    def own(self) -> bool:
        """Whether it was this rank that failed."""
        return self.failure.rank == self.rank


#: What became of the last run of several ranks in this process. One process is one rank, so this is its own.
_state: dict[str, Ended | None] = {"ended": None}


def note_end(ended: Ended | None) -> None:
    """Keeps how the run ended, for whoever ends the process."""
    _state["ended"] = ended


def how_it_ended() -> Ended | None:
    """Returns how the last run of several ranks failed in this process; None if it has not."""
    return _state["ended"]


def tell(ended: Ended) -> None:
    """Says on standard error how the run ended, as far as it is for this process to say."""
    name = f"dlo {__version__}"
    if ended.told_elsewhere:
        return
    failure, first_process = ended.failure, ended.own or ended.by_launcher
    if first_process and failure.details:
        print(failure.details, file=sys.stderr)
    if failure.of_user and first_process:
        where = f" (rank {failure.rank})" if failure.rank else ""
        print(f"{name}: error{where}: {failure.summary}", file=sys.stderr)
    elif first_process:
        print(f"{name}: {failure}", file=sys.stderr)
    else:
        print(f"{name}: rank {ended.rank} ends because {failure}", file=sys.stderr)


def tell_torchrun(error: BaseException) -> None:
    """Leaves an error where torchrun looks for it, so that its closing table names the rank and the cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def leave(code: int) -> NoReturn:
    """Ends the process now, loaders' workers first.

    Not by ``sys.exit``: what runs at an interpreter's exit waits for ranks that wait for this one.
    """
    for child in multiprocessing.active_children():
        child.kill()
    release_all()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # Its reader has gone, or it is closed: nobody is to be told.
            stream.flush()
    os._exit(code)
