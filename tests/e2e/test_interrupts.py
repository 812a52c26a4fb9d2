"""Ctrl-C while `dlo fit` starts: exit code 130 and one line, whatever is being imported or built."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

FIT = ("fit", "--config", "quickstart", "--trainer.max_steps", "2", "--trainer.accelerator", "cpu")
#: Module after whose import imports are counted: before it, Python starts. First and last of those of `dlo fit`.
START, FIRST, ALL = "dlo_framework.run.process", 5, 5000


def interrupted(folder: Path, *options: str, imports: int = 0, seconds: float = 0.0) -> tuple[int, list[str]]:
    """Returns exit code and lines of a run that gets SIGINT after that many imports, or seconds."""
    command = [sys.executable, *(["-X", "importtime"] if imports else []), "-m", "dlo_framework", *FIT, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # A background job ignores it.
    )
    if not imports:
        threading.Thread(target=lambda: (time.sleep(seconds), os.killpg(run.pid, signal.SIGINT)), daemon=True).start()
    seen, lines = 0, []
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("import time:"):
            seen += seen > 0 or line.endswith(f" {START}\n")
            if seen == imports + 1:
                os.killpg(run.pid, signal.SIGINT)
        else:
            lines.append(line.rstrip())
    return run.wait(), lines


def check(code: int, lines: list[str], where: str) -> None:
    assert code == 130, (where, lines)
    assert sum("interrupted; checkpoints saved" in line for line in lines) == 1, (where, lines)
    assert not any("Traceback" in line or "Fatal" in line for line in lines), (where, lines)


def test_the_imports_of_a_command_end_in_one_line(tmp_path: Path) -> None:
    for imports in (FIRST, 900):  # The command's and torch's.
        code, lines = interrupted(tmp_path, imports=imports)
        check(code, lines, f"after {imports} imports")
        assert len(lines) == 1, lines


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_moment_of_the_start_ends_in_one_line(tmp_path: Path, ranks: int) -> None:
    options = ["--trainer.devices", str(ranks), "--trainer.max_steps", "100000", "--trainer.max_epochs", "-1"]
    for imports in range(FIRST, ALL, 250) if ranks == 1 else ():
        check(*interrupted(tmp_path, *options, imports=imports), f"after {imports} imports")
    for tenth in range(5 if ranks == 1 else 20, 100, 5):
        check(*interrupted(tmp_path, *options, seconds=tenth / 10), f"after {tenth / 10} s")
