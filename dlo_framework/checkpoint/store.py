"""Atomic replacement and removal of checkpoint folders: a kill at any moment leaves a complete one.

A save writes ``X.partial/``, the manifest last, and syncs it. Then the previous ``X`` is renamed ``X.old``, the new
folder is renamed ``X``, and the old one is removed. A removal renames to ``X.removed`` first. So after a kill there is

* ``X`` (complete), perhaps with a leftover beside it, or
* no ``X``, but a finished ``X.partial`` and the previous ``X.old``; readers use the first, and the next run renames it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from dlo_framework.atomic_file import PARTIAL, sync_folder
from dlo_framework.checkpoint.manifest import MANIFEST, read_manifest
from dlo_framework.errors import DloError

OLD = ".old"
REMOVED = ".removed"


def is_folder_checkpoint(path: Path) -> bool:
    """Returns whether ``path`` is a folder with a manifest; only :func:`verify` checks that it is complete."""
    return (path / MANIFEST).is_file()


def locate(path: str | Path) -> Path | None:
    """Returns the current path of the checkpoint called ``path``; None if there is none.

    It is ``path`` itself, except after a kill between the two renames of a save.
    """
    path = Path(path)
    if path.exists():
        return path
    for other in (leftover_path(path, PARTIAL), leftover_path(path, OLD)):
        if _is_finished(other):
            return other
    return None


def leftover_path(path: Path, suffix: str) -> Path:
    """Returns the path of a leftover of ``path``."""
    return path.with_name(path.name + suffix)


def create_partial(path: Path) -> Path:
    """Creates the empty folder that a checkpoint is written to, and returns it. Call it on one rank."""
    path.parent.mkdir(parents=True, exist_ok=True)
    recover_one(path)
    partial = leftover_path(path, PARTIAL)
    partial.mkdir()
    return partial


def publish(path: Path) -> None:
    """Renames the finished ``path.partial`` to ``path``. Call it on one rank, after all its files have been synced."""
    partial, old = leftover_path(path, PARTIAL), leftover_path(path, OLD)
    sync_folder(partial)
    if path.exists() or path.is_symlink():
        path.rename(old)
    partial.rename(path)
    sync_folder(path.parent)
    _delete(old)


def publish_file(partial: Path, path: Path) -> None:
    """Renames a finished single-file checkpoint to ``path``, which may be a folder. Call it on one rank."""
    old = leftover_path(path, OLD)
    if path.is_dir() and not path.is_symlink():
        path.rename(old)
    os.replace(partial, path)
    _delete(old)


def remove_partial(path: Path) -> None:
    """Removes the files of a failed save; the previous checkpoint at ``path`` stays."""
    _delete(leftover_path(path, PARTIAL))


def remove(path: str | Path) -> None:
    """Removes a checkpoint, folder or file, atomically: no partial one is ever visible under its name."""
    path = Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.exists():
        return
    removed = leftover_path(path, REMOVED)
    _delete(removed)
    path.rename(removed)
    _delete(removed)


def recover(folder: str | Path) -> None:
    """Finishes or removes what killed runs left in ``folder``. Call it on one rank, before the next run saves.

    No other run may be saving to the folder: its unfinished checkpoint would be mistaken for a leftover.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    names = {entry.name for entry in folder.iterdir()}
    for suffix in (PARTIAL, OLD, REMOVED):
        for name in sorted(names):
            if name.endswith(suffix) and len(name) > len(suffix):
                recover_one(folder / name.removesuffix(suffix))


def recover_one(path: Path) -> None:
    """Finishes or removes the leftovers of one checkpoint."""
    if not path.exists():
        found = locate(path)
        if found is not None:
            with contextlib.suppress(FileNotFoundError):  # Another rank of the same start was faster.
                found.rename(path)
            sync_folder(path.parent)
    for suffix in (PARTIAL, OLD, REMOVED):
        _delete(leftover_path(path, suffix))


def _is_finished(folder: Path) -> bool:
    """Returns whether a leftover is a complete checkpoint, by its manifest and the sizes of its files.

    Its files were synced before the manifest was written; a full check follows when it is read. ``X.old`` may also be a
    single file, which was complete when it was renamed.
    """
    if folder.is_file():
        return folder.name.endswith(OLD)
    if not is_folder_checkpoint(folder):
        return False
    try:
        manifest = read_manifest(folder)
        return all((folder / name).stat().st_size == file["bytes"] for name, file in manifest.files.items())
    except (DloError, OSError):
        return False


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)
