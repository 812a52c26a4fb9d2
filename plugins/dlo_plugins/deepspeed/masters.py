"""What DeepSpeed's optimizer steps on this rank: flat partitions of the parameters, in single precision.

DeepSpeed keeps names out of them, so they are found again by :mod:`dlo_framework.checkpoint.deepspeed_layout`.
Here is what all of them have in common; :mod:`dlo_plugins.deepspeed.flat_masters` and
:mod:`dlo_plugins.deepspeed.cut_masters` reach into DeepSpeed's optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.checkpoint import FlatShard
from dlo_framework.checkpoint.pieces import Piece
from dlo_framework.distributed.norms import parts
from dlo_framework.errors import DloError


@dataclass(frozen=True)
class Flat:
    """A flat tensor that the optimizer steps on this rank.

    Attributes:
        tensor: the partition, 1-D, padding included, or a whole parameter's copy; the memory itself.
        group: the number of the optimizer's parameter group.
        names: of the parameters that any rank's partition has a part of, in the layout's order.
        shapes: theirs.
        pieces: what this rank's partition holds of them.
    """

    tensor: Tensor
    group: int
    names: list[str]
    shapes: list[torch.Size]
    pieces: list[Piece]

    def shards(self, values: Tensor) -> dict[str, FlatShard]:
        """Returns the slices of parameters that a tensor laid out as the partition holds, by name."""
        found = {}
        for piece in self.pieces:
            data = values.view(-1)[piece.offset : piece.offset + piece.length]
            found[self.names[piece.parameter]] = FlatShard(data, self.shapes[piece.parameter], piece.start)
        return found

    def shard(self, name: str, values: Tensor) -> FlatShard:
        """Returns the slice of one parameter; empty if this rank holds nothing of it."""
        number = self.names.index(name)
        for piece in self.pieces:
            if piece.parameter == number:
                data = values.view(-1)[piece.offset : piece.offset + piece.length]
                return FlatShard(data, self.shapes[number], piece.start)
        return FlatShard(values.view(-1)[:0], self.shapes[number], 0)


class Masters(ABC):
    """This rank's partitions of the parameters, in single precision, and their gradients.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        optimizer: the one inside, which steps the partitions.
        names: the parameters' names by id.

    Attributes:
        flats: the partitions.
        divided: whether each rank has another part of the parameters.
        group_names: of each of the optimizer's parameter groups, all ranks' parameters, in its order.
    """

    divided = True

    def __init__(self, zero: Any, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.zero, self.optimizer = zero, optimizer
        self.flats = self._find(names)
        self.group_names = self._group_names(names)
        self._home = {name: flat for flat in self.flats for name in flat.names}
        self._room = [flat.tensor.grad for flat in self.flats]
        self.expose()

    @abstractmethod
    def _find(self, names: Mapping[int, str]) -> list[Flat]:
        """Returns the partitions."""

    @abstractmethod
    def _group_names(self, names: Mapping[int, str]) -> list[list[str]]:
        """Returns the names in each of the optimizer's parameter groups."""

    @property
    @abstractmethod
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in memory of its own, for the CPU to step."""

    @abstractmethod
    def publish(self) -> None:
        """Brings the partitions into the parameters of all ranks; called on all of them."""

    @abstractmethod
    def _averaged(self, number: int) -> list[Tensor] | None:
        """Returns the gradient of a partition, in runs that follow each other; None if there is none."""

    @abstractmethod
    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        """Makes DeepSpeed step with another gradient."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """Returns the memory in which DeepSpeed keeps gradients, beside the parameters' and the partitions' own."""

    @abstractmethod
    def forget(self) -> None:
        """Drops the gradients of a step that is not taken."""

    @abstractmethod
    def gathered(self) -> dict[str, FlatShard]:
        """Returns this rank's part of the gradients of an accumulation that goes on, by parameter."""

    @abstractmethod
    def take_up(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns room for the gradients of an accumulation that goes on."""

    @abstractmethod
    def expose(self) -> None:
        """Puts the partitions where others look for what an optimizer steps: in its parameter groups."""

    @abstractmethod
    def conceal(self) -> None:
        """Undoes :meth:`expose`, for DeepSpeed's step."""

    def home(self, name: str) -> Flat | None:
        """Returns the partition that a parameter is in; None if it is in none."""
        return self._home.get(name)

    # --- gradients -----------------------------------------------------------------------------------------

    def start_window(self) -> None:
        """Makes room for gradients, before each backward.

        DeepSpeed copies them into memory that ``zero_grad`` has taken away, and keeps there what an earlier step left
        for parameters that this one does not use.
        """
        if self.offloaded:
            for flat, room in zip(self.flats, self._room, strict=True):
                if flat.tensor.grad is None and room is not None:
                    flat.tensor.grad = room.zero_()

    @torch.no_grad()
    def show_gradients(self) -> None:
        """Puts each partition's gradient where an optimizer has it, so that callbacks see and may change it.

        What they see is what DeepSpeed steps with: the same memory, in the partitions' precision. DeepSpeed would make
        that copy in its step.
        """
        if self.offloaded:
            return  # It is there.
        for number, flat in enumerate(self.flats):
            runs = self._averaged(number)
            if runs is None:
                continue
            shown = _joined(runs, flat.tensor)
            flat.tensor.grad = shown.view_as(flat.tensor)
            self._replace(number, list(shown.split([run.numel() for run in runs])), shown)

    @property
    def dropped(self) -> bool:
        """Whether somebody has taken the shown gradients away, so that the step is left out."""
        return bool(self.flats) and all(flat.tensor.grad is None for flat in self.flats)

    def squared_norm(self) -> Tensor:
        """Returns the square of the 2-norm of this rank's part of the gradient, a scalar where the partitions are."""
        gradients = [flat.tensor.grad for flat in self.flats if flat.tensor.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.flats[0].tensor.device if self.flats else None)
        return torch.nn.utils.get_total_norm([part for g in gradients for part in parts(g)]).square()

    # --- state ---------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, FlatShard]:
        """Returns the weights in single precision by name: this rank's slices, empty ones too."""
        return {name: flat.shard(name, flat.tensor.detach()) for name, flat in self._home.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the partition that each parameter of which this rank holds something is in."""
        return {flat.names[piece.parameter]: flat.tensor for flat in self.flats for piece in flat.pieces}


def _joined(runs: list[Tensor], like: Tensor) -> Tensor:
    """Returns runs as one flat tensor as long as the partition, in its precision; in their own memory if they can."""
    whole = getattr(runs, "flat_partition", None)
    if whole is None:
        flat = [run.reshape(-1) for run in runs]
        missing = like.numel() - sum(run.numel() for run in flat)
        if missing:
            flat.append(flat[0].new_zeros(missing))
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    return whole.view(-1).to(like.dtype)


def expect(length: int, master: Tensor) -> None:
    """Checks that a partition is as long as its layout.

    Raises:
        DloError: if it is not.
    """
    if master.numel() != length:
        raise DloError(
            f"a partition of DeepSpeed's has {master.numel()} elements, where its layout, as dlo knows it, has"
            f" {length}; this DeepSpeed partitions otherwise: use version 0.15 to 0.19, or strategy zero2 or zero3"
        )
