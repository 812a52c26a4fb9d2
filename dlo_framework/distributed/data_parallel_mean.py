"""Mean of a value over the data-parallel ranks, without the barrier that makes the host wait for the device."""

from __future__ import annotations

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from dlo_framework.strategy_contract import contract_of


def mean_over_data(trainer: Trainer | None, value: Tensor) -> Tensor:
    """Returns the mean of a value over the data-parallel ranks, as a new tensor, without a barrier.

    It equals `trainer.strategy.reduce(value, reduce_op="mean")`. Lightning (2.6) reduces behind a barrier
    (`_sync_ddp`), where on NCCL the host waits until the device has finished all earlier work.

    Args:
        trainer: Trainer of the run; None for a single process. A strategy with a `reduce` that is neither Lightning's
            nor a mesh's is called itself.
        value: Floating-point tensor of this rank, on its device.
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
