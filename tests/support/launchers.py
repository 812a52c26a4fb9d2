"""What other launchers than dlo's own tell a rank: a free port, and SLURM's variables; and a wait for what ranks do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(happened: Callable[[], object], seconds: float = 200, said: Callable[[], object] = str) -> None:
    """Waits until something has happened; fails after some seconds, with what was said until then."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, said()
        time.sleep(0.02)


def slurm_task(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns the environment of one task of a SLURM job on this host."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
    }
