"""Stores of checkpoints, and the atomic replacement and removal of checkpoint folders in any of them.

Every file of a canonical checkpoint is reached through the :class:`CheckpointStore` of its path: the file system, or a
store that a package registers for a scheme (``s3://bucket/run/last.ckpt``) by an entry point whose name is the scheme::

    [options.entry_points]
    dlo_framework.checkpoint_stores =
        s3 = my_package.s3_store:S3Store

A kill at any moment leaves a complete checkpoint. A save writes ``X.dlo-partial/``, the manifest last, and syncs it.
Then the previous ``X`` is renamed ``X.dlo-old``, the new folder is renamed ``X``, and the old one is removed. A removal
renames to ``X.dlo-removed`` first. So after a kill there is

* ``X`` (complete), perhaps with a leftover beside it, or
* no ``X``, but a finished ``X.dlo-partial`` and the previous ``X.dlo-old``; readers use the first, and the next run
  renames it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import shutil
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from dlo_framework.atomic_file import NO_SPACE, PARTIAL, explain_refusal, find_os_error, free_bytes, sync_folder
from dlo_framework.checkpoint.manifest import MANIFEST, Manifest, as_memoryview, parse_manifest
from dlo_framework.errors import DloError
from dlo_framework.extensions import installed_points, load_instance
from dlo_framework.shards import BUCKET_BYTES, full_box, slice_view, split_box

#: Endings of what a save and a removal leave when they are killed, which no file of a user has.
OLD = ".dlo-old"
REMOVED = ".dlo-removed"
#: Entry-point group of the stores; an entry's name is the scheme of its paths.
GROUP = "dlo_framework.checkpoint_stores"


class FileStatus(NamedTuple):
    """Status of a file or folder.

    Attributes:
        is_folder: Whether it is a folder.
        bytes: Size of a file, in bytes.
        time: Time of the last change, in seconds since 1970.
    """

    is_folder: bool
    bytes: int
    time: float


class CheckpointStore(ABC):
    """Storage of checkpoints; it is constructed without arguments, in every process.

    Paths begin with the store's scheme, as pathlib keeps it: ``s3:/bucket/run/last.ckpt``. A save is safe against
    kills if the store keeps four promises: what :meth:`create` has written is durable when its block ends;
    :meth:`rename` is atomic, for files and for folders; after :meth:`sync` the names in a folder are durable; and every
    process sees all of that at once. Failures are OSErrors, FileNotFoundError for a missing file.
    """

    @abstractmethod
    def status(self, path: Path) -> FileStatus | None:
        """Returns the status of a file or folder; None if there is none."""

    @abstractmethod
    def list(self, folder: Path) -> list[str]:
        """Returns the names of the files and folders in a folder; empty where the folder does not exist."""

    @abstractmethod
    def open(self, path: Path) -> BinaryIO:
        """Opens a file for reading; it can be sought, so that ranges are read."""

    @abstractmethod
    def create(self, path: Path) -> AbstractContextManager[BinaryIO]:
        """Opens a new file for writing, replacing an existing one; it is durable when the block ends without error."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Creates a folder, and those that lead to it; raises FileExistsError if it exists."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Renames a file or folder atomically; an existing file at the target is replaced."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with its content, if there is one; a kill may leave a part of a folder."""

    @abstractmethod
    def sync(self, folder: Path) -> None:
        """Makes the names in a folder durable; nothing where :meth:`create` and :meth:`rename` have done so."""

    def map(self, path: Path) -> mmap.mmap | None:
        """Maps a file into memory, copied on write; None, the default, if tensors are to be read by ranges."""
        return None

    def free_bytes(self, folder: Path) -> int:
        """Returns the bytes that fit into a folder, which need not exist; by default no limit is known."""
        return sys.maxsize

    def explain_refusal(self, error: OSError, folder: Path, need: int | None) -> str:
        """Returns the reason of a failed write into a folder as text; ``need`` is the bytes of the whole checkpoint."""
        return error.strerror or str(error)


