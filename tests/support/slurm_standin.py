"""Stand-in for SLURM on one machine: `sbatch` of a job array, whose tasks are processes; `srun` and `scontrol requeue`.

`sbatch SCRIPT` reads `#SBATCH --array` and `--requeue`, runs all tasks at the same time with the variables that SLURM
sets, and returns when no task is left. A task that is killed (a node that fails) starts again if the script has
`--requeue`, and so does one that a script puts back by `scontrol requeue`. As in SLURM, signals before a time limit go
to what `srun` has started, and not to the script.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ARRAY_JOB = "4711"


def install(folder: Path) -> Path:
    """Writes `sbatch`, `srun`, `scontrol` and `dlo` to a folder for PATH; returns it."""
    folder.mkdir()
    here = Path(__file__).resolve()
    commands = {name: f'exec {sys.executable} {here} {name} "$@"' for name in ("sbatch", "scontrol", "srun")}
    commands["dlo"] = f'exec {sys.executable} -m dlo_framework "$@"'
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def sbatch(script: Path) -> int:
    """Runs an array's tasks to their ends; returns the number of tasks that failed."""
    text = script.read_text()
    first, last = map(int, re.search(r"#SBATCH --array=(\d+)-(\d+)", text).groups())  # type: ignore[union-attr]
    folder = Path(os.environ["SLURM_STANDIN"])
    tasks = {number: start(script, number, 0) for number in range(first, last + 1)}
    restarts, failed = dict.fromkeys(tasks, 0), 0
    while tasks:
        pid, status = os.wait()
        number = next(number for number, task in tasks.items() if task.pid == pid)
        task = tasks.pop(number)
        code = task.returncode = os.waitstatus_to_exitcode(status)
        (folder / "ended").open("a").write(f"{number} {restarts[number]} {code}\n")
        wanted = folder / f"requeue {ARRAY_JOB}_{number}"
        if wanted.exists() or (code == -signal.SIGKILL and "#SBATCH --requeue" in text):
            wanted.unlink(missing_ok=True)
            restarts[number] += 1
            tasks[number] = start(script, number, restarts[number])
        else:
            failed += code != 0
    return failed


def start(script: Path, number: int, restarts: int) -> subprocess.Popen[bytes]:
    """Starts a task of an array in a process group of its own."""
    folder = Path(os.environ["SLURM_STANDIN"])
    own = {
        "SLURM_JOB_ID": str(int(ARRAY_JOB) + number),
        "SLURM_ARRAY_JOB_ID": ARRAY_JOB,
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_NAME": "sweep",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "127.0.0.1",
    }
    output = (folder / f"task {number}.log").open("ab")
    task = subprocess.Popen(
        ["bash", str(script)], env=os.environ | own, stdout=output, stderr=output, start_new_session=True
    )
    (folder / f"task {number}.pid").write_text(str(task.pid))
    return task


def srun(words: list[str]) -> None:
    """Becomes the command, as the only task of a step."""
    command = [word for number, word in enumerate(words) if not all(w.startswith("--") for w in words[: number + 1])]
    own = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    own["SLURM_NODELIST"] = "127.0.0.1"
    folder = Path(os.environ["SLURM_STANDIN"])
    (folder / f"step {os.environ['SLURM_ARRAY_TASK_ID']}.pid").write_text(str(os.getpid()))
    os.execvpe(command[0], command, os.environ | own)


def scontrol(verb: str, task: str) -> None:
    """Notes a task that is put back into the queue."""
    assert verb == "requeue"
    Path(os.environ["SLURM_STANDIN"], f"requeue {task}").touch()


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    if name == "sbatch":
        sys.exit(sbatch(Path(words[0])))
    elif name == "srun":
        srun(words)
    else:
        scontrol(*words)
