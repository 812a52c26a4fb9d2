"""A batch in parts, as a pipeline takes it, and the parts' outputs in one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError


def rows_of(batch: Any, length: int, first: int, size: int) -> Any:
    """Returns some rows of a batch: of each tensor in it whose first dim is the batch's; the rest stays whole."""
    if isinstance(batch, Tensor):
        return batch[first : first + size] if batch.ndim and len(batch) == length else batch
    if isinstance(batch, dict):
        return {key: rows_of(value, length, first, size) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(rows_of(value, length, first, size) for value in batch)
    if hasattr(batch, "_fields"):
        return type(batch)(*(rows_of(value, length, first, size) for value in batch))
    return batch


def joined(parts: list[Any]) -> Any:
    """Returns the outputs of a batch from those of its parts: tensors row after row, and those without dims in one.

    Args:
        parts: tensors, or lists, tuples, dicts and dataclasses of them (transformers' outputs too). What is plain data
            is the first part's.

    Raises:
        DloError: for outputs of another kind.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else torch.stack(parts)
    if isinstance(first, dict):
        values = {key: joined([part[key] for part in parts]) for key in first}
        return values if type(first) is dict else type(first)(**values)
    if isinstance(first, list | tuple):
        items = [joined(list(items)) for items in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(first, **{name: joined([getattr(part, name) for part in parts]) for name in names})
    if first is None or isinstance(first, str | bytes | int | float | complex | torch.dtype | torch.device):
        return first
    raise DloError(
        f"with pp > 1 a model returns tensors, or lists, tuples, dicts and dataclasses of them, so that those of a"
        f" batch's parts can be joined, but it returns a {type(first).__name__}; leave it out where it is not needed"
        " (of transformers' models, use_cache=False), or use pp: 1"
    )
