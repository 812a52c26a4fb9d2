"""Function calls on several ranks of one machine, with a time limit, after which no process is left.

Importing torch and Lightning takes each rank seconds of a core. Without an accelerator they are imported once, in a
server process from which ranks are forked (multiprocessing's forkserver): it starts no threads and has none of the
caller's state. With an accelerator each rank is spawned: a driver that is in use does not survive a fork.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any

from dlo_framework.errors import DloError
from dlo_framework.registry.class_source import module_file
from dlo_framework.registry.registry import own_packages
from dlo_framework.testing import rank_main as rank_module
from dlo_framework.testing.rank_main import Answer, Job, Streams

#: Seconds that the ranks have to exit once each has answered.
_GRACE = 10.0
#: Modules, and packages with all their modules, that the server imports beside torch if this process has imported them.
#: The only threads that they start are those of OpenBLAS and jemalloc, which have handlers for forks.
_HEAVY = (
    "jsonargparse",
    "lightning.pytorch",
    "matplotlib.figure",
    "pandas",
    "sklearn.datasets",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
)
#: Packages whose modules, where the caller has imported them, the server of ranks imports too. Tests may add to it
#: before their first ranks.
PRELOADED_PACKAGES = {"pytest", "timm", "transformers"}


class RankFailed(RuntimeError):
    """Error of a rank that raised, died, or did not answer in time; the message holds the first rank's traceback.

    Args:
        message: Description of the failure, with the rank's traceback.
        rank: First rank that failed; None after a time limit.
        user_error: Message of the DloError that the rank raised; None for other failures.
    """

    def __init__(self, message: str, rank: int | None, user_error: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.user_error = rank, user_error


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 240.0,
    group_timeout: float = 30.0,
    backend: str | None = "gloo",
    threads: int = 1,
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` on ranks of this machine, each a new process, in one process group.

    ```python
    def _sum(rank: int, world_size: int, offset: float) -> float:
        value = torch.tensor(rank + offset)
        dist.all_reduce(value)
        return float(value)


    def test_sum() -> None:
        assert run_distributed(_sum, 2, 0.5) == [2.0, 2.0]
    ```

    Each rank has the environment variables that torchrun sets, so that a Lightning ``Trainer`` in ``fn`` with
    ``devices=world_size`` runs as one of the ranks. The ranks communicate over the loopback interface only, and meet at
    a port that the operating system chose. The first call takes some seconds to import torch and Lightning; with an
    accelerator each call does, so put many checks into one function.

    Args:
        fn: Function at the top level of a module, such as a test file.
        world_size: Number of ranks.
        *args: Further arguments of ``fn`` on each rank; pickled.
        timeout: Seconds for the whole call, the ranks' start included.
        group_timeout: Seconds that a collective may wait for the other ranks.
        backend: Backend of the process group; None for no group.
        threads: Number of torch's threads on each rank.

    Returns:
        Results of ``fn`` by rank; pickled, so that tensors are copies.

    Raises:
        DloError: for a lambda, or a function inside another.
        RankFailed: with the traceback of the first rank that failed; the others have been ended.
    """
    assert world_size >= 1
    if "<" in fn.__qualname__:
        raise DloError(
            f"fn must be a function at a module's top level, because it runs in other processes, got {fn.__qualname__};"
            " move it there"
        )
    store = _store()
    method = multiprocessing.get_start_method(allow_none=True)
    job = Job(
        *_pickled((fn, args)),
        world_size=world_size,
        port=store.port,
        backend=backend,
        group_timeout=group_timeout,
        threads=threads,
        start_method=method,
        environment=dict(os.environ),
        streams=Streams(),
    )
    context = process_context()
    ranks: list[BaseProcess] = []
    answers = []
    try:
        for number in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=rank_module.main, args=(number, job, there), name=f"rank {number}")
            process.start()
            there.close()  # So that the pipe ends when the rank dies.
            ranks.append(process)
            answers.append(here)
        values = _collect(ranks, answers, time.monotonic() + timeout, timeout)
        for process in ranks:
            process.join(_GRACE)
        return values
    finally:
        _end(ranks)
        for here in answers:
            here.close()
        del store


