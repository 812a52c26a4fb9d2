"""Whether a checkpoint is what was written, and which one is the newest that is."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from dlo_framework.checkpoint import folder as folders
from dlo_framework.checkpoint.agreement import rank_of, size_of, together
from dlo_framework.checkpoint.manifest import MANIFEST, STATE, Manifest, read_manifest
from dlo_framework.checkpoint.tensor_file import read_header
from dlo_framework.checkpoint.torch_file import PARTIAL
from dlo_framework.errors import DloError

#: How thoroughly: every byte is hashed, or only the files' sizes are looked at.
Level = Literal["hash", "size"]

_BLOCK = 4 * 2**20


def verify(path: str | Path, level: Level = "hash", *, group: ProcessGroup | None = None) -> None:
    """Raises a DloError that names the damaged file if a checkpoint is not what was written.

    Args:
        path: a checkpoint, in a folder or a single file of Lightning's (whose zip entries have checksums).
        level: ``hash`` reads all of it; ``size`` finds what is missing or cut off.
        group: ranks that share the work, all of which call this; None for this process alone.

    Raises:
        DloError: on all ranks alike.
    """
    problems = together(group, lambda: damage(Path(path), level, rank_of(group), size_of(group)))
    problem = next((problem for problem in problems if problem is not None), None)
    if problem is not None:
        raise DloError(problem)


def damage(path: Path, level: Level = "hash", rank: int = 0, world_size: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint; None if nothing is.

    Args:
        path: the checkpoint.
        level: see :func:`verify`.
        rank: of the ``world_size`` shares of the files, the one to be hashed here.
        world_size: the number of shares.
    """
    found = folders.locate(path)
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
                return f"damaged checkpoint: {found / name} does not have the SHA-256 it was written with"
    return None


def sha256(path: Path) -> str:
    """Returns the hash of a file's content, as hexadecimal digits."""
    result = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(_BLOCK)
        while count := file.readinto(buffer):
            result.update(memoryview(buffer)[:count])
    return result.hexdigest()


def newest_valid(
    folder: str | Path, level: Level = "hash", *, weights_only: bool = False, but: Path | None = None
) -> Path | None:
    """Returns the newest checkpoint in ``folder`` that is whole, by its step and then its time; None if there is none.

    A damaged one is passed over with a warning that names the file. A name may be returned whose folder is to be
    renamed to it yet, after a kill; :func:`load` finds it.

    Args:
        folder: where checkpoints lie, in folders or single files.
        level: see :func:`verify`.
        weights_only: whether one without an optimizer, from which no run can go on, will do.
        but: one that is left out.
    """
    found = [entry for path in _names(Path(folder)) if path != but and (entry := _look(path)) is not None]
    for entry in sorted(found, key=lambda entry: (entry.step, entry.time), reverse=True):
        problem = entry.problem or (None if entry.weights_only > weights_only else damage(entry.path, level))
        if problem is not None:
            warnings.warn(f"passing over {entry.path}: {problem}", stacklevel=2)
        elif entry.weights_only <= weights_only:
            return entry.path
    return None


def step_of(path: str | Path) -> float:
    """Returns the optimizer steps that a checkpoint's run had done; -1 if there is no telling."""
    entry = _look(Path(path))
    return -1 if entry is None else entry.step


@dataclass(frozen=True)
class _Entry:
    path: Path
    step: float
    time: float
    weights_only: bool
    problem: str | None = None


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


def _look(path: Path) -> _Entry | None:
    """Reads a checkpoint's step, and none of its tensors."""
    found = folders.locate(path)
    if found is None:
        return None
    try:
        if found.is_dir():
            manifest = read_manifest(found)
            return _Entry(path, manifest.step, manifest.time, manifest.weights_only)
        content = torch.load(found, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(found))
        return _Entry(path, int(content["global_step"]), found.stat().st_mtime, "optimizer_states" not in content)
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
        return _Entry(path, math.inf, 0.0, False, reason)


def _damage_of_file(path: Path, level: Level) -> str | None:
    if path.suffix == ".safetensors":
        try:
            read_header(path)
        except DloError as error:
            return str(error)
        return None  # The format has no checksums.
    if not zipfile.is_zipfile(path):
        return f"damaged checkpoint: {path} is truncated, or none of torch's zip files"
    if level == "hash":
        try:
            with zipfile.ZipFile(path) as archive:
                entry = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            return f"damaged checkpoint: {path}: {error}"
        if entry is not None:
            return f"damaged checkpoint: {path}: its entry {entry} does not have the checksum it was written with"
    return None


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        actual = os.stat(path).st_size
    except OSError as error:
        return f"{path} is missing" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
    return None if actual == size else f"{path} has {actual} bytes of {size}"


def _shares(manifest: Manifest, world_size: int) -> list[list[str]]:
    """Divides the files evenly: the largest first, each to the share with the least bytes."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for name, file in sorted(manifest.files.items(), key=lambda item: (-item[1]["bytes"], item[0])):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += file["bytes"]
    return shares
