"""Run folders: they hold a run's checkpoints, events and summary, and later runs find these in them.

``runs/<name>/version_<n>/`` holds ``checkpoints/``, TensorBoard's events, ``config.yaml`` and ``summary.json``. A new
run takes the next free number; ``--ckpt_path last`` continues in the folder that it resumes from, so that one run is
one curve. Only global rank 0 creates a folder; the others receive its path (by the environment if rank 0 starts them,
by Lightning's broadcast if a launcher does).
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes

if TYPE_CHECKING:
    from dlo_framework.checkpoint.loading import Best

#: Set by rank 0 for the ranks that it starts: the requested folder, and the run's.
ENVIRONMENT = "DLO_RUN_FOLDER"
#: Also set by rank 0: the checkpoint that it has found, so that the ranks need not hash it again.
FOUND = "DLO_FOUND_CHECKPOINT"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
LAST = "last.ckpt"
#: A run folder with less free space than this cannot even hold the events of a short run.
LEAST_FREE_BYTES = 16 * 2**20


def versions(folder: Path) -> list[Path]:
    """Returns the runs in ``folder``, newest first."""
    numbered = [path for path in folder.glob("version_*") if path.name.removeprefix("version_").isdigit()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("version_")), reverse=True)


def shown(path: Path) -> Path:
    """Returns a path as a user would type it: relative, if it is in the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def is_first_process() -> bool:
    """Returns whether this is global rank 0, from the variables of torchrun, SLURM and Lightning's launcher."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    # In the shell of a SLURM job all processes, the ranks of Lightning's launcher too, have the same SLURM_PROCID.
    return all(int(os.environ.get(name, "0")) == 0 for name in ("SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))


def _answer_from_rank_0(name: str, question: str) -> str | None:
    """Returns rank 0's answer for the ranks that it started; None on rank 0, or for another question.

    It is used once: a second run in the same process is another run, and so is a command that a run starts.
    """
    answer = os.environ.get(name, "")
    if is_first_process() or not answer.startswith(question):
        return None
    del os.environ[name]
    return answer.removeprefix(question)


def new_run(folder: Path) -> Path:
    """Creates the next run's folder in ``folder``; two jobs that start at once get two.

    Returns:
        The folder, which only rank 0 creates.

    Raises:
        DloError: if it cannot be created or its disk is full.
    """
    question = f"{folder.resolve()}\n"
    told = _answer_from_rank_0(ENVIRONMENT, question)
    if told is not None:
        return Path(told)
    if not is_first_process():
        return folder / "pending"  # Never created: rank 0's folder is broadcast before it is used.
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
                f"cannot create the run folder {path}: {error.strerror}; choose another with --run.dir"
            ) from error
        break
    check_space(path)
    os.environ[ENVIRONMENT] = f"{question}{path}"
    return path


def check_space(path: Path, need: int = LEAST_FREE_BYTES) -> None:
    """Raises a DloError if fewer than ``need`` bytes are free at ``path``."""
    free = shutil.disk_usage(path).free
    if free < need:
        raise DloError(
            f"no space in the run folder: need {format_bytes(need)}, {format_bytes(free)} free in {path};"
            " free some, or choose another folder with --run.dir"
        )


def find_checkpoint(folder: Path, which: str, only: Path | None = None) -> Path:
    """Returns the checkpoint ``last`` or ``best`` of the newest run in ``folder`` that has any checkpoint.

    ``last`` is the newest one, by its step, that is valid, that a run can resume from and that the run has not
    superseded; damaged ones are skipped with a warning. All of its bytes are hashed for that, by rank 0 alone if it
    starts the others.

    Args:
        folder: Folder of the runs.
        which: `last` or `best`.
        only: Run of the folder to look in; None for all.

    Raises:
        DloError: if there is none, or the run has others but no best one.
    """
    question = f"{which}\n{folder.resolve()}\n"
    told = _answer_from_rank_0(FOUND, question)
    if told is not None:
        return Path(told)
    for run in versions(folder) if only is None else [only]:
        path = checkpoint_of(run, which)
        if path is not None:
            os.environ[FOUND] = f"{question}{path}"
            return path
        if which == "best":
            _check_skipped_run(run)
    raise DloError(
        f"--ckpt_path {which}: {f'no run in {folder}' if only is None else only} has {'a' if only is None else 'no'}"
        f" {which} checkpoint;"
        " train one with `dlo fit`, or set the checkpoint's path"
        + (" (a run saves a best one if its model has a best_metric or logs val_loss)" if which == "best" else "")
    )


def checkpoint_of(run: Path, which: str, *, weights_only: bool = False) -> Path | None:
    """Returns the checkpoint ``last`` or ``best`` of one run; None if it has none.

    Args:
        run: Folder of the run.
        which: `last` or `best`.
        weights_only: Whether one without optimizer state will do as the last; its bytes are not hashed then.
    """
    from dlo_framework.checkpoint import locate, newest_valid

    if which == "best":
        path = best_checkpoint(run)
    elif weights_only:
        path = newest_valid(run / CHECKPOINTS, "size", weights_only=True)
    else:
        path = newest_valid(run / CHECKPOINTS)
    return path if path is not None and locate(path) is not None else None


def _check_skipped_run(run: Path) -> None:
    """Warns of a run without checkpoints; refuses to use an older run's best one in place of another run's."""
    from dlo_framework.checkpoint import newest_valid

    best = best_checkpoint(run)
    if best is None and newest_valid(run / CHECKPOINTS, "size", weights_only=True) is None:
        warnings.warn(f"skipping {run}: it has no checkpoint", stacklevel=3)
        return
    says = "has none" if best is None else f"records {best}, which does not exist"
    raise DloError(
        f"--ckpt_path best: the newest run, {run}, {says};"
        " use --ckpt_path last, or the path of a checkpoint, for example an older run's"
    )


def unfinished(folder: Path) -> Path | None:
    """Returns the last checkpoint of the newest run in ``folder`` if that run has not finished; None if it has.

    It also returns None if the newest run has no checkpoint yet: older runs are other runs.
    """
    from dlo_framework.checkpoint import newest_valid, step_of

    question = f"auto\n{folder.resolve()}\n"
    told = _answer_from_rank_0(FOUND, question)
    if told is not None:
        return Path(told) if told else None
    run = next(iter(versions(folder)), None)
    path = newest_valid(run / CHECKPOINTS) if run is not None else None
    if run is not None and path is not None:
        summary = current_summary(run)
        if summary is not None and summary["status"] == "finished" and int(summary["steps"]) >= step_of(path):
            path = None
    os.environ[FOUND] = f"{question}{path or ''}"
    return path


def current_summary(run: Path) -> dict[str, Any] | None:
    """Returns a run's summary; None if it has none, or has continued since it was written."""
    from dlo_framework.checkpoint import resumptions

    try:
        summary = json.loads((run / SUMMARY).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return summary if summary.get("resumptions", 0) == resumptions(run / CHECKPOINTS) else None


def best_checkpoint(run: Path) -> Path | None:
    """Returns the best checkpoint of a run; None if none is recorded.

    The summary records it, or the newest checkpoint before the summary is written: the run still trains, or was killed.
    """
    summary = current_summary(run)
    if summary is not None:
        named = summary.get("best_checkpoint")
        return run / named if named else None
    best = best_until_newest(run)
    return best.path if best is not None else None


def best_until_newest(run: Path) -> Best | None:
    """Returns a run's best checkpoint as recorded in its newest; None if there is none."""
    from dlo_framework.checkpoint import best_kept, newest_valid

    newest = newest_valid(run / CHECKPOINTS, "size")
    return best_kept(newest, run.resolve()) if newest is not None else None
