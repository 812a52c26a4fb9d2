"""Lists the checkpoints in a folder, finds the newest valid one, and records which a resumed run has superseded.

A run that has reached step 900 and resumes from step 500 takes another path from there. By their steps the superseded
checkpoints are newer than all that it saves until it reaches 900 again. So each resumption is recorded beside the
checkpoints, as a line in ``resumed.jsonl``, with the checkpoints that it supersedes, by name and by their recorded time
of saving. Those times are only compared for equality, never for order: clocks that differ do not matter.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlo_framework.atomic_file import PARTIAL
from dlo_framework.checkpoint.manifest import MANIFEST, STATE
from dlo_framework.checkpoint.store import OLD, REMOVED, locate, read_manifest, refuse_remote, store_of, write_whole
from dlo_framework.checkpoint.verify import Level, find_damage
from dlo_framework.errors import DloError

RESUMED = "resumed.jsonl"


@dataclass(frozen=True)
class Entry:
    """Checkpoint in a folder.

    Attributes:
        path: Path of the checkpoint; after a kill there may be nothing there yet.
        step: Optimizer steps done; infinity if the checkpoint cannot be read.
        time: Time of the save, in seconds since 1970.
        weights_only: True if it has no optimizer state.
        problem: Reason why it cannot be read; None if it can.
    """

    path: Path
    step: float
    time: float
    weights_only: bool
    problem: str | None = None

    def is_in(self, left: dict[str, float]) -> bool:
        """Returns whether this checkpoint is among the superseded ones, by name and time."""
        return left.get(self.path.name) == self.time


def list_entries(folder: Path) -> list[Entry]:
    """Returns the checkpoints in a folder, without reading their tensors.

    Those that a killed save was about to rename are among them.
    """
    names: set[Path] = set()
    store = store_of(folder)
    for name in store.list(folder):
        path, status = folder / name, store.status(folder / name)
        if path.suffix in (PARTIAL, OLD):
            if locate(path.with_suffix("")) not in (None, path.with_suffix("")):
                names.add(path.with_suffix(""))
        elif status is not None and path.suffix != REMOVED:
            is_folder_checkpoint = status.is_folder and not {MANIFEST, STATE}.isdisjoint(store.list(path))
            if is_folder_checkpoint or (not status.is_folder and path.suffix == ".ckpt"):
                names.add(path)
    return [entry for path in sorted(names) if (entry := read_entry(path)) is not None]


def read_entry(path: Path) -> Entry | None:
    """Reads a checkpoint's step, and none of its tensors."""
    current_path = locate(path)
    if current_path is None:
        return None
    try:
        status = store_of(current_path).status(current_path)
        assert status is not None
        if status.is_folder:
            manifest = read_manifest(current_path)
            return Entry(path, manifest.step, manifest.time, manifest.weights_only)
        refuse_remote(current_path)
        content = torch.load(current_path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(current_path))
        return Entry(path, int(content["global_step"]), status.time, "optimizer_states" not in content)
    except Exception as error:  # Damaged bytes raise anything.
        # At the head of the list, so that it is reported.
        reason = str(error) if isinstance(error, DloError) else f"damaged checkpoint: cannot read {current_path}"
        return Entry(path, math.inf, 0.0, False, reason)


def newest_valid(
    folder: str | Path, level: Level = "hash", *, weights_only: bool = False, but: Path | None = None
) -> Path | None:
    """Returns the newest valid checkpoint in ``folder``, by its step and then its time; None if there is none.

    A damaged one is skipped with a warning that names the file. Those that the run has superseded by resuming from an
    earlier one are skipped without a warning. After a kill the returned path
    may not exist until its folder is renamed; :func:`load` finds it.

    Args:
        folder: Folder of the checkpoints, which are folders or single files.
        level: Level of verification; see :func:`verify`.
        weights_only: Whether to accept a checkpoint without optimizer state, from which no run can resume.
        but: Path to exclude.
    """
    behind = superseded(Path(folder))
    entries = [entry for entry in list_entries(Path(folder)) if entry.path != but and not entry.is_in(behind)]
    for entry in sorted(entries, key=lambda entry: (entry.step, entry.time), reverse=True):
        problem = entry.problem or (None if entry.weights_only > weights_only else find_damage(entry.path, level))
        if problem is not None:
            warnings.warn(f"skipping {entry.path}: {problem}", stacklevel=2)
        elif entry.weights_only <= weights_only:
            return entry.path
    return None


def step_of(path: str | Path) -> float:
    """Returns the optimizer steps of a checkpoint; -1 if it does not exist."""
    entry = read_entry(Path(path))
    return -1 if entry is None else entry.step


def superseded(folder: Path) -> dict[str, float]:
    """Returns the checkpoints of a folder that their run has superseded: {name: time of the save}."""
    notes = _notes(folder)
    return notes[-1].get("left_behind", {}) if notes else {}


def resumptions(folder: str | Path) -> int:
    """Returns how many times a run has resumed from a checkpoint in its folder of checkpoints."""
    return len(_notes(Path(folder)))


def note_resumption(path: str | Path) -> None:
    """Records beside a checkpoint that its run resumes from it, and which others this supersedes. Call it on one rank.

    Superseded are the checkpoints of later steps, and those superseded before. If the checkpoint itself was superseded,
    the run takes that path up again: what had been superseded before it becomes current.

    Raises:
        DloError: if the record cannot be written.
    """
    path = Path(path)
    before, start = superseded(path.parent), read_entry(path)
    if start is None:
        return  # It has been removed since it was read.
    gone = {}
    for entry in list_entries(path.parent):
        left = entry.is_in(before)
        other_way = (entry.step == start.step and not left) if start.is_in(before) else left
        if entry.problem is None and (entry.step > start.step or other_way):
            gone[entry.path.name] = entry.time
    note = {"time": time.time(), "from": path.name, "step": start.step, "left_behind": gone}
    lines = [json.dumps(line) + "\n" for line in [*_notes(path.parent), note]]
    write_whole(path.parent / RESUMED, "".join(lines).encode())


def _notes(folder: Path) -> list[dict[str, Any]]:
    notes: list[Any] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), store_of(folder).open(folder / RESUMED) as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):  # The file may have been edited by hand.
                notes.append(json.loads(line))
    return [note for note in notes if isinstance(note, dict)]
