"""Optimizer shards of full tensors under tensor parallelism, whose ranks hold slices of parameters.

Each rank of the tp axis joins the slices of the tensors that it owns among the ranks that share its part of the model,
and steps the same full tensors as the other tp ranks. So the step's work and the optimizer's state are not divided by
tp, as they are for an elementwise optimizer. The gradients of a sliced parameter are exchanged once a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.tensor_slice import TensorSlice
from dlo_plugins.fsdp.row_shards import RowGroup
from dlo_plugins.sharding.optimizer_shards import FullTensorShard


class JoinedTensorShard(FullTensorShard[RowGroup]):
    """Optimizer shard of full tensors that are joined from tp slices.

    Args:
        groups: Groups of the optimizer's parameters.
        communicator: Communicator of the ranks that share this rank's part of the model.
        tensor_parallel: Communicator of the tp axis.
        slices: This rank's slices, by parameter name.
    """

    def __init__(
        self,
        groups: list[RowGroup],
        communicator: Communicator,
        tensor_parallel: Communicator,
        slices: dict[str, TensorSlice],
    ) -> None:
        self.tensor_parallel, self.slices = tensor_parallel, slices
        self._slices_of: list[dict[str, TensorSlice]] = [{} for _ in range(tensor_parallel.size)]
        dist.all_gather_object(self._slices_of, slices, group=tensor_parallel.group)
        super().__init__(groups, communicator)

    def full_shape(self, name: str) -> torch.Size:
        """Returns the shape of a parameter without slices; by its size, all tp ranks assign the same owner."""
        shape = self.shapes[name]
        return self.slices[name].full_shape(shape) if name in self.slices else shape

    def _gather_owned(self, shards: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the full tensors that this rank owns, joined over the tp axis."""
        parts = super()._gather_owned(shards)
        loaded = [
            (group, number)
            for group, number in self._places
            if id(group) in shards and group.names[number] in self.local_params and group.names[number] in self.slices
        ]
        for group, number in loaded:
            name = group.names[number]
            part = parts.get(name)
            if part is None:  # This rank's slice has no elements.
                part = torch.empty(self.shapes[name], dtype=group.dtype, device=group.step_device)
            parts[name] = self._join(name, part.to(group.device)).to(group.step_device)
        return parts

    def _join(self, name: str, part: Tensor) -> Tensor:
        own = self.slices[name]
        whole = part.new_empty(own.full_shape(part.shape))
        lengths = [slices[name].slice_shape(whole.shape).numel() for slices in self._slices_of]
        sent = part.new_zeros(max(lengths))  # Slices may differ in length; a collective's may not.
        sent[: part.numel()] = part.flatten()
        received = self.tensor_parallel.all_gather_parts(sent)
        for slices, row, length in zip(self._slices_of, received, lengths, strict=True):
            there = slices[name]
            values, at = row[:length].view(there.slice_shape(whole.shape)), 0
            for first, count in there.runs:
                whole.narrow(there.dim, first, count).copy_(values.narrow(there.dim, at, count))
                at += count
        return whole

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Copies this rank's slices of the stepped values into the shards, and starts their all-gather."""
        for name, tensor in self.local_params.items():
            if name in self.slices and tensor.numel():
                tensor.grad = None
                tensor.data = self.slices[name].slice_tensor(tensor.data)
        super().all_gather_params()
