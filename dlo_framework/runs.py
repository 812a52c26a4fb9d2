"""Run folders: where a run keeps its checkpoints, its events and its summary, and how a later one finds them.

``runs/<name>/version_<n>/`` holds ``checkpoints/``, TensorBoard's events, ``config.yaml`` and ``summary.json``.
A new run takes the next free number; ``--ckpt_path last`` goes on in the folder it resumes from, so that one
run is one curve. Only global rank 0 makes a folder: the others are told (by the environment where rank 0
starts them, by a broadcast of Lightning's where a launcher does).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from dlo_framework.amounts import human
from dlo_framework.errors import DloError

#: Set by rank 0 for the ranks that it starts.
ENVIRONMENT = "DLO_RUN_FOLDER"
#: Likewise: the checkpoint that rank 0 has found, so that the ranks that it starts need not hash it again.
FOUND = "DLO_FOUND_CHECKPOINT"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
LAST = "last.ckpt"
#: A run folder with less room than this cannot even hold the events of a short run.
LEAST_FREE_BYTES = 16 * 2**20


def versions(folder: Path) -> list[Path]:
    """Returns the runs in ``folder``, newest first."""
    numbered = [path for path in folder.glob("version_*") if path.name.removeprefix("version_").isdigit()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("version_")), reverse=True)


def is_first_process() -> bool:
    """Returns whether this is global rank 0, from the variables of torchrun, SLURM and Lightning's launcher."""
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name]) == 0
    return int(os.environ.get("LOCAL_RANK", "0")) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0


def new_run(folder: Path) -> Path:
    """Makes the next run's folder in ``folder``; two jobs that start at once get two.

    Returns:
        The folder, which only rank 0 makes.

    Raises:
        DloError: if it cannot be made or its disk is full.
    """
    if ENVIRONMENT in os.environ:
        return Path(os.environ[ENVIRONMENT])
    if not is_first_process():
        return folder / "pending"  # Never made: rank 0's folder is broadcast before it is used.
    number = int(versions(folder)[0].name.removeprefix("version_")) + 1 if versions(folder) else 0
    while True:
        path = folder / f"version_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise DloError(
                f"cannot make the run folder {path}: {error.strerror}; choose another with --run.dir"
            ) from error
        break
    check_space(path)
    os.environ[ENVIRONMENT] = str(path)
    return path


def check_space(path: Path, need: int = LEAST_FREE_BYTES) -> None:
    """Raises a DloError if fewer than ``need`` bytes are free at ``path``."""
    free = shutil.disk_usage(path).free
    if free < need:
        raise DloError(
            f"no space in the run folder: need {human(need)}, {human(free)} free in {path};"
            " free some, or choose another folder with --run.dir"
        )


def find_checkpoint(folder: Path, which: str) -> Path:
    """Returns the checkpoint ``last`` or ``best`` of the newest run in ``folder`` that has one.

    ``last`` is the newest one, by its step, that is whole and that a run can go on from; damaged ones are passed over
    with a warning. All of its bytes are hashed for that, by rank 0 alone where that starts the others.

    Raises:
        DloError: if there is none.
    """
    from dlo_framework.checkpoint import locate, newest_valid

    question = f"{which}\n{folder.resolve()}\n"
    answer = os.environ.get(FOUND, "")
    if answer.startswith(question) and not is_first_process():
        return Path(answer.removeprefix(question))
    for run in versions(folder):
        path = newest_valid(run / CHECKPOINTS) if which == "last" else best_checkpoint(run)
        if path is not None and locate(path) is not None:
            os.environ[FOUND] = f"{question}{path}"
            return path
    raise DloError(
        f"--ckpt_path {which}: no run in {folder} has a {which} checkpoint;"
        " train one with `dlo fit`, or give the checkpoint's path"
        + (" (a run keeps a best one if its model has a best_metric)" if which == "best" else "")
    )


def unfinished(folder: Path) -> Path | None:
    """Returns the last checkpoint of the newest run in ``folder`` if that run has not finished; None if it has.

    None too where the newest run has no checkpoint yet: there is nothing to go on from, and older runs are other runs.
    """
    from dlo_framework.checkpoint import newest_valid, step_of

    question = f"auto\n{folder.resolve()}\n"
    answer = os.environ.get(FOUND, "")
    if answer.startswith(question) and not is_first_process():
        found = answer.removeprefix(question)
        return Path(found) if found else None
    run = next(iter(versions(folder)), None)
    path = newest_valid(run / CHECKPOINTS) if run is not None else None
    if run is not None and path is not None and _steps_done(run) >= step_of(path):
        path = None
    os.environ[FOUND] = f"{question}{path or ''}"
    return path


def _steps_done(run: Path) -> float:
    """Returns the steps of a run that has finished; less than any number of steps if it has not."""
    try:
        summary = json.loads((run / SUMMARY).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return -1
    return int(summary["steps"]) if summary["status"] == "finished" else -1


def best_checkpoint(run: Path) -> Path | None:
    """Returns the best checkpoint of a run, from its summary; None if the run names none."""
    try:
        best = json.loads((run / SUMMARY).read_text())["best_checkpoint"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return None
    return run / best if best else None
