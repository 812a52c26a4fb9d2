"""What the host has to know of a batch's values, counted while the batch is on the CPU.

A host that asks an accelerator for a number waits until that has done all it was given before, and the accelerator then
waits for the host. So the datamodule counts before the batch is moved, and leaves the counts with the tensors that a
step is given: as attributes, which only these very tensors have. What is cut or made of them (a micro-batch of a
pipeline, a share of a sequence, another's batch) has none, and neither has what was written to since; then the device
is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlo_tasks.llm.batches import IGNORED

_NAME = "_dlo_counted"


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


def count(batch: Any) -> dict[str, tuple[int, ...]]:
    """Returns what is to be known of a batch on the CPU, by the name of the tensor that it is known of; {} elsewhere.

    Args:
        batch: a dict, which may have `labels` and `position_ids`, `[B, L]`.
    """
    found: dict[str, tuple[int, ...]] = {}
    if isinstance(batch, Mapping):
        labels, positions = batch.get("labels"), batch.get("position_ids")
        if isinstance(labels, Tensor) and labels.device.type == "cpu":
            found["labels"] = (int((labels != IGNORED).sum()),)
        if isinstance(positions, Tensor) and positions.device.type == "cpu":
            found["position_ids"] = tuple(_documents(positions))
    return found


def leave(batch: Any, counts: Mapping[str, tuple[int, ...]]) -> None:
    """Leaves counts with a batch's tensors, where these are now."""
    for name, numbers in counts.items():
        tensor = batch[name]
        if not tensor.is_inference():  # Those do not note when they are written to.
            setattr(tensor, _NAME, (tensor._version, *numbers))


def targets_of(labels: Tensor) -> int | None:
    """Returns the number of labels that are targets; None if only the device knows it."""
    found = _left_with(labels)
    return found[0] if found else None


def documents_of(position_ids: Tensor) -> Documents:
    """Returns the documents of `position_ids [B, L]`, by one transfer from the device at most."""
    found = _left_with(position_ids)
    return Documents(*found) if found else _documents(position_ids)


def begins_of(position_ids: Tensor) -> Tensor:
    """Returns where documents begin, bool `[B, L]`."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    return begins


def _left_with(tensor: Tensor) -> tuple[int, ...]:
    version, *numbers = getattr(tensor, _NAME, (None,))
    return tuple(numbers) if version is not None and version == tensor._version else ()


def _documents(position_ids: Tensor) -> Documents:
    begins = begins_of(position_ids).flatten()
    places = torch.arange(len(begins), device=begins.device)
    newest = torch.where(begins, places, 0).cummax(dim=0).values
    falls = (position_ids.diff(dim=1) < 0).any()
    return Documents(*torch.stack([begins.sum(), (places - newest).amax() + 1, falls.long()]).tolist())
