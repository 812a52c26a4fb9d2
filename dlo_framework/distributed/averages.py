"""Means over the ranks that see different data, in every step: without a barrier, for which a host would wait."""

from __future__ import annotations

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from dlo_framework.contract import contract_of


def mean_over_data(trainer: Trainer | None, value: Tensor) -> Tensor:
    """Returns what `trainer.strategy.reduce(value, reduce_op="mean")` does, as another tensor, and waits for nobody.

    Lightning (2.6) reduces behind a barrier (`_sync_ddp`), where on NCCL the host waits until the device has done all
    that it was given before.

    Args:
        trainer: whose strategy runs; None for a single process. A strategy whose way to reduce is neither Lightning's
            nor a mesh's is asked itself.
        value: of this rank, in floating point, on its device.
    """
    if trainer is None or not (dist.is_available() and dist.is_initialized()):
        return value.clone()
    group = contract_of(trainer.strategy).data_group
    if group is None:
        found = trainer.strategy.reduce(value.clone(), reduce_op="mean")
        assert isinstance(found, Tensor)
        return found
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)
