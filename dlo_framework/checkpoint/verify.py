"""Opens a checkpoint, and verifies that it is as it was written."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Literal, NamedTuple

from torch.distributed import ProcessGroup

from dlo_framework.agreement import rank_of, run_on_all_ranks, size_of
from dlo_framework.checkpoint.manifest import Manifest, read_header
from dlo_framework.checkpoint.store import is_folder, locate, read_manifest, refuse_remote, store_of
from dlo_framework.errors import DloError

#: Level of verification: every byte is hashed, or only the files' sizes are compared.
Level = Literal["hash", "size"]

_BLOCK = 4 * 2**20


class OpenCheckpoint(NamedTuple):
    """Checkpoint that has been found; its manifest has been parsed and hashed, once for verification and reading.

    Attributes:
        path: Current path of its folder, or of Lightning's single file.
        manifest: Manifest of the folder; None for a single file.
    """

    path: Path
    manifest: Manifest | None

    def find_damage(self, level: Level = "hash", rank: int = 0, world_size: int = 1) -> str | None:
        """Returns the damage as a sentence; None if there is none.

        Args:
            level: Level of verification; see :func:`verify`.
            rank: Number of the share of the files that is hashed here.
            world_size: Number of shares.
        """
        if self.manifest is None:
            return _damage_of_file(self.path, level) if rank == 0 else None
        for name, file in self.manifest.files.items():
            path = self.path / name
            try:
                status = store_of(path).status(path)
            except OSError as error:
                return f"damaged checkpoint: {path}: {error.strerror}"
            if status is None:
                return f"damaged checkpoint: {path} is missing"
            if status.bytes != file["bytes"]:
                return f"damaged checkpoint: {path} must have {file['bytes']} bytes, got {status.bytes}"
        for name in _shares(self.manifest, world_size)[rank] if level == "hash" else ():
            path = self.path / name
            try:
                actual = sha256(path)
            except OSError as error:
                return f"damaged checkpoint: cannot read {path}: {error.strerror}"
            if actual != self.manifest.files[name]["sha256"]:
                return f"damaged checkpoint: the SHA-256 of {path} differs from the recorded one"
        return None


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Finds a checkpoint and reads its manifest.

    Raises:
        DloError: if there is none, its manifest is missing or damaged, or it is a single file in another store.
    """
    current_path = locate(path)
    if current_path is None:
        raise DloError(f"no checkpoint {path}")
    if is_folder(current_path):
        return OpenCheckpoint(current_path, read_manifest(current_path))
    refuse_remote(current_path)
    return OpenCheckpoint(current_path, None)


def verify(path: str | Path, level: Level = "hash", *, group: ProcessGroup | None = None) -> OpenCheckpoint:
    """Verifies that a checkpoint is as it was written, and returns it.

    Args:
        path: Folder of a checkpoint, or a single file of Lightning's (whose zip entries have checksums).
        level: ``hash`` to read every byte, ``size`` to find missing and truncated files only.
        group: Process group of the ranks that share the hashing and all call this; None for this process alone.

    Raises:
        DloError: on all ranks, if it is damaged; it names the damaged file.
    """
    opened: list[OpenCheckpoint] = []

    def find() -> str | None:
        try:
            opened.append(open_checkpoint(Path(path)))
            return opened[0].find_damage(level, rank_of(group), size_of(group))
        except DloError as error:
            return str(error)

    problem = next((problem for problem in run_on_all_ranks(group, find) if problem is not None), None)
    if problem is not None:
        raise DloError(problem)
    return opened[0]


def find_damage(path: Path, level: Level = "hash") -> str | None:
    """Returns the damage of a checkpoint as a sentence; see :meth:`OpenCheckpoint.find_damage`."""
    try:
        return open_checkpoint(path).find_damage(level)
    except DloError as error:
        return str(error)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, as hexadecimal digits."""
    result = hashlib.sha256()
    with store_of(path).open(path) as file:
        buffer = bytearray(_BLOCK)
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # typeshed: no BinaryIO has it.
            result.update(memoryview(buffer)[:count])
    return result.hexdigest()


def _damage_of_file(path: Path, level: Level) -> str | None:
    try:
        if path.suffix == ".safetensors":
            read_header(path)
            return None  # The format has no checksums.
        if not zipfile.is_zipfile(path):
            return f"damaged checkpoint: {path} is truncated, or not one of torch's zip files"
        entry = None
        if level == "hash":
            with zipfile.ZipFile(path) as archive:
                entry = archive.testzip()
    except DloError as error:
        return str(error)
    except Exception as error:  # Damaged bytes raise anything.
        return f"damaged checkpoint: {path}: {error}"
    if entry is not None:
        return f"damaged checkpoint: {path}: the checksum of its entry {entry} differs from the recorded one"
    return None


def _shares(manifest: Manifest, world_size: int) -> list[list[str]]:
    """Distributes the files evenly: the largest first, each to the share with the fewest bytes."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for name, file in sorted(manifest.files.items(), key=lambda item: (-item[1]["bytes"], item[0])):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += file["bytes"]
    return shares
