"""Replaces FSDP2's two collectives on gloo, where torch's own are slower than an all-reduce of the same buffer.

:mod:`dlo_framework.distributed.collectives` implements them as exchanges between pairs of ranks. Other backends use
torch's own; complex gradients are summed through their real view.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator


class _Collective:
    """Custom collective of FSDP2; torch (2.11 to 2.15) calls ``allocate`` and the object itself."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Pairwise(_Collective):
    def __init__(self, sharers: Communicator) -> None:
        self.sharers = sharers


class PairwiseAllGather(_Pairwise):
    """All-gather of a unit's parameters, between pairs of ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fills the output with all ranks' inputs; FSDP2 has already copied this rank's input there."""
        if group.size() == self.sharers.size:
            own = self.sharers.segment(output_tensor)
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor)
            self.sharers.all_gather(output_tensor).wait()
        else:  # After forward, parameters may be sharded over fewer ranks.
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


class PairwiseReduceScatter(_Pairwise):
    """Reduce-scatter of a unit's gradients, between pairs of ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fills the output with this rank's shard of the inputs' sum or mean; the input is overwritten."""
        part = self.sharers.reduce_scatter(input_tensor).wait()
        if op == dist.ReduceOp.AVG:
            torch.div(part, self.sharers.size, out=output_tensor)
        else:
            assert op == dist.ReduceOp.SUM
            output_tensor.copy_(part)


class ComplexReduceScatter(_Collective):
    """Reduce-scatter of a unit's complex gradients; torch's (2.11 to 2.15) supports real numbers only."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fills the output with this rank's shard of the inputs' sum."""
        real, parts = torch.view_as_real(output_tensor), torch.view_as_real(input_tensor)
        return dist.reduce_scatter_tensor(real, parts, group=group, op=op, async_op=async_op)
