"""The command itself, run as a user runs it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DLO = str(Path(sys.executable).with_name("dlo"))


class Command:
    """Runs ``dlo`` in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self) -> dict[str, str]:
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
        return mine | {"COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [DLO, *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, code: int = 0) -> subprocess.CompletedProcess:
        process = self.start(*words)
        out, err = process.communicate(timeout=280)
        assert process.returncode == code, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-6000:]}"
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def dlo(tmp_path) -> Command:
    return Command(tmp_path)


@pytest.fixture(scope="module")
def shared_dlo(tmp_path_factory) -> Command:
    return Command(tmp_path_factory.mktemp("runs"))
