"""The weights that a strategy has spread over ranks, whole again, whatever it has made of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlo_framework.checkpoint import FlatShard

_COMPILED = "_orig_mod."


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the model's parameters and buffers by their plain names, on the CPU, on global rank 0.

    All ranks call it; the others get an empty dict, or what was gathered with them anyway.
    """
    state = trainer.strategy.lightning_module_state_dict()
    plain = {name.replace(_COMPILED, ""): value for name, value in state.items()}
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        tensors = {name: value.detach() for name, value in plain.items() if isinstance(value, Tensor)}
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}
        return {name: value.cpu().clone() for name, value in whole.items()}
    return gather_whole(plain)


def gather_whole(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the whole tensors of a state dict whose values are spread over the ranks of the default group.

    Args:
        state: of this rank: plain tensors (all of it), DTensors, :class:`FlatShard` slices. Ranks may hold different
            names, as the stages of a pipeline do; what is no tensor is left out.

    Returns:
        On rank 0, every name that any rank holds, on the CPU. Elsewhere, part of it.
    """
    mine = [(name, isinstance(value, FlatShard)) for name, value in state.items() if _is_tensor(value)]
    listed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(listed, mine)
    owner: dict[str, int] = {}
    flat: dict[str, bool] = {}
    for rank, names in enumerate(listed):
        for name, is_flat in names:
            owner.setdefault(name, rank)
            flat[name] = is_flat
    whole: dict[str, Tensor] = {}
    for name, rank in owner.items():
        value = state.get(name)
        if flat[name]:
            joined = _join(value)
        else:
            if isinstance(value, DTensor):
                value = value.full_tensor()  # With the ranks of its mesh: they have the name too.
            joined = value.detach().cpu().clone() if isinstance(value, Tensor) else None
            if rank != 0:
                joined = _send(joined if dist.get_rank() == rank else None, rank)
        if joined is not None:
            whole[name] = joined
    return whole


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | FlatShard)


def _join(shard: FlatShard | None) -> Tensor | None:
    """Returns the tensor of which each rank holds a flat slice, on rank 0; None elsewhere."""
    part = None if shard is None else (shard.start, shard.data.detach().cpu().clone(), shard.shape)
    parts = _gathered(part)
    if parts is None:
        return None
    held = [part for part in parts if part is not None]
    shape = held[0][2]
    joined = torch.empty(shape.numel(), dtype=held[0][1].dtype)
    covered = torch.zeros(shape.numel(), dtype=torch.bool)
    for start, data, _ in held:
        joined[start : start + len(data)] = data
        covered[start : start + len(data)] = True
    assert bool(covered.all()), "the ranks' slices leave a gap"
    return joined.view(shape)


def _send(tensor: Tensor | None, source: int) -> Tensor | None:
    """Returns on rank 0 the tensor that rank ``source`` has; None elsewhere."""
    parts = _gathered(tensor)
    return None if parts is None else parts[source]


def _gathered(item: Any) -> list[Any] | None:
    """Returns every rank's item on rank 0; None elsewhere."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(item, parts, dst=0)
    return parts


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor's bytes: equal weights have equal ones."""
    return {name: checksum(tensor) for name, tensor in weights.items()}


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Returns the CRC-32 of a tensor's elements, in row-major order, behind what ``before`` is the checksum of."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before) if flat.numel() else before
