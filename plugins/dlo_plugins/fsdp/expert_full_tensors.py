"""Optimizer shards of full tensors under expert parallelism.

Experts have ranks of their own, so their tensors have owners of their own: the ranks of `ep` join their slices of a
stack as the ranks of `tp` do (:mod:`dlo_plugins.fsdp.tp_full_tensors`), and one of them steps it. Where `tp` slices the
experts too, the ranks of both axes join their slices. The other tensors are assigned to ranks as without `ep`. So an
update is that of one process, also where it depends on all experts of a stack. The owner of a stack has all of its
experts in full during a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dlo_framework.shards import Shard
from dlo_plugins.fsdp.row_shards import RowGroup
from dlo_plugins.sharding.optimizer_shards import FullTensorShard, OptimizerShard


class SeparateShards(OptimizerShard[RowGroup]):
    """Optimizer shard of tensors that several groups of ranks share, each by a shard of its own.

    Args:
        parts: Shards of full tensors, each of other parameters of the same optimizer.
    """

    def __init__(self, parts: Sequence[FullTensorShard[RowGroup]]) -> None:
        super().__init__([group for part in parts for group in part.groups], parts[0].communicator)
        self.parts = parts
        for part in parts:
            self.local_params |= part.local_params

    def _part(self, name: str) -> FullTensorShard[RowGroup]:
        return next(part for part in self.parts if name in part.shapes)

    def full_shape(self, name: str) -> torch.Size:
        """Returns the shape of a parameter, all ranks' shards together."""
        return self._part(name).full_shape(name)

    def load_params(self) -> bool:
        """Loads the shards' values into the local parameters; returns whether the user's code has written to them."""
        return sum(part.load_params() for part in self.parts) > 0

    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the local parameters; unused parameters keep None."""
        used = set(used)
        for part in self.parts:
            part.set_grads(used)

    def all_gather_params(self) -> None:
        """Copies the stepped values into the shards, and starts their all-gather."""
        for part in self.parts:
            part.all_gather_params()

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor of a parameter as a shard of the full one, for checkpoints."""
        return self._part(name).as_shard(name, value)

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard for a state tensor of a full shape."""
        return self._part(name).empty_shard(name, shape, dtype)
