"""Main function of a spawned rank: environment, process group, the function, and the answer to the parent.

Nothing heavy is imported at the top: in a spawned rank the number of threads must be set before torch is imported.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple


class Streams:
    """Standard output and error of the caller, for a process forked from a server, which has the server's."""

    def __init__(self, sent: Any = ()) -> None:
        self._sent = sent

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams, ([DupFd(number) for number in (1, 2)],)

    def redirect(self) -> None:
        """Replaces this process's standard output and error by the caller's."""
        for number, sent in zip((1, 2), self._sent, strict=False):
            descriptor = sent.detach()
            if descriptor != number:  # A spawned process has inherited the caller's own.
                os.dup2(descriptor, number)
                os.close(descriptor)


class Job(NamedTuple):
    """Job of a rank, sent by its parent.

    Attributes:
        function: Pickled function with its arguments: ``(function, arguments)``.
        modules: Modules of the pickled objects, each with the file to load it from where its name cannot be imported.
        world_size: Number of ranks.
        port: Port of the parent's store, on the loopback interface.
        backend: Backend of the process group; None for no group.
        group_timeout: Seconds that a collective may take.
        threads: Number of torch's threads on this rank.
        start_method: Start method of this rank's own processes, such as loader workers; None for the system's default.
        environment: Environment variables of the caller.
        streams: Standard output and error of the caller.
    """

    function: bytes
    modules: dict[str, str | None]
    world_size: int
    port: int
    backend: str | None
    group_timeout: float
    threads: int
    start_method: str | None
    environment: dict[str, str]
    streams: Streams


class Answer(NamedTuple):
    """Answer of a rank at its end.

    Attributes:
        value: Pickled result of the function; None if it raised.
        error: Traceback of the function's error; None if it returned.
        user_error: Message of the DloError that the function raised, or that caused its error; None for other ends.
        at: Time in seconds since the epoch, by which the first of several failing ranks is found.
    """

    value: bytes | None
    error: str | None
    user_error: str | None
    at: float


def main(rank: int, job: Job, answer: Connection) -> None:
    """Runs one rank; the target function of its process."""
    _end_with_the_parent()
    gc.freeze()  # The server's imports stay in memory that the ranks share: the garbage collector does not write to it.
    job.streams.redirect()
    faulthandler.enable()  # A rank that dies of SIGSEGV prints its stack.
    os.environ.clear()
    os.environ.update(job.environment)
    multiprocessing.set_start_method(job.start_method, force=True)  # A spawned process would spawn its own too.
    os.environ.update(environment(rank, job.world_size, job.port, job.threads))
    for name in [name for name in os.environ if name.startswith("SLURM_") or name == "DLO_LAUNCHER"]:
        # These ranks are not SLURM's, whose tasks Lightning would count instead, and have no `dlo fit` as launcher.
        del os.environ[name]
    try:
        result = _run(rank, job)
        value = pickle.dumps(result)
    except BaseException as error:
        # Sent before the process group is destroyed, which causes errors on other ranks: this one must be the first.
        _send(answer, Answer(None, traceback.format_exc(), _user_error(error), time.time()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # Destroying the group may wait for ranks that wait for this one.
    _send(answer, Answer(value, None, None, time.time()))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """Returns the environment variables of a rank: those of torchrun, for ``env://`` and Lightning.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes ``init_process_group()`` join the parent's store instead of opening another
    at its port. ``TORCHELASTIC_RUN_ID`` is left out, because it would make Lightning require torchrun's world size for
    a trainer of one process.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(threads),
        **interfaces,
    }


def _run(rank: int, job: Job) -> Any:
    import torch

    torch.set_num_threads(job.threads)
    if "numpy" in sys.modules:  # Forked processes would share their server's random stream.
        sys.modules["numpy"].random.seed()
    for name, file in job.modules.items():
        find_module(name, file)
    function, arguments = pickle.loads(job.function)
    if job.backend is not None:
        _join_group(rank, job)
    return function(rank, job.world_size, *arguments)


def find_module(name: str, file: str | None) -> Any:
    """Imports a module by its name or, where there is none of that name, from its file.

    pytest imports test files under names that no import statement finds (``--import-mode=importlib``); pickled
    functions and classes refer to those names.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the module itself is missing; a missing import inside the module is the caller's error.
        if file is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    inner = module
    while "." in name:  # Unpickling a class imports its module's parents first.
        name, _, last = name.rpartition(".")
        outer = sys.modules.setdefault(name, types.ModuleType(name))
        setattr(outer, last, inner)
        inner = outer
    spec.loader.exec_module(module)
    return module


def _join_group(rank: int, job: Job) -> None:
    """Makes the default process group over the parent's store.

    The ranks first wait for each other at the store: with few cores imports take some ranks seconds longer than others,
    and the group's short time limit is for collectives.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count()) if job.backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    limit = timedelta(minutes=10)
    store = dist.TCPStore("127.0.0.1", job.port, job.world_size, False, limit)  # type: ignore[attr-defined]
    store.set(f"dlo/ready/{rank}", "1")
    store.wait([f"dlo/ready/{other}" for other in range(job.world_size)], limit)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.group_timeout),
        device_id=device,  # Connects at once, as Lightning does: sends between two ranks then wait for earlier work.
    )


def _user_error(error: BaseException) -> str | None:
    from dlo_framework.errors import dlo_error_in

    user_error = dlo_error_in(error)
    return None if user_error is None else str(user_error)


def _send(connection: Connection, answer: Answer) -> None:
    """Sends the answer; where the parent is gone, ends this rank's process group before its watch has found that."""
    try:
        connection.send_bytes(pickle.dumps(answer))
    except BrokenPipeError:
        os.killpg(0, signal.SIGKILL)
    connection.close()


def _end_with_the_parent() -> None:
    """Makes this rank the leader of a process group that ends, with the rank's children, when the parent is gone.

    A daemonic process would end too, but may not start loader workers.
    """
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()
