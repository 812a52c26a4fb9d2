"""Writes single-file checkpoints atomically, and reads them without executing anything.

Lightning stages a checkpoint in the temporary folder and moves it without a sync, so that a kill or a full disk can
destroy the previous one, and torch reads a pickle that may execute code. Here a checkpoint is written beside its final
path, synced and renamed; and only tensors and plain data are read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from dlo_framework.atomic_file import PARTIAL, describe_shortage, free_bytes
from dlo_framework.checkpoint.state_tree import make_read_error, make_refusal, tensor_bytes
from dlo_framework.checkpoint.store import (
    LOCAL,
    OLD,
    checkpoint_path,
    disk_errors,
    leftover_path,
    no_space_error,
    refuse_remote,
    store_of,
)
from dlo_framework.errors import DloError


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint IO that writes atomically and reads with ``weights_only=True``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` to a file beside ``path``, syncs it, and renames it to ``path``.

        Raises:
            DloError: if the disk is too full, with the previous file at ``path`` intact; for a path or options of other
                storage than a file system.
        """
        target = checkpoint_path(path, storage_options)
        refuse_remote(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        need = tensor_bytes(checkpoint)
        free = free_bytes(target.parent)
        if free < need:
            raise no_space_error(target, describe_shortage(target.parent, need, free))
        partial, old = leftover_path(target, PARTIAL), leftover_path(target, OLD)
        try:
            with disk_errors(target, need):
                with LOCAL.create(partial) as file:
                    torch.save(checkpoint, file)
                if target.is_dir() and not target.is_symlink():
                    target.rename(old)
                LOCAL.rename(partial, target)
                LOCAL.remove(old)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        LOCAL.sync(target.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads tensors and plain data; ``weights_only`` is always True.

        Raises:
            DloError: if the file is missing or damaged, or it contains anything that would execute.
        """
        return read_file(Path(path), map_location)


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
    except Exception as error:  # Damaged bytes raise anything.
        if isinstance(error, DloError) or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise make_read_error(path, error) from None


def refuse_unsafe(path: Path) -> None:
    """Refuses a checkpoint whose pickle names globals that are not plain data, without unpickling it.

    Raises:
        DloError: if it names a global that is not allowed, or is not a checkpoint.
    """
    store = store_of(path)
    status = store.status(path)
    if status is not None and status.is_folder:
        if not {"manifest.json", ".metadata", "meta.pt", "latest"}.isdisjoint(store.list(path)):
            return  # A sharded checkpoint; its strategy verifies it.
        raise DloError(
            f"a checkpoint must be a file, or hold a manifest, got {path}; name a file in it, or 'last' or 'best'"
        )
    try:
        with store.open(path) as file:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        unsafe = []  # Not torch's zip file: an older pickle, or damaged. Loading it is safe, and finds out.
        SafeCheckpointIO().load_checkpoint(path)
    if unsafe:
        raise make_refusal(path, ", ".join(sorted(unsafe)))
