"""Functions on several ranks: their values, the first failure's traceback, the time limit, and nobody left behind."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.errors import DloError
from dlo_framework.testing import RankFailed, run_distributed, spawn


class Pair(NamedTuple):
    """A class that only this file has: it has to be found in the ranks, and its values here again."""

    rank: int
    tensor: torch.Tensor


def _facts(rank: int, world_size: int, pair: Pair) -> dict:
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    # Workers: a daemonic rank could have none.
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1)
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    return {
        "pair": Pair(rank, pair.tensor * rank),
        "total": float(total),
        "world_size": (world_size, dist.get_world_size()),
        "threads": (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
        "backend": dist.get_backend(),
        "loaded": [batch.tolist() for (batch,) in loader],
        "port": f"0100007F:{int(os.environ['MASTER_PORT']):04X}" in listening,
        "environment": {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
    }


def _print_twice(rank: int, world_size: int) -> None:
    print(f"rank {rank} printed", flush=True)
    os.write(2, b"rank wrote\n")


@pytest.mark.slow
def test_spawned_ranks_have_the_callers_streams(monkeypatch, capfd):
    """As with an accelerator, whose driver does not survive a fork."""
    monkeypatch.setattr(spawn, "process_context", lambda: multiprocessing.get_context("spawn"))
    run_distributed(_print_twice, 2, backend=None)
    printed = capfd.readouterr()
    lines = sorted(line for line in printed.out.splitlines() if "printed" in line)
    assert lines == ["rank 0 printed", "rank 1 printed"]
    assert printed.err.count("rank wrote") == 2


def test_each_rank_returns_its_value():
    found = run_distributed(_facts, 2, Pair(7, torch.ones(2)))
    for rank, facts in enumerate(found):
        assert facts["pair"].rank == rank
        assert torch.equal(facts["pair"].tensor, rank * torch.ones(2))
        assert facts["total"] == 3.0
        assert facts["world_size"] == (2, 2)
        assert facts["threads"] == (1, "1")
        assert facts["backend"] == "gloo"
        assert facts["loaded"] == [[0, 1], [2, 3]]
        assert facts["port"], "the store listens on the loopback interface"
        assert facts["environment"] == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}


def _caller(rank: int, world_size: int) -> tuple[str, str, float]:
    print(f"rank {rank} is here", flush=True)
    return os.environ.get("FROM_CALLER", ""), os.getcwd(), np.random.rand()


def test_a_rank_has_its_callers_environment_folder_output_and_an_own_random_stream(monkeypatch, tmp_path, capfd):
    """Also after the first call, whose processes may be forked from the same server."""
    numbers = set()
    for value in ("one", "two"):
        folder = tmp_path / value
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FROM_CALLER", value)
        found = run_distributed(_caller, 2, backend=None)
        assert [facts[:2] for facts in found] == [(value, str(folder))] * 2
        numbers |= {facts[2] for facts in found}
        assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["rank 0 is here", "rank 1 is here"]
    assert len(numbers) == 4


def _pids_then(rank: int, world_size: int, folder: str, how: str) -> None:
    """Writes its process's id, and that of a child of its own, and then goes wrong on rank 1."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"{rank}.pid").write_text(f"{os.getpid()} {child.pid}")
    dist.barrier()
    if rank == 1:
        if how == "raise":
            raise ValueError(f"no such luck on rank {rank}")
        if how == "refuse":
            raise DloError("bad input: set x=3")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            ctypes.string_at(0)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "sleep":
            time.sleep(600)
    dist.barrier()


def _left(folder: Path) -> list[int]:
    """Returns the processes that still run a few seconds later: a signal takes a moment."""
    pids = [int(pid) for file in folder.glob("*.pid") for pid in file.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("how", "rank", "message", "limits"),
    [
        ("raise", 1, r"rank 1 of 2 failed:\n\nTraceback[\s\S]*_pids_then[\s\S]*ValueError: no such luck on rank 1", {}),
        ("refuse", 1, r"rank 1 of 2 failed:[\s\S]*DloError: bad input: set x=3", {}),
        ("kill", 1, r"rank 1 of 2 was killed by SIGKILL before it could answer", {}),
        ("crash", 1, r"rank 1 of 2 was killed by SIGSEGV before it could answer", {}),
        # A rank that is silent meets the time limit, and a collective its own one before.
        ("stop", None, r"time limit of 5 s: no answer from ranks 0, 1 of 2", {"timeout": 5, "group_timeout": 200}),
        ("stop", 0, r"rank 0 of 2 failed:[\s\S]*[Tt]imed out", {"group_timeout": 2}),
    ],
)
def test_the_first_failure_is_told_and_ends_the_others(tmp_path, capfd, how, rank, message, limits):
    with pytest.raises(RankFailed, match=message) as caught:
        run_distributed(_pids_then, 2, str(tmp_path), how, **limits)
    assert caught.value.rank == rank
    assert caught.value.user_error == ("bad input: set x=3" if how == "refuse" else None)
    told = capfd.readouterr().err
    assert how != "crash" or ("Segmentation fault" in told and "in _pids_then" in told), told
    assert _left(tmp_path) == []


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_run_distributed import _pids_then; from dlo_framework.testing import run_distributed\n"
        "run_distributed(_pids_then, 2, sys.argv[2], 'sleep', group_timeout=200)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.pid"))) < 2 or not all(f.read_text() for f in tmp_path.glob("*.pid")):
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert _left(tmp_path) == []


def test_a_function_that_ranks_cannot_find_is_refused():
    with pytest.raises(DloError, match="top level"):
        run_distributed(lambda rank, world_size: None, 2)


def _own_group(rank: int, world_size: int) -> float:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    return float(total)


def test_without_a_backend_the_function_makes_its_own_group():
    assert run_distributed(_own_group, 2, backend=None) == [2.0, 2.0]
