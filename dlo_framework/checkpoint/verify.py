"""Whether a checkpoint is what was written, and which one is the newest that is."""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile
from pathlib import Path
from typing import Literal

from torch.distributed import ProcessGroup

from dlo_framework.checkpoint import folder as folders
from dlo_framework.checkpoint.agreement import rank_of, size_of, together
from dlo_framework.checkpoint.listing import entries, left_behind
from dlo_framework.checkpoint.manifest import Manifest, read_manifest
from dlo_framework.checkpoint.tensor_file import read_header
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

    A damaged one is passed over with a warning that names the file; without one, those that the run has left behind
    when it went on from an earlier one (:mod:`dlo_framework.checkpoint.listing`). A name may be returned whose folder
    is to be renamed to it yet, after a kill; :func:`load` finds it.

    Args:
        folder: where checkpoints lie, in folders or single files.
        level: see :func:`verify`.
        weights_only: whether one without an optimizer, from which no run can go on, will do.
        but: one that is left out.
    """
    behind = left_behind(Path(folder))
    found = [entry for entry in entries(Path(folder)) if entry.path != but and not entry.is_in(behind)]
    for entry in sorted(found, key=lambda entry: (entry.step, entry.time), reverse=True):
        problem = entry.problem or (None if entry.weights_only > weights_only else damage(entry.path, level))
        if problem is not None:
            warnings.warn(f"passing over {entry.path}: {problem}", stacklevel=2)
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
