"""Counts targets and documents of a batch while it is on the CPU, so that a step never waits for the device.

Reading a number from an accelerator waits for all queued work, and the accelerator then waits for the host. Therefore
the datamodule counts before the batch is moved, and attaches the counts to the moved tensors as attributes, row by row.
Only these tensors and slices of their rows (a micro-batch of a pipeline) have them. Other tensors made from them (a
sequence shard, a new batch) have none, nor do tensors that were written to afterwards; for these the device is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlo_tasks.llm.batches import IGNORE_INDEX

_NAME = "_dlo_counted"

#: Counts of each row of a tensor `[B, L]`.
Rows = list[tuple[int, ...]]


class Documents(NamedTuple):
    """Documents of a batch: one begins with each row, and wherever positions do not increase by one.

    Attributes:
        number: Number of documents.
        longest: Tokens of the longest document.
        restart: Whether positions decrease anywhere inside a row, 1 or 0.
    """

    number: int
    longest: int
    restart: int


def count_rows(batch: Any) -> dict[str, Rows]:
    """Returns the counts of a batch's tensors on the CPU, by name; {} for a batch on another device.

    Args:
        batch: Batch, usually a dict with `labels` and `position_ids`, `[B, L]`.
    """
    found: dict[str, Rows] = {}
    if isinstance(batch, Mapping):
        labels, positions = batch.get("labels"), batch.get("position_ids")
        if isinstance(labels, Tensor) and labels.device.type == "cpu" and labels.ndim == 2:
            found["labels"] = [(number,) for number in (labels != IGNORE_INDEX).sum(dim=1).tolist()]
        if isinstance(positions, Tensor) and positions.device.type == "cpu" and positions.ndim == 2:
            found["position_ids"] = [tuple(row) for row in _documents_of_rows(positions).tolist()]
    return found


def attach_counts(batch: Any, counts: Mapping[str, Rows]) -> None:
    """Attaches counts to a batch's tensors, on their current device."""
    for name, numbers in counts.items():
        tensor = batch[name]
        if tensor.is_inference():  # Inference tensors have no version counter.
            continue
        mark = _Mark(tensor._version, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), numbers)
        for place in (tensor, tensor._base):  # A slice of a view has the view's base.
            if place is not None:
                setattr(place, _NAME, mark)


def read_target_count(labels: Tensor) -> int | None:
    """Returns the number of targets among labels, or None without attached counts."""
    rows = _left_with(labels)
    return sum(number for (number,) in rows) if rows else None


def count_documents(position_ids: Tensor) -> Documents:
    """Returns the documents of `position_ids [B, L]`, with at most one transfer from the device."""
    rows = _left_with(position_ids)
    if rows is None:
        found = _documents_of_rows(position_ids)
        return Documents(*torch.stack([found[:, 0].sum(), found[:, 1].amax(), found[:, 2].amax()]).tolist())
    numbers, lengths, falls = zip(*rows, strict=True)
    return Documents(sum(numbers), max(lengths), max(falls))


def single_documents(tokens: Tensor) -> Tensor:
    """Returns positions of rows `[B, L]` that are one document each, with attached counts."""
    rows, length = tokens.shape
    positions = torch.ones_like(tokens).cumsum(dim=1) - 1  # An arange would not be fake for fake tokens.
    attach_counts({"position_ids": positions}, {"position_ids": [(1, length, 0)] * rows})
    return positions


def mark_document_starts(position_ids: Tensor) -> Tensor:
    """Returns whether a document begins at each position, bool `[B, L]`."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    return begins


class _Mark(NamedTuple):
    """Counts attached to a tensor, with its version and memory layout at that time."""

    version: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    rows: Rows


def _left_with(tensor: Tensor) -> Rows | None:
    """Returns the counts attached to a tensor, or to the tensor of which it is a slice of rows."""
    for place in (tensor, tensor._base):
        mark: _Mark | None = getattr(place, _NAME, None)
        if mark is None or mark.version != tensor._version or not len(tensor):
            continue
        if tensor.shape[1:] != mark.shape[1:] or tensor.stride() != mark.stride or not mark.stride[0]:
            continue
        first, rest = divmod(int(tensor.storage_offset()) - mark.offset, mark.stride[0])
        if not rest and 0 <= first <= len(mark.rows) - len(tensor):
            return mark.rows[first : first + len(tensor)]
    return None


def _documents_of_rows(position_ids: Tensor) -> Tensor:
    """Returns the fields of :class:`Documents` for each row, int64 `[B, 3]`."""
    begins = mark_document_starts(position_ids)
    places = torch.arange(position_ids.shape[1], device=position_ids.device)
    newest = torch.where(begins, places, 0).cummax(dim=1).values
    falls = (position_ids.diff(dim=1) < 0).any(dim=1)
    return torch.stack([begins.sum(dim=1), (places - newest).amax(dim=1) + 1, falls.long()], dim=1)
