"""Stand-in for SLURM on one machine: `sbatch` of a job or a job array, `srun`, and `scontrol requeue`.

`sbatch` reads options as SLURM does, and refuses what SLURM refuses; with `SLURM_STANDIN_SITE=jean-zay`, what Jean Zay
refuses too. It runs all tasks of an array at the same time with the variables that SLURM sets, and returns when none is
left. A task that is killed (a node that fails) starts again if the script has `--requeue`, and so does one that a
script puts back by `scontrol requeue`. As in SLURM, signals before a time limit go to what `srun` has started, and not
to the script.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from support.launchers import free_port, slurm_task

JOB = "4711"
FLAGS = {"requeue", "test-only"}
VALUED = {"account", "array", "constraint", "cpus-per-task", "gres", "hint", "job-name", "mem", "nodes", "ntasks"}
VALUED |= {"ntasks-per-node", "open-mode", "output", "partition", "qos", "signal", "time"}
SHORT = {"-A": "account", "-C": "constraint", "-c": "cpus-per-task", "-n": "ntasks", "-q": "qos", "-t": "time"}
#: Jean Zay's nodes by constraint: suffix of the accounts, beginning of the QoS, GPUs and cores.
NODES = {
    "v100-16g": ("v100", "qos_gpu", 4, 40),
    "v100-32g": ("v100", "qos_gpu", 4, 40),
    "a100": ("a100", "qos_gpu_a100", 8, 64),
    "h100": ("h100", "qos_gpu_h100", 4, 96),
}
HOURS = {"t3": 20, "t4": 100, "dev": 2}


class Refused(Exception):
    """Error of `sbatch` or `srun`."""


def install(folder: Path) -> Path:
    """Writes `sbatch`, `srun`, `scontrol`, `module` and `dlo` to a folder for PATH; returns it."""
    folder.mkdir()
    tests = Path(__file__).resolve().parents[1]
    start = f"PYTHONPATH={tests}:$PYTHONPATH exec {sys.executable} -m support.slurm_standin"
    commands = {name: f'{start} {name} "$@"' for name in ("sbatch", "scontrol", "srun")}
    commands["dlo"] = f'exec {sys.executable} -m dlo_framework "$@"'
    commands["module"] = r'[[ "$*" =~ ^(purge|load (arch/[ah]100|miniforge/24.9.0))$ ]]'
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def read_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the options before the first other word, and the words from there on."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        name, equals, value = left.pop(0).partition("=")
        long = SHORT.get(name, name[2:])
        if long not in FLAGS | VALUED or (long in VALUED and not equals and not left):
            raise Refused(f"unrecognized option '{name}'")
        options[long] = value if equals or long in FLAGS else left.pop(0)
    return options, left


def check_job(words: list[str], site: str = "") -> tuple[dict[str, str], list[str]]:
    """Returns the options of an `sbatch`, those of the script included, and the words from the script's name on."""
    given, left = read_options(words)
    lines = re.findall(r"^#SBATCH (.+)", Path(left[0]).read_text(), re.M)
    options, _ = read_options([word for line in lines for word in shlex.split(line, comments=True)])
    options |= given
    tasks, gpus = int(options.get("ntasks-per-node", 1)), int(options.get("gres", "gpu:1").rpartition(":")[2])
    if tasks != gpus:
        raise Refused(f"{tasks} tasks on the {gpus} GPUs of a node: each rank is a task with one GPU")
    if site == "jean-zay":
        check_jean_zay(options, tasks)
    return options, left


def check_jean_zay(options: dict[str, str], tasks: int) -> None:
    """Refuses what Jean Zay refuses."""
    if "mem" in options:
        raise Refused("Memory specification can not be satisfied: --mem is disabled")
    if options.get("constraint", "v100-16g") not in NODES:
        raise Refused("Invalid feature specification")
    kind, beginning, gpus, cores = NODES[options.get("constraint", "v100-16g")]
    if "@" not in options.get("account", ""):
        raise Refused("Invalid account or account/partition combination specified")
    if options["account"].partition("@")[2] != kind:
        raise Refused("Invalid job type for the account of the user")
    qos, _, limit = options.get("qos", f"{beginning}-t3").rpartition("-")
    if qos != beginning or limit not in HOURS or (kind, limit) == ("a100", "t4"):
        raise Refused("Invalid qos specification")
    hours, minutes, seconds = map(int, options.get("time", "00:10:00").split(":"))
    if hours + minutes / 60 + seconds / 3600 > HOURS[limit]:
        raise Refused("Requested time limit is invalid (missing or exceeds some limit)")
    if tasks > gpus or tasks * int(options.get("cpus-per-task", 1)) > cores:
        raise Refused("Requested node configuration is not available")