class LocalStore(CheckpointStore):
    """File systems: local ones, and those that nodes share."""

    def status(self, path: Path) -> FileStatus | None:
        """Returns the status of what a path leads to, also by a link."""
        try:
            stat_result = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStatus(stat.S_ISDIR(stat_result.st_mode), stat_result.st_size, stat_result.st_mtime)

    def list(self, folder: Path) -> list[str]:
        """Returns the names in a folder."""
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, path: Path) -> BinaryIO:
        """Opens a file."""
        return open(path, "rb")

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """Opens a new file, and syncs it at the end."""
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def make_folder(self, path: Path) -> None:
        """Creates a folder."""
        path.mkdir(parents=True)

    def rename(self, source: Path, target: Path) -> None:
        """Renames a file, a folder or a link."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Removes a file, a folder or a link."""
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.exists():
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                shutil.rmtree(path)

    def sync(self, folder: Path) -> None:
        """Syncs a folder."""
        sync_folder(folder)

    def map(self, path: Path) -> mmap.mmap:
        """Maps a file into memory."""
        with open(path, "rb") as file:
            # Copy on write: torch warns of memory that cannot be written. Without a reserve of memory for those copies
            # a file may be larger than the machine's memory.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def free_bytes(self, folder: Path) -> int:
        """Returns the free bytes of the folder's disk."""
        return free_bytes(folder)

    def explain_refusal(self, error: OSError, folder: Path, need: int | None) -> str:
        """Returns what the disk is short of."""
        return explain_refusal(error, folder, need)


#: File systems.
LOCAL = LocalStore()


def store_of(path: Path) -> CheckpointStore:
    """Returns the store of a path: a registered one by the path's scheme, else the file system.

    Raises:
        DloError: if the store fails to import, with its distribution and the cause.
    """
    scheme = path.parts[0] if path.parts else ""
    return (_registered(scheme[:-1]) or LOCAL) if scheme.endswith(":") else LOCAL


def checkpoint_path(path: str | Path, storage_options: Any = None) -> Path:
    """Returns the path of a checkpoint.

    Raises:
        DloError: for a URL without a registered store, or storage options.
    """
    if storage_options is not None:
        raise DloError(
            f"storage_options must be None, got {storage_options!r}; stores of checkpoints take none, so leave it"
            " out, and mount other storage or copy the checkpoints to it"
        )
    if isinstance(path, str) and "://" in path and _registered(path.partition("://")[0]) is None:
        raise DloError(
            f"a checkpoint's path must be on a file system, or begin with the scheme of an installed store, got {path};"
            " mount the storage, or copy the checkpoint"
        )
    return Path(path)


def refuse_remote(path: Path, what: str = "a checkpoint in one file") -> None:
    """Refuses a path in a registered store for what only a file system holds.

    Raises:
        DloError: if the path is in a registered store.
    """
    if store_of(path) is not LOCAL:
        raise DloError(
            f"{what} must be on a file system, got {path}; a store holds checkpoint folders alone, so choose a local"
            " path"
        )


@functools.cache
def _registered(scheme: str) -> CheckpointStore | None:
    point = next(iter(installed_points().select(group=GROUP, name=scheme)), None)
    if point is None:
        return None
    return load_instance(point, "checkpoint store", CheckpointStore)


