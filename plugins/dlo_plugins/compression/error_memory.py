"""Saves and restores the error memory of gradient compression, which differs on each rank and is as large as the model.

It is stored as sharded tensors, so that each rank reads and writes its own memory only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.shards import FlatShard
from dlo_plugins.compression.compressed_all_reduce import CompressedAllReduce
from dlo_plugins.compression.ddp_hooks import PowerSGD
from dlo_plugins.compression.one_bit import OneBitOptimizer

#: Key of the memory in a checkpoint.
KEY = "gradient_compression"


def row_of_rank(own: Tensor) -> FlatShard:
    """Returns a rank's 1-D tensor [n] as its row of one [ranks, n]."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return FlatShard(own, torch.Size((ranks, own.numel())), rank * own.numel())


def chunk_of_rank(own: Tensor) -> FlatShard:
    """Returns a rank's 1-D tensor [n] as its chunk of one [ranks * n]."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return FlatShard(own, torch.Size((ranks * own.numel(),)), rank * own.numel())


def one_bit_state(all_reduce: CompressedAllReduce, optimizer: OneBitOptimizer) -> dict[str, Any]:
    """Returns the errors of a compressed all-reduce and the rank's local momenta, for a checkpoint."""
    layout = all_reduce.layout
    assert layout is not None
    return {
        "method": "one_bit",
        "ranks": layout.ranks,
        "block": layout.block,
        "sizes": list(layout.sizes),
        "errors": {
            "worker": row_of_rank(all_reduce.worker_error),
            "server": chunk_of_rank(all_reduce.server_error),
            "momentum": row_of_rank(torch.cat([own.reshape(-1) for own in optimizer.own_momenta()])),
        },
    }


def restore_one_bit(all_reduce: CompressedAllReduce, optimizer: OneBitOptimizer, saved: Mapping[str, Any]) -> str:
    """Restores the state that :func:`one_bit_state` returned.

    Returns:
        Reason why it cannot be restored; empty where it was.
    """
    momenta = optimizer.momenta()
    sizes = [momentum.numel() for momentum in momenta]
    problem = _mismatch(saved, method="one_bit", ranks=all_reduce.size, block=all_reduce.block, sizes=sizes)
    if problem or not optimizer.compressing:
        return problem or f"freeze_step={optimizer.freeze_step} is not reached"
    all_reduce.prepare(momenta)
    errors = as_lazy_state_dict(saved["errors"])
    errors.read_into("worker", row_of_rank(all_reduce.worker_error))
    errors.read_into("server", chunk_of_rank(all_reduce.server_error))
    own = optimizer.own_momenta()
    flat = torch.empty(sum(sizes), dtype=own[0].dtype)
    errors.read_into("momentum", row_of_rank(flat))
    for momentum, part in zip(own, flat.split(sizes), strict=True):
        momentum.copy_(part.view_as(momentum))
    return ""


def powersgd_state(powersgd: PowerSGD) -> dict[str, Any]:
    """Returns PowerSGD's errors and factors, for a checkpoint."""
    errors, factors = powersgd.by_parameter()
    return {
        "method": "powersgd",
        "ranks": dist.get_world_size(),
        "matrix_rank": powersgd.state.matrix_approximation_rank,
        "errors": {f"error.{name}": row_of_rank(error) for name, error in errors.items()},
        # Factors are the same on all ranks.
        "factors": {f"factor.{name}": factor for name, factor in factors.items()},
    }


def restore_powersgd(powersgd: PowerSGD, saved: Mapping[str, Any]) -> str:
    """Restores the state that :func:`powersgd_state` returned.

    Returns:
        Reason why it cannot be restored; empty where it was.
    """
    rank = powersgd.state.matrix_approximation_rank
    problem = _mismatch(saved, method="powersgd", ranks=dist.get_world_size(), matrix_rank=rank)
    if problem:
        return problem
    errors = as_lazy_state_dict(saved["errors"])
    for key in errors:
        ranks, elements = errors.shape(key)
        assert ranks == dist.get_world_size()
        own = torch.empty(elements, dtype=errors.dtype(key))
        errors.read_into(key, row_of_rank(own))
        powersgd.errors[key.removeprefix("error.")] = own
    for key, factor in saved["factors"].items():
        powersgd.factors[key.removeprefix("factor.")] = factor
    return ""


def _mismatch(saved: Mapping[str, Any], **wanted: Any) -> str:
    """Returns the setting in which a checkpoint differs, as text; empty where there is none."""
    for key, value in wanted.items():
        if saved.get(key) != value:
            if key == "sizes":
                return "it has other parameters"
            return f"{key} was {saved.get(key)} and is {value}"
    return ""
