"""Lists the checkpoints in a folder, and records which of them a resumed run has superseded.

A run that has reached step 900 and resumes from step 500 takes another path from there. By their steps the superseded
checkpoints are newer than all that it saves until it reaches 900 again. So each resumption is recorded beside the
checkpoints, as a line in ``resumed.jsonl``, with the checkpoints that it supersedes, by name and by their recorded time
of saving. Those times are only compared for equality, never for order: clocks that differ do not matter.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlo_framework.atomic_file import PARTIAL, write_atomic
from dlo_framework.checkpoint import store
from dlo_framework.checkpoint.manifest import MANIFEST, STATE, read_manifest
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
    """Returns the checkpoints in a folder, without reading their tensors."""
    return [entry for path in _names(folder) if (entry := read_entry(path)) is not None]


def read_entry(path: Path) -> Entry | None:
    """Reads a checkpoint's step, and none of its tensors."""
    found = store.locate(path)
    if found is None:
        return None
    try:
        if found.is_dir():
            manifest = read_manifest(found)
            return Entry(path, manifest.step, manifest.time, manifest.weights_only)
        content = torch.load(found, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(found))
        return Entry(path, int(content["global_step"]), found.stat().st_mtime, "optimizer_states" not in content)
    except (
        DloError,
        OSError,
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:
        # At the head of the list, so that it is reported.
        reason = str(error) if isinstance(error, DloError) else f"damaged checkpoint: cannot read {found}"
        return Entry(path, math.inf, 0.0, False, reason)


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
    write_atomic(path.parent / RESUMED, "".join(lines))


def _notes(folder: Path) -> list[dict[str, Any]]:
    found: list[Any] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for line in (folder / RESUMED).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # The file may have been edited by hand.
                found.append(json.loads(line))
    return [note for note in found if isinstance(note, dict)]


def _names(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, including those that a killed save was about to rename."""
    names: set[Path] = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        suffix = entry.suffix
        if suffix in (PARTIAL, store.OLD):
            target = entry.with_suffix("")
            if not target.exists() and store.locate(target) is not None:
                names.add(target)
        elif suffix != store.REMOVED and (
            (entry.is_dir() and any((entry / name).exists() for name in (MANIFEST, STATE)))
            or (entry.is_file() and suffix == ".ckpt")
        ):
            names.add(entry)
    return sorted(names)