def process_context() -> Any:
    """Returns the multiprocessing context in which new processes start fastest."""
    import torch

    if sys.platform != "linux" or torch.accelerator.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    packages = {*own_packages(), *PRELOADED_PACKAGES}
    here = [name for name in sys.modules if name in _HEAVY or name.partition(".")[0] in packages]
    context.set_forkserver_preload(["torch.distributed", *here])
    return context


class _Pickler(pickle.Pickler):
    """Pickler that notes the modules of the functions and classes that it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, str | None] = {}

    def reducer_override(self, item: Any) -> Any:
        """Notes the module of a function or class, which are pickled as a module and a name."""
        if isinstance(item, type | FunctionType) and item.__module__ != "__main__":  # multiprocessing runs that again.
            self.modules[item.__module__] = module_file(item.__module__)
        return NotImplemented


def _pickled(item: Any) -> tuple[bytes, dict[str, str | None]]:
    """Returns a pickled object, and the modules that must be imported before it is unpickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    return file.getvalue(), pickler.modules


def _store() -> Any:
    """Returns a store that this process serves, on the loopback interface, at a port that the system chose.

    The store gets a socket that listens already: a port that is only known to be free may be taken before its use.
    """
    from datetime import timedelta

    import torch.distributed as dist

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=10),
        master_listen_fd=listener.detach(),
    )


def _collect(ranks: list[BaseProcess], answers: list[Any], deadline: float, timeout: float) -> list[Any]:
    """Returns each rank's value; raises as soon as one fails."""
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        waiting = [here for number, here in enumerate(answers) if number not in values]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [number for number in range(len(ranks)) if number not in values]
            raise RankFailed(
                f"time limit of {timeout:g} s: no answer from {_named(silent)} of {len(ranks)};"
                " a rank waits for another, or timeout is too short",
                None,
            )
        failures: dict[int, Answer | None] = {}
        for number, here in enumerate(answers):
            if here not in ready:
                continue
            answer = _receive(here)
            if answer is None or answer.error is not None:
                failures[number] = answer
            else:
                assert answer.value is not None
                values[number] = pickle.loads(answer.value)
        if failures:
            raise _failure(failures, ranks)
    return [values[number] for number in range(len(ranks))]


def _receive(here: Any) -> Answer | None:
    """Returns a rank's answer; None if it died without one."""
    try:
        return pickle.loads(here.recv_bytes())
    except (EOFError, OSError):
        return None


def _failure(failures: dict[int, Answer | None], ranks: list[BaseProcess]) -> RankFailed:
    """Returns the error of the first rank that failed, of those whose ends were noticed at the same moment.

    A rank that died without an answer comes first: the others' errors are of connections to it.
    """
    first = min(failures, key=lambda number: answer.at if (answer := failures[number]) is not None else 0.0)
    answer = failures[first]
    also = [number for number in failures if number != first]
    others = f"\n({_named(also)} failed too)" if also else ""
    where = f"rank {first} of {len(ranks)}"
    if answer is None:
        ranks[first].join(_GRACE)
        return RankFailed(f"{where} {_ending(ranks[first].exitcode)} before it could answer{others}", first)
    return RankFailed(f"{where} failed:\n\n{answer.error}{others}", first, answer.user_error)


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _named(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _end(ranks: list[BaseProcess]) -> None:
    """Kills the ranks that still run, with the processes they have started."""
    for process in ranks:
        if process.exitcode != 0:
            assert process.pid is not None
            try:
                # A rank makes a process group of its own at its start; before, it has no children.
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, AttributeError):
                process.kill()
        process.join()
        process.close()
