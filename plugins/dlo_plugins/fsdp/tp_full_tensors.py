"""Optimizer shards of full tensors under tensor parallelism, whose ranks hold slices of parameters.

Each sliced tensor has one owner among the ranks of the tp axis, beside its owner among the ranks that share this rank's
part of the model. So each is stepped once, which Muon's orthogonalisation makes worthwhile, and its state exists once.
All tp ranks send the owner their slices of the gradient and of the values before the step, and get their slices of the
new values after it: three times the elements of the slices of other owners' tensors. Tensors without slices, such as
norms, are stepped by each tp rank.

Under expert parallelism, experts have ranks of their own, so their tensors have owners of their own: the ranks of `ep`
join their slices of a stack as those of `tp` do, and one of them steps it. Where `tp` slices the experts too, the ranks
of both axes join their slices. The other tensors are assigned to ranks as without `ep` (:class:`SeparateShards`). So an
update is that of one process, also where it depends on all experts of a stack. The owner of a stack has all of its
experts in full during a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.shards import Shard
from dlo_framework.tensor_slice import TensorSlice
from dlo_plugins.fsdp.row_shards import RowGroup
from dlo_plugins.sharding.flat_partition import assign_balanced
from dlo_plugins.sharding.optimizer_shards import FullTensorShard, OptimizerShard, concat


class JoinedTensorShard(FullTensorShard[RowGroup]):
    """Optimizer shard of full tensors that are joined from tp slices.

    Args:
        groups: Groups of the optimizer's parameters.
        communicator: Communicator of the ranks that share this rank's part of the model.
        tensor_parallel: Communicator of the tp axis; of `ep`, or of `ep` and `tp`, for experts.
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
        # Names of the sliced tensors that all tp ranks with this part of the model own together, by dtype.
        self._sliced: dict[torch.dtype, list[str]] = defaultdict(list)
        for group, number in self._places:
            name = group.names[number]
            if name in self.local_params and name in slices:
                self._sliced[group.dtype].append(name)
        names = [name for same in self._sliced.values() for name in same]
        owners = assign_balanced([self.full_shape(name).numel() for name in names], tensor_parallel.size)
        self._tp_owner = dict(zip(names, owners, strict=True))
        for name, owner in self._tp_owner.items():
            if owner != tensor_parallel.rank:
                del self.local_params[name]

    def full_shape(self, name: str) -> torch.Size:
        """Returns the shape of a parameter over all ranks; all tp ranks assign the same owners by its size."""
        shape = self.shapes[name]
        return self.slices[name].full_shape(shape) if name in self.slices else shape

    def _slice_shape(self, name: str, rank: int) -> torch.Size:
        return self._slices_of[rank][name].slice_shape(self.full_shape(name))

    def _owned_by(self, names: list[str], rank: int) -> list[str]:
        return [name for name in names if self._tp_owner[name] == rank]

    def _gather_owned(self, shards: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the full tensors that this rank owns, joined over the tp axis."""
        tensors = super()._gather_owned(shards)
        device, home = self.groups[0].device, self.groups[0].step_device
        ranks = range(self.tensor_parallel.size)
        loaded = {name for group in self.groups if id(group) in shards for name in group.names}
        for dtype, names in self._sliced_of(loaded).items():
            # A slice without elements is in no shard.
            values = {name: tensors.pop(name, torch.empty(0, dtype=dtype)).to(device).flatten() for name in names}
            sent = [concat([values[name] for name in self._owned_by(names, rank)], dtype, device) for rank in ranks]
            own = self._owned_by(names, self.tensor_parallel.rank)
            lengths = [sum(self._slice_shape(name, rank).numel() for name in own) for rank in ranks]
            received = self.tensor_parallel.exchange(sent, lengths)
            at = [0] * len(ranks)
            for name in own:
                full = torch.empty(self.full_shape(name), dtype=dtype, device=device)
                for rank in ranks:
                    shape = self._slice_shape(name, rank)
                    piece = received[rank][at[rank] : at[rank] + shape.numel()].view(shape)
                    at[rank] += shape.numel()
                    self._slices_of[rank][name].write_slice(full, piece)
                tensors[name] = full.to(home)
        return tensors

    def _sliced_of(self, names: Set[str]) -> dict[torch.dtype, list[str]]:
        """Returns those of the named tensors that are sliced and that this rank's part of the model owns, by dtype."""
        found = {dtype: [name for name in same if name in names] for dtype, same in self._sliced.items()}
        return {dtype: same for dtype, same in found.items() if same}

    def _stepped_values(self, names: Set[str]) -> dict[str, Tensor]:
        """Returns this rank's slices of the stepped values, including those of other tp ranks' tensors."""
        found = {
            name: tensor.data for name, tensor in self.local_params.items() if name in names and name not in self.slices
        }
        device, ranks = self.groups[0].device, range(self.tensor_parallel.size)
        for dtype, same in self._sliced_of(names).items():
            own = {name: self.local_params[name].data for name in self._owned_by(same, self.tensor_parallel.rank)}
            sent = []
            for rank in ranks:
                pieces = [self._slices_of[rank][name].slice_tensor(tensor).flatten() for name, tensor in own.items()]
                sent.append(concat(pieces, dtype, device))
            mine = self.tensor_parallel.rank
            theirs = [self._owned_by(same, rank) for rank in ranks]
            lengths = [sum(self._slice_shape(name, mine).numel() for name in owned) for owned in theirs]
            received = self.tensor_parallel.exchange(sent, lengths)
            for owned, values in zip(theirs, received, strict=True):
                sizes = [self._slice_shape(name, mine).numel() for name in owned]
                found |= dict(zip(owned, values.split(sizes), strict=True))
        return found


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
