"""Writes single-file checkpoints atomically, and reads them without executing anything.

Lightning stages a checkpoint in the temporary folder and moves it without a sync, so that a kill or a full disk can
destroy the previous one, and torch reads a pickle that may execute code. Here a checkpoint is written beside its final
path, synced and renamed; and only tensors and plain data are read.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from dlo_framework.atomic_file import PARTIAL, sync_folder
from dlo_framework.checkpoint.store import publish_file
from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes

#: Errors of a full or limited disk.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint IO that writes atomically and reads with ``weights_only=True``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` to a file beside ``path``, syncs it, and renames it to ``path``.

        Raises:
            DloError: if the disk is too full, with the previous file at ``path`` intact; for a path or options of other
                storage than a file system.
        """
        target = local_path(path, storage_options)
        target.parent.mkdir(parents=True, exist_ok=True)
        need = tensor_bytes(checkpoint)
        free = free_bytes(target.parent)
        if free < need:
            raise _no_space(target, describe_shortage(target.parent, need, free))
        partial = target.with_name(target.name + PARTIAL)
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            publish_file(partial, target)
        except (OSError, RuntimeError) as error:
            refused = find_os_error(error)
            reason = explain_refusal(refused, target.parent, need) if refused is not None else ""
            partial.unlink(missing_ok=True)
            if refused is None:
                raise
            if refused.errno in NO_SPACE:
                raise _no_space(target, reason) from error
            raise DloError(f"cannot write the checkpoint {target}: {reason}") from error
        sync_folder(target.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads tensors and plain data; ``weights_only`` is always True.

        Raises:
            DloError: if the file is missing or damaged, or it contains anything that would execute.
        """
        return read_file(Path(path), map_location)


def local_path(path: str | Path, storage_options: Any = None) -> Path:
    """Returns a checkpoint's path on a file system.

    Raises:
        DloError: for a URL, or storage options.
    """
    if storage_options is not None:
        raise DloError(
            f"storage_options must be None, got {storage_options!r}; checkpoints are written to file systems alone, so"
            " leave it out, and mount other storage or copy the checkpoints to it"
        )
    if isinstance(path, str) and "://" in path:
        raise DloError(
            f"a checkpoint's path must be on a file system, got {path}; mount the storage, or copy the checkpoint"
        )
    return Path(path)


def read_file(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Reads a single-file checkpoint: tensors and plain data, without executing anything.

    Args:
        path: Path of the file.
        map_location: Device of the tensors, as in ``torch.load``.
        mmap: Whether to leave tensors on the file's pages, to be read on use.

    Raises:
        DloError: if the file is missing or damaged, or it contains anything that would execute.
    """
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
        if not isinstance(content, dict) or not {"state_dict", "pytorch-lightning_version"} <= content.keys():
            raise DloError(
                f"{path} is not a checkpoint of a run: it must hold 'state_dict' and 'pytorch-lightning_version'"
            )
        return content
    except FileNotFoundError:
        raise DloError(f"no checkpoint {path}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise make_read_error(path, error) from None


def refuse_unsafe(path: Path) -> None:
    """Refuses a checkpoint whose pickle names globals that are not plain data, without unpickling it.

    Raises:
        DloError: if it names a global that is not allowed, or is not a checkpoint.
    """
    if path.is_dir():
        if any((path / name).exists() for name in ("manifest.json", ".metadata", "meta.pt", "latest")):
            return  # A sharded checkpoint; its strategy verifies it.
        raise DloError(
            f"a checkpoint must be a file, or hold a manifest, got {path}; name a file in it, or 'last' or 'best'"
        )
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, IndexError, KeyError):
        unsafe = []  # Not torch's zip file: an older pickle, or damaged. Loading it is safe, and finds out.
        SafeCheckpointIO().load_checkpoint(path)
    if unsafe:
        raise _refused(path, ", ".join(sorted(unsafe)))


def tensor_bytes(content: Any) -> int:
    """Returns the bytes of all tensors in a tree of mappings and sequences, shared storage counted once."""
    seen: dict[int, int] = {}

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if item.layout is torch.strided and item.device.type != "meta":
                storage = item.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            for value in item.values():
                walk(value)
        elif isinstance(item, list | tuple):
            for value in item:
                walk(value)

    walk(content)
    return sum(seen.values())


def free_bytes(folder: Path) -> int:
    """Returns the free bytes for ``folder``, or for its nearest existing parent."""
    status = _file_system(folder)
    return status.f_bavail * status.f_frsize


def _file_system(folder: Path) -> os.statvfs_result:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.statvfs(folder)


def find_os_error(error: BaseException | None) -> OSError | None:
    """Returns the operating system's error; after one, torch's zip writer raises a RuntimeError of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def describe_shortage(folder: Path, need: int | None, free: int) -> str:
    """Returns the needed and free bytes as text."""
    return f"{f'need {format_bytes(need)}, ' if need is not None else ''}{format_bytes(free)} free in {folder}"


def explain_refusal(error: OSError, folder: Path, need: int | None) -> str:
    """Returns the reason of a failed write as text: a disk may be short of other things than bytes.

    Args:
        error: Error of the operating system.
        folder: Folder of the file, with the bytes written so far still there.
        need: Bytes needed in total; None if unknown.
    """
    if error.errno == errno.EFBIG:
        return f"{error.strerror}: files of this process are limited to {_largest_file()} (ulimit -f)"
    if error.errno == errno.EDQUOT:
        disk = f"{format_bytes(free_bytes(folder))} free there"
        return f"{error.strerror}: this user's quota in {folder} is used up, with {disk}"
    if error.errno != errno.ENOSPC:
        return error.strerror or str(error)
    status = _file_system(folder)
    if status.f_files and not status.f_favail:
        return f"the inodes of the disk of {folder} are used up; remove some files there"
    free = free_bytes(folder)
    short = need is None or free < need
    return (
        describe_shortage(folder, need, free)
        if short
        else f"{error.strerror}, though {describe_shortage(folder, need, free)}"
    )


def _largest_file() -> str:
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "a smaller size" if limit == resource.RLIM_INFINITY else format_bytes(limit)


def _no_space(target: Path, reason: str) -> DloError:
    previous = f"previous {target.name} intact" if target.exists() else "earlier checkpoints intact"
    return DloError(f"no space for the checkpoint {target}: {reason}; {previous}")


def _refused(path: Path, names: str) -> DloError:
    return DloError(f"refusing {path}: pickle global {names} not allowed; nothing executed")


def make_read_error(path: Path, error: Exception) -> DloError:
    """Returns the error of a file that torch cannot or may not read: refused, or damaged."""
    found = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and found:
        return _refused(path, found.group(1))
    size = path.stat().st_size
    return DloError(
        f"cannot read the checkpoint {path} ({format_bytes(size)}): it is damaged, truncated, or not a checkpoint;"
        " try an earlier one"
    )
