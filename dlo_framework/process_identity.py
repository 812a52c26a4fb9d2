"""Identity of processes across hosts, and files that only one of several processes can create."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4


def this_process() -> dict[str, Any]:
    """Returns what identifies this process to others, on any host: a JSON object."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "start": start_time(pid),
        "machine": machine_id(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def machine_id() -> str:
    """Returns an identifier of the processes visible to this one: a boot of a host, and a container in it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def start_time(pid: int) -> str:
    """Returns the start time of a process, in the system's own units; empty if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return ""
    try:  # No such files here (macOS): the process id must suffice.
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return str(pid)


def create_once(path: Path, text: str) -> bool:
    """Creates a file with its content atomically; returns False if it exists.

    Raises:
        OSError: If the folder cannot be written to.
    """
    draft = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        draft.write_text(text)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # The file system has no hard links.
            try:
                with open(path, "x") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True
    finally:
        draft.unlink(missing_ok=True)


def file_system_time(folder: Path) -> float:
    """Returns the time by the clock that stamps files: a server's may differ from this host's."""
    probe = folder / f".clock-{uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
