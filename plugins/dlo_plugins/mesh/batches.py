"""Slices a batch into micro-batches, and concatenates their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError


def concat_batches(parts: list[Any]) -> Any:
    """Returns the outputs of a batch from those of its parts: tensors are concatenated, scalar tensors stacked.

    Args:
        parts: Outputs of the parts: tensors, or lists, tuples, dicts and dataclasses of them (transformers' outputs
            too). Plain data is taken from the first part.

    Raises:
        DloError: The outputs are of another kind.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else torch.stack(parts)
    if isinstance(first, dict):
        values = {key: concat_batches([part[key] for part in parts]) for key in first}
        return values if type(first) is dict else type(first)(**values)
    if isinstance(first, list | tuple):
        items = [concat_batches(list(items)) for items in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: concat_batches([getattr(part, name) for part in parts]) for name in names}
        )
    if first is None or isinstance(first, str | bytes | int | float | complex | torch.dtype | torch.device):
        return first
    raise DloError(
        "a model's outputs under pp > 1 must be tensors, or lists, tuples, dicts and dataclasses of them, so that those"
        f" of micro-batches can be concatenated, got a {type(first).__name__}; leave it out if it is not needed (for"
        " transformers' models, use_cache=False), or use pp: 1"
    )