class HashedFile:
    """New file in the store of its path, which is hashed while it is written, and durable when it is closed.

    Args:
        path: Path of the file; an existing one is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._context = store_of(path).create(path)
        self._hash = hashlib.sha256()
        self.bytes = 0

    def __enter__(self) -> HashedFile:
        self._file = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

    def write(self, content: bytes | memoryview) -> int:
        """Appends bytes."""
        self._hash.update(content)
        self._file.write(content)
        size = memoryview(content).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Flushes the buffer to the operating system."""
        self._file.flush()

    def write_tensor(self, tensor: Tensor, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Appends a tensor's elements, row-major; copies at most a bucket of them at a time."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        box = full_box(tuple(tensor.shape))
        for part in split_box(box, tensor.element_size(), bucket_bytes):
            self.write(as_memoryview(slice_view(tensor, box, part)))

    @property
    def sha256(self) -> str:
        """The hash of the bytes written so far, as hexadecimal digits."""
        return self._hash.hexdigest()


# --- folders of checkpoints ----------------------------------------------------------------------------------


def is_folder(path: Path) -> bool:
    """Returns whether there is a folder at ``path``, in its store."""
    status = store_of(path).status(path)
    return status is not None and status.is_folder


def is_folder_checkpoint(path: Path) -> bool:
    """Returns whether ``path`` is a folder with a manifest; only :func:`verify` checks that it is complete."""
    return store_of(path).status(path / MANIFEST) is not None


def locate(path: str | Path) -> Path | None:
    """Returns the current path of the checkpoint called ``path``; None if there is none.

    It is ``path`` itself, except after a kill between the two renames of a save.
    """
    path = Path(path)
    if store_of(path).status(path) is not None:
        return path
    for other in (leftover_path(path, PARTIAL), leftover_path(path, OLD)):
        if _is_finished(other):
            return other
    return None


def leftover_path(path: Path, suffix: str) -> Path:
    """Returns the path of a leftover of ``path``."""
    return path.with_name(path.name + suffix)


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest and checks that it is consistent.

    Raises:
        DloError: if there is none, it is damaged, or it is of a later version.
    """
    path = folder / MANIFEST
    try:
        with store_of(path).open(path) as file:
            content = file.read()
    except FileNotFoundError:
        raise DloError(f"{folder} is not a checkpoint: it has no {MANIFEST} (its save did not finish)") from None
    except OSError as error:
        raise DloError(f"cannot read {path}: {error.strerror}") from error
    return parse_manifest(content, path)


@contextlib.contextmanager
def disk_errors(path: Path, need: int | None = None) -> Iterator[None]:
    """Turns an error of the disk while ``path`` is written into a DloError; ``need`` is the bytes of all files."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = find_os_error(error)
        if refused is None:
            raise
        reason = store_of(path).explain_refusal(refused, path.parent, need)
        if refused.errno in NO_SPACE:
            raise no_space_error(path, reason) from error
        raise DloError(f"cannot write the checkpoint {path}: {reason}") from error


def no_space_error(path: Path, reason: str) -> DloError:
    """Returns the error of a full disk, with the reason and the checkpoint that is still intact."""
    store = store_of(path)
    if store.status(path) is not None:
        previous = f"previous {path.name} intact"
    else:
        others = [other for name in store.list(path.parent) if is_folder_checkpoint(other := path.parent / name)]
        times = {other: status.time for other in others if (status := store.status(other)) is not None}
        newest = max(times, key=times.__getitem__, default=None)
        previous = f"previous {newest.stem} intact" if newest is not None else "no earlier checkpoint there"
    return DloError(f"no space for the checkpoint {path}: {reason}; {previous}")


def publish(path: Path) -> None:
    """Renames the finished ``path.dlo-partial`` to ``path``. Call it on one rank, after its files have been synced."""
    store = store_of(path)
    partial, old = leftover_path(path, PARTIAL), leftover_path(path, OLD)
    store.sync(partial)
    with contextlib.suppress(FileNotFoundError):  # Most checkpoints have a new name.
        store.rename(path, old)
    store.rename(partial, path)
    store.sync(path.parent)
    store.remove(old)


def remove(path: str | Path) -> None:
    """Removes a checkpoint, folder or file, atomically: no partial one is ever visible under its name."""
    path = Path(path)
    store, removed = store_of(path), leftover_path(path, REMOVED)
    if is_folder(path):
        store.remove(removed)
        store.rename(path, removed)
        store.remove(removed)
    else:
        store.remove(path)


def recover(folder: str | Path) -> None:
    """Finishes or removes what killed runs left in ``folder``. Call it on one rank, before the next run saves.

    No other run may be saving to the folder: its unfinished checkpoint would be mistaken for a leftover.
    """
    folder = Path(folder)
    names = sorted(store_of(folder).list(folder))
    for suffix in (PARTIAL, OLD, REMOVED):
        for name in names:
            if name.endswith(suffix) and len(name) > len(suffix):
                recover_one(folder / name.removesuffix(suffix))


def recover_one(path: Path) -> None:
    """Finishes or removes the leftovers of one checkpoint."""
    store, current_path = store_of(path), locate(path)
    if current_path is not None and current_path != path:
        with contextlib.suppress(FileNotFoundError):  # Another rank of the same start was faster.
            store.rename(current_path, path)
        store.sync(path.parent)
    for suffix in (PARTIAL, OLD, REMOVED):
        store.remove(leftover_path(path, suffix))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file atomically.

    Raises:
        DloError: if it cannot be written; the previous file is kept.
    """
    store, partial = store_of(path), leftover_path(path, PARTIAL)
    try:
        with store.create(partial) as file:
            file.write(content)
        store.rename(partial, path)
        store.sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            store.remove(partial)
        raise DloError(f"cannot write {path}: {error.strerror}") from error


def _is_finished(folder: Path) -> bool:
    """Returns whether a leftover is a complete checkpoint, by its manifest and the sizes of its files.

    Its files were synced before the manifest was written; a full check follows when it is read. ``X.dlo-old`` may also
    be a single file, which was complete when it was renamed.
    """
    store = store_of(folder)
    status = store.status(folder)
    if status is None or not status.is_folder:
        return status is not None and folder.name.endswith(OLD)
    try:
        recorded = read_manifest(folder).files
        statuses = {name: store.status(folder / name) for name in recorded}
        return all(file is not None and file.bytes == recorded[name]["bytes"] for name, file in statuses.items())
    except (DloError, OSError):
        return False
