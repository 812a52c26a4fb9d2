"""What the host has to know of a batch's values, counted while the batch is on the CPU.

A host that asks an accelerator for a number waits until that has done all it was given before, and the accelerator then
waits for the host. So the datamodule counts before the batch is moved, and leaves the counts with the tensors that a
step is given: as attributes, row by row, which only these very tensors and some of their rows have (a micro-batch of a
pipeline). What is cut or made of them otherwise (a share of a sequence, another's batch) has none, and neither has what
was written to since; then the device is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlo_tasks.llm.batches import IGNORED

_NAME = "_dlo_counted"

#: What is known of a tensor `[B, L]`, row by row.
Rows = list[tuple[int, ...]]


class Documents(NamedTuple):
    """The documents of a batch's rows: one begins with each row, and wherever positions do not go up by one.

    Attributes:
        number: of them.
        longest: tokens of the longest.
        begin_anew: 1 if positions fall anywhere inside a row, else 0.
    """

    number: int
    longest: int
    begin_anew: int


def count(batch: Any) -> dict[str, Rows]:
    """Returns what is to be known of a batch on the CPU, by the name of the tensor that it is known of; {} elsewhere.

    Args:
        batch: a dict, which may have `labels` and `position_ids`, `[B, L]`.
    """
    found: dict[str, Rows] = {}
    if isinstance(batch, Mapping):
        labels, positions = batch.get("labels"), batch.get("position_ids")
        if isinstance(labels, Tensor) and labels.device.type == "cpu" and labels.ndim == 2:
            found["labels"] = [(number,) for number in (labels != IGNORED).sum(dim=1).tolist()]
        if isinstance(positions, Tensor) and positions.device.type == "cpu" and positions.ndim == 2:
            found["position_ids"] = [tuple(row) for row in _documents_of_rows(positions).tolist()]
    return found


def leave(batch: Any, counts: Mapping[str, Rows]) -> None:
    """Leaves counts with a batch's tensors, where these are now."""
    for name, numbers in counts.items():
        tensor = batch[name]
        if tensor.is_inference():  # Those do not note when they are written to.
            continue
        mark = _Mark(tensor._version, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), numbers)
        for place in (tensor, tensor._base):  # What is cut of a view has the view's base.
            if place is not None:
                setattr(place, _NAME, mark)


def targets_of(labels: Tensor) -> int | None:
    """Returns the number of labels that are targets; None if only the device knows it."""
    rows = _left_with(labels)
    return sum(number for (number,) in rows) if rows else None


def documents_of(position_ids: Tensor) -> Documents:
    """Returns the documents of `position_ids [B, L]`, by one transfer from the device at most."""
    rows = _left_with(position_ids)
    if rows is None:
        found = _documents_of_rows(position_ids)
        return Documents(*torch.stack([found[:, 0].sum(), found[:, 1].amax(), found[:, 2].amax()]).tolist())
    numbers, lengths, falls = zip(*rows, strict=True)
    return Documents(sum(numbers), max(lengths), max(falls))


def begins_of(position_ids: Tensor) -> Tensor:
    """Returns where documents begin, bool `[B, L]`."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    return begins


class _Mark(NamedTuple):
    """What is left with a tensor: its version and place in memory, and what is known of its rows."""

    version: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    rows: Rows


def _left_with(tensor: Tensor) -> Rows | None:
    """Returns what was left with a tensor, or with the one that it is some rows of."""
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
    """Returns what :class:`Documents` says of each row, int64 `[B, 3]`."""
    begins = begins_of(position_ids)
    places = torch.arange(position_ids.shape[1], device=position_ids.device)
    newest = torch.where(begins, places, 0).cummax(dim=1).values
    falls = (position_ids.diff(dim=1) < 0).any(dim=1)
    return torch.stack([begins.sum(dim=1), (places - newest).amax(dim=1) + 1, falls.long()], dim=1)
