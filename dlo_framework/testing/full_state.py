"""Full tensors on rank 0, gathered from the shards of any strategy, and their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlo_framework.shards import Box, FlatShard, Shard, held_boxes, is_tiling, slice_view
from dlo_framework.shards import full_box as whole_box
from dlo_framework.strategy_contract import plain_name

#: Most bytes of the tensors in one message, unless a single tensor is larger.
_BUNDLE = 64 << 20


def gather_full_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the model's full parameters and buffers by their plain names, on the CPU, on global rank 0.

    Called on all ranks; the other ranks get an empty dict.
    """
    state = trainer.strategy.lightning_module_state_dict()
    plain = {plain_name(name): value for name, value in state.items()}
    grouped = dist.is_available() and dist.is_initialized()
    flat = any(isinstance(value, FlatShard) for value in plain.values())  # Of ZeRO 3, also on one rank.
    if not grouped or (dist.get_world_size() == 1 and not flat):
        tensors = {name: value.detach() for name, value in plain.items() if isinstance(value, Tensor)}
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}
        return {name: value.cpu().clone() for name, value in whole.items()}
    return gather_full_tensors(plain)


def gather_full_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gathers the full tensors of a state dict that is sharded over the ranks of the default group.

    Args:
        state: State of this rank: plain tensors, DTensors, flat or cut shards. Ranks may have different names, as the
            stages of a pipeline do; values that are not tensors are left out.

    Returns:
        Full tensors on the CPU by name, of all ranks' names, on rank 0; an empty dict on other ranks.
    """
    held = {name: _boxes(value) for name, value in state.items() if isinstance(value, Shard)}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: (shape, dtype, list(boxes)) for name, (shape, dtype, boxes) in held.items()})
    sender: dict[tuple[str, Box], int] = {}
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for rank, of_rank in enumerate(told):
        for name, (shape, dtype, boxes) in of_rank.items():
            kinds.setdefault(name, (shape, dtype))
            for box in boxes:
                sender.setdefault((name, box), rank)
    me, whole = dist.get_rank(), {}
    for names in _bundles(kinds):
        mine = {
            name: {box: part.cpu().clone() for box, part in held[name][2].items() if sender[name, box] == me}
            for name in names
            if name in held
        }
        parts = _gathered(mine)
        if parts is not None:
            for name in names:
                of_all = {box: part for of_rank in parts for box, part in of_rank.get(name, {}).items()}
                whole[name] = _assembled(name, *kinds[name], of_all)
    return whole


def _bundles(kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Iterator[list[str]]:
    """Yields the names of tensors to send in one message, because each message has a fixed cost."""
    names: list[str] = []
    held = 0
    for name, (shape, dtype) in kinds.items():
        size = shape.numel() * dtype.itemsize
        if names and held + size > _BUNDLE:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names


def _boxes(value: Shard) -> tuple[torch.Size, torch.dtype, dict[Box, Tensor]]:
    return value.shape, value.dtype, {box: part for box, part in held_boxes(value.detach()) if box.numel}


def _assembled(name: str, shape: torch.Size, dtype: torch.dtype, parts: Mapping[Box, Tensor]) -> Tensor:
    assert is_tiling(tuple(shape), parts), f"the ranks' shards of {name}, shape {tuple(shape)}, do not tile it"
    joined = torch.empty(shape, dtype=dtype)
    for box, part in parts.items():
        slice_view(joined, whole_box(tuple(shape)), box).copy_(part)
    return joined


def _gathered(item: Any) -> list[Any] | None:
    """Returns every rank's item on rank 0; None on other ranks."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(item, parts, dst=0)
    return parts


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor's bytes."""
    return {name: checksum(tensor) for name, tensor in weights.items()}


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Returns the CRC-32 of a tensor's elements, in row-major order, continued from the checksum ``before``."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before) if flat.numel() else before
