"""Verifies that a checkpoint is as it was written, and finds the newest valid one."""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile
from pathlib import Path
from typing import Literal

from torch.distributed import ProcessGroup

from dlo_framework.agreement import rank_of, run_on_all_ranks, size_of
from dlo_framework.checkpoint import store
from dlo_framework.checkpoint.history import list_entries, superseded
from dlo_framework.checkpoint.manifest import Manifest, read_manifest
from dlo_framework.checkpoint.tensor_file import read_header
from dlo_framework.errors import DloError

#: Level of verification: every byte is hashed, or only the files' sizes are compared.
Level = Literal["hash", "size"]

_BLOCK = 4 * 2**20


def verify(path: str | Path, level: Level = "hash", *, group: ProcessGroup | None = None) -> None:
    """Verifies that a checkpoint is as it was written.

    Args:
        path: Folder of a checkpoint, or a single file of Lightning's (whose zip entries have checksums).
        level: ``hash`` to read every byte, ``size`` to find missing and truncated files only.
        group: Process group of the ranks that share the hashing and all call this; None for this process alone.

    Raises:
        DloError: on all ranks, if it is damaged; it names the damaged file.
    """
    problems = run_on_all_ranks(group, lambda: find_damage(Path(path), level, rank_of(group), size_of(group)))
    problem = next((problem for problem in problems if problem is not None), None)
    if problem is not None:
        raise DloError(problem)


def find_damage(path: Path, level: Level = "hash", rank: int = 0, world_size: int = 1) -> str | None:
    """Returns the damage of a checkpoint as a sentence; None if there is none.

    Args:
        path: Path of the checkpoint.
        level: Level of verification; see :func:`verify`.
        rank: Number of the share of the files that is hashed here.
        world_size: Number of shares.
    """
    found = store.locate(path)
    if found is None:
        return f"no checkpoint {path}"
    if found.is_file():
        return _damage_of_file(found, level) if rank == 0 else None
    try:
        manifest = read_manifest(found)
    except DloError as error:
        return str(error)
    for name, file in manifest.files.items():
        problem = _wrong_size(found / name, file["bytes"])
        if problem:
            return f"damaged checkpoint: {problem}"
    if level == "hash":
        for name in _shares(manifest, world_size)[rank]:
            try:
                actual = sha256(found / name)
            except OSError as error:
                return f"damaged checkpoint: cannot read {found / name}: {error.strerror}"
            if actual != manifest.files[name]["sha256"]:
                return f"damaged checkpoint: the SHA-256 of {found / name} differs from the recorded one"
    return None


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, as hexadecimal digits."""
    result = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(_BLOCK)
        while count := file.readinto(buffer):
            result.update(memoryview(buffer)[:count])
    return result.hexdigest()


def newest_valid(
    folder: str | Path, level: Level = "hash", *, weights_only: bool = False, but: Path | None = None
) -> Path | None:
    """Returns the newest valid checkpoint in ``folder``, by its step and then its time; None if there is none.

    A damaged one is skipped with a warning that names the file. Those that the run has superseded by resuming from an
    earlier one (:mod:`dlo_framework.checkpoint.history`) are skipped without a warning. After a kill the returned path
    may not exist until its folder is renamed; :func:`load` finds it.

    Args:
        folder: Folder of the checkpoints, which are folders or single files.
        level: Level of verification; see :func:`verify`.
        weights_only: Whether to accept a checkpoint without optimizer state, from which no run can resume.
        but: Path to exclude.
    """
    behind = superseded(Path(folder))
    found = [entry for entry in list_entries(Path(folder)) if entry.path != but and not entry.is_in(behind)]
    for entry in sorted(found, key=lambda entry: (entry.step, entry.time), reverse=True):
        problem = entry.problem or (None if entry.weights_only > weights_only else find_damage(entry.path, level))
        if problem is not None:
            warnings.warn(f"skipping {entry.path}: {problem}", stacklevel=2)
        elif entry.weights_only <= weights_only:
            return entry.path
    return None


def _damage_of_file(path: Path, level: Level) -> str | None:
    if path.suffix == ".safetensors":
        try:
            read_header(path)
        except DloError as error:
            return str(error)
        return None  # The format has no checksums.
    if not zipfile.is_zipfile(path):
        return f"damaged checkpoint: {path} is truncated, or not one of torch's zip files"
    if level == "hash":
        try:
            with zipfile.ZipFile(path) as archive:
                entry = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            return f"damaged checkpoint: {path}: {error}"
        if entry is not None:
            return f"damaged checkpoint: {path}: the checksum of its entry {entry} differs from the recorded one"
    return None


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        actual = os.stat(path).st_size
    except OSError as error:
        return f"{path} is missing" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
    return None if actual == size else f"{path} must have {size} bytes, got {actual}"


def _shares(manifest: Manifest, world_size: int) -> list[list[str]]:
    """Distributes the files evenly: the largest first, each to the share with the fewest bytes."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for name, file in sorted(manifest.files.items(), key=lambda item: (-item[1]["bytes"], item[0])):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += file["bytes"]
    return shares
