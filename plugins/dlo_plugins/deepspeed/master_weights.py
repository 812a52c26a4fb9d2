"""Master weights that DeepSpeed's optimizer steps on this rank: flat partitions in single precision.

DeepSpeed does not keep the parameters' names, so :mod:`dlo_plugins.deepspeed.deepspeed_layout` finds them. This
module has the common part; :mod:`dlo_plugins.deepspeed.stage12_weights` and
:mod:`dlo_plugins.deepspeed.stage3_weights` read DeepSpeed's optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard
from dlo_plugins.sharding.flat_slices import FlatSlice


@dataclass(frozen=True)
class MasterPartition:
    """Flat tensor that the optimizer steps on this rank.

    Attributes:
        tensor: Partition, 1-D with padding, or the copy of a full parameter; it shares DeepSpeed's memory.
        group: Index of the optimizer's parameter group.
        names: Names of the parameters with a slice in any rank's partition, in the layout's order.
        shapes: Full shapes of these parameters.
        pieces: Slices of the parameters in this rank's partition.
    """

    tensor: Tensor
    group: int
    names: list[str]
    shapes: list[torch.Size]
    pieces: list[FlatSlice]

    def shards(self, values: Tensor) -> dict[str, FlatShard]:
        """Returns the slices of parameters in a tensor that is laid out as the partition, by name."""
        found = {}
        for piece in self.pieces:
            data = values.view(-1)[piece.offset : piece.offset + piece.length]
            found[self.names[piece.parameter]] = FlatShard(data, self.shapes[piece.parameter], piece.start)
        return found

    def shard(self, name: str, values: Tensor) -> FlatShard:
        """Returns the slice of one parameter; empty if this rank has none."""
        number = self.names.index(name)
        for piece in self.pieces:
            if piece.parameter == number:
                data = values.view(-1)[piece.offset : piece.offset + piece.length]
                return FlatShard(data, self.shapes[number], piece.start)
        return FlatShard(values.view(-1)[:0], self.shapes[number], 0)


class MasterWeights(ABC):
    """This rank's master weights (partitions in single precision) and their gradients.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        optimizer: Inner optimizer, which steps the partitions.
        names: Names of the parameters by id.

    Attributes:
        partitions: Partitions of this rank.
        sharded: Whether each rank has different slices of the parameters.
        group_names: Names of all ranks' parameters in each of the optimizer's parameter groups, in its order.
    """

    sharded = True

    def __init__(self, zero: Any, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.zero, self.optimizer = zero, optimizer
        self.partitions = self._find(names)
        self.group_names = self._group_names(names)
        self._home = {name: flat for flat in self.partitions for name in flat.names}
        self._buffers = [flat.tensor.grad for flat in self.partitions]
        self.expose_partitions()

    @abstractmethod
    def _find(self, names: Mapping[int, str]) -> list[MasterPartition]:
        """Returns this rank's partitions."""

    @abstractmethod
    def _group_names(self, names: Mapping[int, str]) -> list[list[str]]:
        """Returns the names in each of the optimizer's parameter groups."""

    @property
    @abstractmethod
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in buffers of its own, for the CPU to step."""

    @abstractmethod
    def load_params(self) -> None:
        """Copies the partitions into the parameters of all ranks; called on all of them."""

    @abstractmethod
    def _averaged(self, number: int) -> list[Tensor] | None:
        """Returns the gradient of a partition as consecutive runs; None if there is none."""

    @abstractmethod
    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        """Replaces the gradient that DeepSpeed steps with."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """Returns DeepSpeed's gradient buffers, beside the parameters' and the partitions' own memory."""

    @abstractmethod
    def drop_grads(self) -> None:
        """Drops the gradients of a skipped step."""

    @abstractmethod
    def grad_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, by parameter."""

    @abstractmethod
    def zero_grad_shards(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns zeroed shards into which the gradients of an unfinished accumulation are loaded."""

    @abstractmethod
    def expose_partitions(self) -> None:
        """Puts the partitions into the optimizer's parameter groups, where callbacks look for them."""

    @abstractmethod
    def hide_partitions(self) -> None:
        """Undoes :meth:`expose_partitions`, for DeepSpeed's step."""

    def find_partition(self, name: str) -> MasterPartition | None:
        """Returns the partition of a parameter; None if it is in none."""
        return self._home.get(name)

    # --- gradients -----------------------------------------------------------------------------------------

    def start_window(self) -> None:
        """Prepares the gradient buffers, before each backward.

        DeepSpeed copies gradients into memory that ``zero_grad`` has freed, and there keeps an earlier step's gradients
        of parameters that this step does not use.
        """
        if self.offloaded:
            for flat, buffer in zip(self.partitions, self._buffers, strict=True):
                if flat.tensor.grad is None and buffer is not None:
                    flat.tensor.grad = buffer.zero_()

    @torch.no_grad()
    def expose_grads(self) -> None:
        """Sets each partition's gradient as its ``grad``, so that callbacks can read and change it.

        It is the memory that DeepSpeed steps with, in the partitions' precision; DeepSpeed would make that copy in its
        step.
        """
        if self.offloaded:
            return  # It is set already.
        for number, flat in enumerate(self.partitions):
            runs = self._averaged(number)
            if runs is None:
                continue
            shown = _joined(runs, flat.tensor)
            flat.tensor.grad = shown.view_as(flat.tensor)
            self._replace(number, list(shown.split([run.numel() for run in runs])), shown)

    @abstractmethod
    def store_grads(self) -> None:
        """Stores gradients that callbacks have changed, where what they see is a copy; before a step."""

    @property
    def dropped(self) -> bool:
        """Whether a callback has dropped the exposed gradients, so that the step is skipped."""
        return bool(self.partitions) and all(flat.tensor.grad is None for flat in self.partitions)

    def gradients(self) -> list[Tensor]:
        """Returns tensors with the joint 2-norm of this rank's shard of the gradient."""
        return [flat.tensor.grad for flat in self.partitions if flat.tensor.grad is not None]

    # --- state ---------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, FlatShard]:
        """Returns the master weights by name: this rank's slices, empty ones included."""
        return {name: flat.shard(name, flat.tensor.detach()) for name, flat in self._home.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the partition of each parameter of which this rank has a slice."""
        return {flat.names[piece.parameter]: flat.tensor for flat in self.partitions for piece in flat.pieces}


def _joined(runs: list[Tensor], like: Tensor) -> Tensor:
    """Returns runs as one flat tensor of the partition's length and precision, sharing their memory if possible."""
    whole = getattr(runs, "flat_partition", None)
    if whole is None:
        flat = [run.reshape(-1) for run in runs]
        missing = like.numel() - sum(run.numel() for run in flat)
        if missing:
            flat.append(flat[0].new_zeros(missing))
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    return whole.view(-1).to(like.dtype)


def check_length(length: int, master: Tensor) -> None:
    """Checks the length of a partition against its layout.

    Raises:
        DloError: If they differ.
    """
    if master.numel() != length:
        raise DloError(
            f"a DeepSpeed partition must have {length} elements by the layout that dlo knows, got {master.numel()};"
            " this DeepSpeed version has another layout: use version 0.15 to 0.19, or strategy zero2 or zero3"
        )
