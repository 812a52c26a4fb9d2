"""What runs in a rank: the environment, the process group, the function, and the answer to the parent.

Nothing heavy is imported at the top: where each rank is spawned, the number of threads has to be set before torch is.
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
    """The caller's standard output and error; a process that was forked from a server has that one's."""

    def __init__(self) -> None:
        self._sent: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams._of, ([DupFd(number) for number in (1, 2)] if hasattr(os, "fork") else [],)

    @staticmethod
    def _of(sent: list[Any]) -> Streams:
        streams = Streams()
        streams._sent = sent
        return streams

    def take_over(self) -> None:
        """Makes them this process's."""
        for number, sent in zip((1, 2), self._sent, strict=False):
            descriptor = sent.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


class Job(NamedTuple):
    """What a rank is told.

    Attributes:
        function: pickled, with its arguments: ``(function, arguments)``.
        modules: those that what is pickled comes from, each with the file that it is loaded from where its name cannot
            be imported.
        world_size: the number of ranks.
        port: of the parent's store, on the loopback interface.
        backend: of the process group; None for no group.
        group_timeout: seconds that a collective may take.
        threads: of torch's, on this rank.
        start_method: by which this rank starts processes, a loader's workers say; None for the system's default.
        environment: the caller's.
        streams: the caller's.
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
    """What a rank says at its end.

    Attributes:
        value: pickled; what the function returned, where it did.
        error: the traceback, where it raised.
        user_error: the message of a DloError that it raised, or that was behind what it raised.
        at: seconds since the epoch, so that the first of several failing ranks can be told.
    """

    value: bytes | None
    error: str | None
    user_error: str | None
    at: float


def main(rank: int, job: Job, answer: Connection) -> None:
    """Runs one rank; the target of its process."""
    _end_with_the_parent()
    gc.freeze()  # What the server has imported stays in memory that the ranks share: no collection writes to it.
    job.streams.take_over()
    faulthandler.enable()  # A rank that dies of SIGSEGV says where.
    os.environ.clear()
    os.environ.update(job.environment)
    multiprocessing.set_start_method(job.start_method, force=True)  # A spawned process would spawn its own too.
    os.environ.update(environment(rank, job.world_size, job.port, job.threads))
    for name in [name for name in os.environ if name.startswith("SLURM_") or name == "DLO_LAUNCHER"]:
        # These ranks are ours, not SLURM's: Lightning would count its tasks instead. Nor are they those of a fit that
        # this process' starter has made: they would look for it in vain.
        del os.environ[name]
    try:
        result = _run(rank, job)
        value = pickle.dumps(result)
    except BaseException as error:
        # Before anything is taken down: the other ranks' errors, which that causes, come later.
        answer.send_bytes(pickle.dumps(Answer(None, traceback.format_exc(), _user_error(error), time.time())))
        answer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # Taking the group down may wait for ranks that wait for this one.
    answer.send_bytes(pickle.dumps(Answer(value, None, None, time.time())))
    answer.close()
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """Returns the variables of a rank: torchrun's, so that ``env://`` and Lightning find their place.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes ``init_process_group()`` join the parent's store instead of opening another
    at its port; ``TORCHELASTIC_RUN_ID`` is left out, because it would make Lightning demand torchrun's world size of a
    trainer that is to run on one process.
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
        # Only where the name itself is not there; a missing import inside the module is the caller's to see.
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

    The ranks first wait for each other at the store: importing takes some of them seconds longer than others where
    cores are few, and the group's short limit is for its collectives.
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
        device_id=device,  # Connected at once, as Lightning has it: messages between two ranks wait for other work.
    )


def _user_error(error: BaseException) -> str | None:
    from dlo_framework.errors import dlo_error_in

    found = dlo_error_in(error)
    return None if found is None else str(found)


def _end_with_the_parent() -> None:
    """Makes this rank a process group of its own that ends, with the processes it started, when its parent is gone.

    A daemonic process would end too, but may not start loaders' workers.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        if hasattr(os, "killpg"):
            os.killpg(os.getpgid(0), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()
