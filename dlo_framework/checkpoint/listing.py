"""What checkpoints lie in a folder, and which of them their run has left behind.

A run that has reached step 900 and goes on from step 500 takes another way from there. By their steps the checkpoints
of the way it has left are newer than all it saves until it comes to 900 again. So each resumption is noted beside the
checkpoints, a line in ``resumed.jsonl``, with those that it leaves behind, by name and by the time that they say they
were saved at. That time is only asked whether it is the same, never which is earlier: clocks that differ do not matter.
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

from dlo_framework.checkpoint import folder as folders
from dlo_framework.checkpoint.manifest import MANIFEST, STATE, read_manifest
from dlo_framework.errors import DloError
from dlo_framework.whole_file import PARTIAL, write_whole

RESUMED = "resumed.jsonl"


@dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder.

    Attributes:
        path: its name, under which there may be nothing yet after a kill.
        step: optimizer steps done; infinite where it cannot be read.
        time: when it was saved, in seconds since 1970.
        weights_only: whether it holds no optimizer.
        problem: why it cannot be read; None if it can.
    """

    path: Path
    step: float
    time: float
    weights_only: bool
    problem: str | None = None

    def is_in(self, left: dict[str, float]) -> bool:
        """Returns whether this is one of those that were left behind, and not what was saved under its name since."""
        return left.get(self.path.name) == self.time


def entries(folder: Path) -> list[Entry]:
    """Returns the checkpoints in a folder, without a look at their tensors."""
    return [entry for path in _names(folder) if (entry := look(path)) is not None]


def look(path: Path) -> Entry | None:
    """Reads a checkpoint's step, and none of its tensors."""
    found = folders.locate(path)
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
        # At the head of the list, so that it is told of.
        reason = str(error) if isinstance(error, DloError) else f"damaged checkpoint: cannot read {found}"
        return Entry(path, math.inf, 0.0, False, reason)


def step_of(path: str | Path) -> float:
    """Returns the optimizer steps that a checkpoint's run had done; -1 if there is no telling."""
    entry = look(Path(path))
    return -1 if entry is None else entry.step


def left_behind(folder: Path) -> dict[str, float]:
    """Returns the checkpoints of a folder that their run has left behind: by name, when they were saved."""
    notes = _notes(folder)
    return notes[-1].get("left_behind", {}) if notes else {}


def resumptions(folder: str | Path) -> int:
    """Returns how many times a run has gone on from a checkpoint in its folder of checkpoints."""
    return len(_notes(Path(folder)))


def note_resumption(path: str | Path) -> None:
    """Notes beside a checkpoint that its run goes on from it, and which others it leaves behind. For one rank.

    Those are the ones of later steps, and what had been left behind before. If the checkpoint itself had been, the run
    takes that way up again: what was left behind before it comes back.

    Raises:
        DloError: if the note cannot be written.
    """
    path = Path(path)
    before, start = left_behind(path.parent), look(path)
    if start is None:
        return  # Somebody has removed it since it was read.
    gone = {}
    for entry in entries(path.parent):
        left = entry.is_in(before)
        other_way = (entry.step == start.step and not left) if start.is_in(before) else left
        if entry.problem is None and (entry.step > start.step or other_way):
            gone[entry.path.name] = entry.time
    note = {"time": time.time(), "from": path.name, "step": start.step, "left_behind": gone}
    lines = [json.dumps(line) + "\n" for line in [*_notes(path.parent), note]]
    write_whole(path.parent / RESUMED, "".join(lines))


def _notes(folder: Path) -> list[dict[str, Any]]:
    found: list[Any] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for line in (folder / RESUMED).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # What somebody has edited.
                found.append(json.loads(line))
    return [note for note in found if isinstance(note, dict)]


def _names(folder: Path) -> list[Path]:
    """Returns the names of the checkpoints in a folder, of those too that a killed save was just renaming."""
    names: set[Path] = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        suffix = entry.suffix
        if suffix in (PARTIAL, folders.OLD):
            target = entry.with_suffix("")
            if not target.exists() and folders.locate(target) is not None:
                names.add(target)
        elif suffix != folders.REMOVED and (
            (entry.is_dir() and any((entry / name).exists() for name in (MANIFEST, STATE)))
            or (entry.is_file() and suffix == ".ckpt")
        ):
            names.add(entry)
    return sorted(names)
