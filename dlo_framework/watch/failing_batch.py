"""Notes the batch that was processed when a run failed, so that its traceback shows the shapes of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dlo_framework.errors import DloError

#: Number of entries of a list or mapping that are described.
_ENTRIES = 8


def describe_batch(batch: Any) -> str:
    """Returns the types, shapes and dtypes of a batch's parts: ``(Tensor[16, 3] float32, Tensor[16] int64)``."""
    if isinstance(batch, Tensor):
        return f"Tensor{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        parts = [f"{key}: {describe_batch(value)}" for key, value in list(batch.items())[:_ENTRIES]]
        return "{" + ", ".join([*parts, *_rest(batch)]) + "}"
    if isinstance(batch, list | tuple):
        parts = [describe_batch(value) for value in batch[:_ENTRIES]]
        return "(" + ", ".join([*parts, *_rest(batch)]) + ")"
    return type(batch).__name__


def _rest(batch: Any) -> list[str]:
    return [f"{len(batch) - _ENTRIES} more"] if len(batch) > _ENTRIES else []


def note_batch(error: BaseException, batch: Any, source: Any) -> None:
    """Adds a note about a batch to an error that ends a run; dlo's own errors say enough.

    Args:
        error: Error.
        batch: Batch that was processed; None if there was none.
        source: Datamodule, or None.
    """
    if batch is None or isinstance(error, DloError) or not isinstance(error, Exception):
        return
    of = "" if source is None else f" of {type(source).__name__}"
    error.add_note(f"The batch{of} was {describe_batch(batch)}.")