def sbatch(words: list[str]) -> int:
    """Runs a job's or an array's tasks to their ends; returns the number of tasks that failed."""
    options, command = check_job(words, os.environ.get("SLURM_STANDIN_SITE", ""))
    if "test-only" in options:
        return 0
    first, _, last = options.get("array", "0").partition("-")
    folder = Path(os.environ["SLURM_STANDIN"])
    tasks = {number: start(command, options, number, 0) for number in range(int(first), int(last or first) + 1)}
    restarts, failed = dict.fromkeys(tasks, 0), 0
    while tasks:
        pid, status = os.wait()
        number = next(number for number, task in tasks.items() if task.pid == pid)
        task = tasks.pop(number)
        code = task.returncode = os.waitstatus_to_exitcode(status)
        (folder / "ended").open("a").write(f"{number} {restarts[number]} {code}\n")
        wanted = folder / f"requeue {JOB}{f'_{number}' if 'array' in options else ''}"
        if wanted.exists() or (code == -signal.SIGKILL and "requeue" in options):
            wanted.unlink(missing_ok=True)
            restarts[number] += 1
            tasks[number] = start(command, options, number, restarts[number])
        else:
            failed += code != 0
    return failed


def start(command: list[str], options: dict[str, str], number: int, restarts: int) -> subprocess.Popen[bytes]:
    """Starts a task of an array, or a job, in a process group of its own."""
    folder = Path(os.environ["SLURM_STANDIN"])
    own = {
        "SLURM_JOB_ID": str(int(JOB) + number),
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_NAME": options["job-name"],
        "SLURM_JOB_ACCOUNT": options.get("account", ""),
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": options.get("ntasks", options.get("ntasks-per-node", "1")),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    if "array" in options:
        own |= {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": str(number)}
    if "ntasks-per-node" in options:
        own["SLURM_NTASKS_PER_NODE"] = options["ntasks-per-node"]
    output = (folder / f"task {number}.log").open("ab")
    task = subprocess.Popen(
        ["bash", *command], env=os.environ | own, stdout=output, stderr=output, start_new_session=True
    )
    (folder / f"task {number}.pid").write_text(str(task.pid))
    return task


def srun(words: list[str]) -> int:
    """Runs a command in the tasks of a step; returns the largest exit code. A signal goes to each task."""
    options, command = read_options(words)
    cpus = options.get("cpus-per-task", os.environ.get("SRUN_CPUS_PER_TASK", "1"))
    if cpus != os.environ["SLURM_CPUS_PER_TASK"]:
        raise Refused(f"a task has {cpus} CPU of the job's {os.environ['SLURM_CPUS_PER_TASK']}: SRUN_CPUS_PER_TASK")
    count, port = int(options.get("ntasks", os.environ["SLURM_NTASKS"])), free_port()
    own = [slurm_task(rank, count, port) | {"SLURM_STEP_ID": "0"} | os.environ for rank in range(count)]
    tasks = [subprocess.Popen(command, env=environment) for environment in own]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
    step = f"step {os.environ.get('SLURM_ARRAY_TASK_ID', '0')}.pid"
    Path(os.environ["SLURM_STANDIN"], step).write_text(str(os.getpid()))
    return max(task.wait() % 256 for task in tasks)


def scontrol(words: list[str]) -> int:
    """Notes a task that is put back into the queue."""
    verb, task = words
    assert verb == "requeue"
    Path(os.environ["SLURM_STANDIN"], f"requeue {task}").touch()
    return 0


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    try:
        sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[name](given))
    except Refused as refused:
        sys.exit(f"{name}: error: {refused}")
