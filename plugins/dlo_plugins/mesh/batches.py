"""Slices a batch into micro-batches, and concatenates their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError


def concat_batches(parts: list[Any], weights: Sequence[float]) -> Any:
    """Returns the outputs of a batch from those of its parts: tensors are concatenated, scalars averaged.

    Args:
        parts: Outputs of the parts: tensors, or lists, tuples, dicts and dataclasses of them (transformers' outputs
            too). Other plain data is equal in all parts.
        weights: Weights of the parts, which sum to one, for the mean of scalars.

    Raises:
        DloError: The outputs are of another kind.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(parts)
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        # The exact value where it does not depend on the part, such as a learned temperature.
        return first + sum(weight * (part - first) for weight, part in zip(weights, parts, strict=True))
    if isinstance(first, dict):
        values = {key: concat_batches([part[key] for part in parts], weights) for key in first}
        return values if type(first) is dict else type(first)(**values)
    if isinstance(first, list | tuple):
        items = [concat_batches(list(items), weights) for items in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: concat_batches([getattr(part, name) for part in parts], weights) for name in names}
        )
    plain = first is None or isinstance(first, Tensor | str | bytes | int | complex | torch.dtype | torch.device)
    if plain and all(bool(part == first) for part in parts):
        return first
    got = f"{'different values of' if plain else 'a'} {type(first).__name__}"
    raise DloError(
        "a model's outputs under pp > 1 must be tensors, or lists, tuples, dicts and dataclasses of them, so that those"
        f" of micro-batches can be concatenated, got {got}; leave it out if it is not needed (for"
        " transformers' models, use_cache=False), or use pp: 1"
    )
