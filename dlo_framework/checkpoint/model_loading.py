"""Lightning's ``load_from_checkpoint`` for modules and datamodules, extended to canonical checkpoints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from dlo_framework.checkpoint.loading import load
from dlo_framework.checkpoint.state_tree import plain_data
from dlo_framework.checkpoint.store import is_folder_checkpoint, locate
from dlo_framework.errors import DloError

M = TypeVar("M", LightningModule, LightningDataModule)


def load_from_checkpoint(
    kind: type[M],
    path: str | Path,
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> M:
    """Constructs a module with the hyperparameters of a checkpoint, and loads its weights.

    For a canonical checkpoint ``kind.load_from_checkpoint(path)`` would do so only in a
    :class:`~dlo_framework.task.Task`: Lightning's opens a file, and a canonical checkpoint is a folder. The weights are
    in memory twice meanwhile. ``on_load_checkpoint`` gets the full checkpoint but the optimizer states.

    Args:
        kind: Class of the module or datamodule.
        path: Canonical checkpoint, or one of Lightning's files.
        map_location: Device of the weights, as in ``torch.load``; by default the CPU, for a file the saved device.
        hparams_file: YAML or CSV file with hyperparameters, which replace the checkpoint's.
        strict: Whether to require the module's names for the weights; by default the module's ``strict_loading``.
        kwargs: Arguments of the class, which override the checkpoint's hyperparameters.

    Raises:
        DloError: If the checkpoint does not exist, or is damaged.
    """
    if isinstance(path, str | Path) and "://" not in str(path) and locate(path) is None:
        raise DloError(f"no checkpoint {path}; choose an existing path, such as a run's checkpoints/last.ckpt")
    source: Any = single_file(path) if is_canonical(path) else path
    return kind.load_from_checkpoint(
        source, map_location=map_location, hparams_file=hparams_file, strict=strict, **kwargs
    )


def is_canonical(path: Any) -> bool:
    """Returns whether ``path`` is a canonical checkpoint, which is a folder."""
    found = locate(path) if isinstance(path, str | Path) else None
    return found is not None and is_folder_checkpoint(found)


def single_file(path: str | Path) -> io.BytesIO:
    """Returns a canonical checkpoint as an in-memory file for Lightning, without the optimizer states."""
    content = {key: value for key, value in load(path).items() if key != "optimizer_states"}
    buffer = io.BytesIO()
    torch.save(plain_data(content), buffer)
    buffer.seek(0)
    return buffer
