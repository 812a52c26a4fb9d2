"""A module or datamodule from a checkpoint: Lightning's ``load_from_checkpoint``, of canonical checkpoints too."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from dlo_framework.checkpoint import folder as folders
from dlo_framework.checkpoint.nest import plain_data
from dlo_framework.checkpoint.reading import load

M = TypeVar("M", LightningModule, LightningDataModule)


def load_from_checkpoint(
    kind: type[M],
    path: str | Path,
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> M:
    """Returns a module, built with the hyperparameters that a checkpoint holds and filled with its weights.

    Of a canonical checkpoint ``kind.load_from_checkpoint(path)`` would do so for a
    :class:`~dlo_framework.task.Task` alone: Lightning's opens a file, and that is a folder. The weights are held twice
    on the way. ``on_load_checkpoint`` gets all of the checkpoint but the optimizers' states.

    Args:
        kind: Its class.
        path: A canonical checkpoint, or a file of Lightning's.
        map_location: Where the weights go, as in ``torch.load``; by default the CPU, for a file where they were.
        hparams_file: A YAML or CSV file with hyperparameters, which replace the checkpoint's.
        strict: Whether the weights' names must be the module's; by default the module's ``strict_loading``.
        kwargs: Arguments of the class, before the checkpoint's hyperparameters.

    Raises:
        DloError: if the checkpoint is damaged.
    """
    source: Any = single_file(path) if is_canonical(path) else path
    return kind.load_from_checkpoint(
        source, map_location=map_location, hparams_file=hparams_file, strict=strict, **kwargs
    )


def is_canonical(path: Any) -> bool:
    """Returns whether a canonical checkpoint, which is a folder, is at ``path``."""
    found = folders.locate(path) if isinstance(path, str | Path) else None
    return found is not None and folders.is_folder_checkpoint(found)


def single_file(path: str | Path) -> io.BytesIO:
    """Returns a canonical checkpoint as a file in memory that Lightning reads, without the optimizers' states."""
    content = {key: value for key, value in load(path).items() if key != "optimizer_states"}
    buffer = io.BytesIO()
    torch.save(plain_data(content), buffer)
    buffer.seek(0)
    return buffer
