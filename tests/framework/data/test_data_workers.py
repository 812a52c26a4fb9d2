"""Loading processes and requests to stop: signals that reach the workers too, and their effect by sender."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import Dataset

from dlo_framework.data import ResumableLoader, ignore_stop_signals
from dlo_framework.data.loader import stop_signals_held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who sent a signal")


class WhoLoads(Dataset):
    """Each item is the id of the process that loaded it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


def loaded_by(loader: ResumableLoader) -> set[int]:
    return {int(pid) for batch in loader for pid in batch}


@pytest.fixture
def loader():
    loader = ResumableLoader(WhoLoads(), batch_size=4, shuffle=True, drop_last=True, num_workers=2)
    yield loader
    loader.close()


@pytest.mark.parametrize("name", ["INT", "USR1", "TERM"])
def test_a_signal_to_all_of_a_job_leaves_the_workers(loader: ResumableLoader, name: str) -> None:
    before = loaded_by(loader)
    assert len(before) == 2
    subprocess.run(["kill", f"-{name}", *map(str, before)], check=True)
    time.sleep(0.2)
    assert loaded_by(loader) == before


def test_a_signal_while_workers_start_leaves_them_and_comes_to_the_run() -> None:
    """Sent from within the start, by a process other than the run's."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    try:
        with stop_signals_held():
            subprocess.run(["kill", "-TERM", str(os.getpid())], check=True)
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1.0,))
            worker.start()
            subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        assert got == [signal.SIGTERM]
        worker.join(10)
        assert worker.exitcode == 0, "it has slept to its end"
    finally:
        signal.signal(signal.SIGTERM, before)


def deaf(ready) -> None:
    ignore_stop_signals()
    ready.set()
    time.sleep(60)


def test_the_run_itself_can_end_a_worker() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=deaf, args=(ready,))
    worker.start()
    assert ready.wait(30)
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
