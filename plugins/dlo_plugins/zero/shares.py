"""What this rank's optimizer steps in place of the parameters: pieces of them, or whole tensors it owns.

An optimizer that treats each element by itself steps this rank's pieces: views of the group's shard. One that needs
whole tensors steps those that the rank owns, dealt out so that the ranks' loads are balanced. Parameters and gradients
stay cut into equal flat segments either way; the owners get theirs whole for the step only, in one exchange of 1/N of
them each way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.checkpoint import FlatShard
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.held import local
from dlo_framework.errors import DloError
from dlo_plugins.zero.group import FlatGroup
from dlo_plugins.zero.partition import balance


class Share(ABC):
    """This rank's share of one optimizer's parameters.

    Args:
        groups: the flat groups of the optimizer's parameters.
        communicator: the ranks.

    Attributes:
        stand_ins: what the optimizer steps, by parameter name; names this rank owns nothing of are missing.
        group_names: the names of each of the optimizer's parameter groups, all ranks' parameters included.
        spent: whether the optimizer has taken a step with the gradients that were given.
    """

    def __init__(self, groups: list[FlatGroup], communicator: Communicator) -> None:
        self.groups, self.communicator = groups, communicator
        self.shapes = {
            name: parameter.shape
            for group in groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        }
        self.stand_ins: dict[str, Tensor] = {}
        self.group_names: list[list[str]] = []
        self.spent = False
        self._given: list[Tensor] = []

    def move_into(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Puts the stand-ins in the optimizer's parameter groups, in the parameters' order.

        A rank that owns nothing gets an empty tensor, so that what is done to the optimizer's parameters (such as
        ``toggle_optimizer``, which switches their ``requires_grad``) shows on every rank.

        Args:
            optimizer: as ``configure_optimizers`` made it; it has taken no step.
            names: parameters' names by id.

        Raises:
            DloError: Its constructor has made state that is not one value a tensor.
        """
        self.group_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        given = [p for group in optimizer.param_groups for p in group["params"]]
        made = {names[id(p)]: optimizer.state.pop(p) for p in given if p in optimizer.state}
        for group, members in zip(optimizer.param_groups, self.group_names, strict=True):
            group["params"] = [self.stand_ins[name] for name in members if name in self.stand_ins]
        for name, state in made.items():
            if name in self.stand_ins:
                optimizer.state[self.stand_ins[name]] = {
                    key: self._own_part(optimizer, name, key, value) for key, value in state.items()
                }
        if not any(group["params"] for group in optimizer.param_groups):
            home = self.groups[0].home if self.groups else None
            self.witness = torch.empty(0, device=home, requires_grad=True)
            optimizer.param_groups[0]["params"].append(self.witness)

    def _own_part(self, optimizer: Optimizer, name: str, key: str, value: Any) -> Any:
        """Returns the part for a stand-in of state that a constructor has made, as torch's Adagrad does."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        room = self.room(name, self.shapes[name], value.dtype)
        part, made = room.data if isinstance(room, FlatShard) else room, local(value).flatten()
        if part.numel() and not (made.numel() and bool((made == made[0]).all())):
            raise DloError(
                f"an optimizer's state must be made in its first step, or be one value a tensor, got {key!r} of"
                f" {name!r} from {type(optimizer).__name__}'s constructor; make it in step()"
            )
        return part.copy_(made[0]) if part.numel() else part

    def bring(self) -> None:
        """Gives the stand-ins the shards' values, where they are of a copy of them."""
        for group in self.groups:
            group.bring()

    @abstractmethod
    def give_gradients(self, used: Iterable[str]) -> None:
        """Gives the stand-ins their gradients; those of parameters that nobody used stay None."""

    @abstractmethod
    def publish(self) -> None:
        """Brings the stepped values into the shards, and starts sending them to all ranks."""

    @abstractmethod
    def canonical(self, name: str, value: Tensor) -> Tensor | FlatShard:
        """Returns a state tensor of a parameter as checkpoints hold it."""

    @abstractmethod
    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | FlatShard:
        """Returns room for a state tensor of a given whole shape."""

    def _in_order_of_use(self) -> list[FlatGroup]:
        """Returns the groups as forward uses them: buckets of stages 1 and 2 come in the order of backward."""
        return self.groups[::-1] if self.groups and self.groups[0].keep_whole else self.groups

    def note_given(self) -> None:
        """Notes which stand-ins have gradients now."""
        self._given = [tensor for tensor in self.stand_ins.values() if tensor.grad is not None]

    def wiped(self) -> bool:
        """Whether ``zero_grad`` or a step has dropped what was given; False where this rank was given nothing."""
        return bool(self._given) and all(tensor.grad is None for tensor in self._given)

    def forget(self) -> None:
        """Begins anew: the gradients that were given are of no further use."""
        self.spent, self._given = False, []


class PieceShare(Share):
    """Pieces of the parameters, for optimizers that treat each element by itself."""

    def __init__(self, groups: list[FlatGroup], communicator: Communicator) -> None:
        super().__init__(groups, communicator)
        self._pieces: dict[str, FlatShard] = {}
        for group in groups:
            for number, piece in zip(group.owned, group.stepped_pieces(), strict=True):
                self._pieces[group.names[number]] = piece
                # A parameter without dims keeps none: an optimizer's state for it has the shape that one process's has.
                data = piece.data if piece.shape else piece.data.view(())
                self.stand_ins[group.names[number]] = data.requires_grad_()

    def give_gradients(self, used: Iterable[str]) -> None:
        """Gives the stand-ins their gradients; those of parameters that nobody used stay None."""
        used = set(used)
        self.bring()
        for group in self.groups:
            if group.gradient is None:
                continue
            for number, gradient in zip(group.owned, group.piece_gradients(), strict=True):
                if group.names[number] in used:
                    stand_in = self.stand_ins[group.names[number]]
                    stand_in.grad = gradient.view_as(stand_in)

    def publish(self) -> None:
        """Brings the stepped values into the shards, and starts sending them to all ranks."""
        for group in self._in_order_of_use():
            group.take_step()
            group.publish()

    def canonical(self, name: str, value: Tensor) -> Tensor | FlatShard:
        """Returns a state tensor of a parameter as checkpoints hold it."""
        piece = self._pieces[name]
        of_the_piece = value.ndim == 1 and value.shape == piece.data.shape
        return FlatShard(value, piece.shape, piece.start) if of_the_piece else value

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | FlatShard:
        """Returns room for a state tensor of a given whole shape."""
        piece = self._pieces[name]
        if shape == piece.shape and shape.numel() > 0 and len(shape) > 0:
            return FlatShard(torch.empty_like(piece.data, dtype=dtype, requires_grad=False), shape, piece.start)
        return torch.empty(shape, dtype=dtype)


class TensorShare(Share):
    """Whole tensors, for optimizers that need a tensor's norm, rows or singular values."""

    def __init__(self, groups: list[FlatGroup], communicator: Communicator) -> None:
        super().__init__(groups, communicator)
        self._places = [(group, number) for group in groups for number in range(len(group.names))]
        numels = [group.parameters[number].numel() for group, number in self._places]
        self._owner = dict(zip(self._keys(), balance(numels, communicator.size), strict=True))
        for group, number in self._places:
            if self._owner[id(group), number] == communicator.rank:
                whole = torch.empty(0, dtype=group.dtype, device=group.device)
                # Not a view of the parameter: its memory comes before a step and goes after it.
                self.stand_ins[group.names[number]] = whole.requires_grad_()

    def _keys(self) -> list[tuple[int, int]]:
        return [(id(group), number) for group, number in self._places]

    @torch.no_grad()
    def bring_parameters(self) -> None:
        """Fills the stand-ins with the parameters' values."""
        if all(group.keep_whole and not group.has_masters for group in self.groups):
            for group, number in self._places:
                if group.names[number] in self.stand_ins:
                    self.stand_ins[group.names[number]].data = (
                        group.parameters[number].detach().to(group.home, copy=True)
                    )
            return
        wholes = self._to_owners({id(group): group.shard for group in self.groups})
        for name, whole in wholes.items():
            self.stand_ins[name].data = whole

    @torch.no_grad()
    def give_gradients(self, used: Iterable[str]) -> None:
        """Gives the stand-ins their gradients; those of parameters that nobody used stay None."""
        used = set(used)
        self.bring()
        shards = {id(group): group.gradient for group in self.groups if group.gradient is not None}
        self.bring_parameters()
        for name, whole in self._to_owners(shards).items():
            if name in used:
                self.stand_ins[name].grad = whole

    @torch.no_grad()
    def publish(self) -> None:
        """Brings the stepped values into the shards, and starts sending them to all ranks."""
        by_dtype: dict[torch.dtype, list[FlatGroup]] = defaultdict(list)
        for group in self.groups:
            by_dtype[group.dtype].append(group)
        for dtype, groups in by_dtype.items():
            sent: list[list[Tensor]] = [[] for _ in range(self.communicator.size)]
            for rank, name, start, length in self._cuts(groups, owned_by_me=True):
                sent[rank].append(self.stand_ins[name].flatten()[start : start + length])
            held = self._held_by_owner(groups)
            received = self.communicator.exchange([_joined(parts, dtype, groups[0].device) for parts in sent], held)
            at = [0] * self.communicator.size
            for group in groups:
                for piece in group.partition.pieces(self.communicator.rank):
                    owner = self._owner[id(group), piece.parameter]
                    values = received[owner][at[owner] : at[owner] + piece.length]
                    group.shard[piece.offset : piece.offset + piece.length].copy_(values)
                    at[owner] += piece.length
        for group in self._in_order_of_use():
            group.publish()
        for tensor in self.stand_ins.values():
            tensor.grad = None
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _cuts(self, groups: list[FlatGroup], owned_by_me: bool) -> Iterable[tuple[int, str, int, int]]:
        """Yields the runs of my tensors that each rank's segment holds: rank, name, start, length."""
        for rank in range(self.communicator.size):
            for group in groups:
                for piece in group.partition.pieces(rank):
                    if (self._owner[id(group), piece.parameter] == self.communicator.rank) is owned_by_me:
                        yield rank, group.names[piece.parameter], piece.start, piece.length

    def _held_by_owner(self, groups: list[FlatGroup]) -> list[int]:
        """Returns how many elements of each rank's tensors this rank's segments hold."""
        held = [0] * self.communicator.size
        for group in groups:
            for piece in group.partition.pieces(self.communicator.rank):
                held[self._owner[id(group), piece.parameter]] += piece.length
        return held

    def _to_owners(self, shards: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors this rank owns, put together from all ranks' segments."""
        wholes: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, list[FlatGroup]] = defaultdict(list)
        for group in self.groups:
            if id(group) in shards:
                by_dtype[group.dtype].append(group)
        for dtype, groups in by_dtype.items():
            sent: list[list[Tensor]] = [[] for _ in range(self.communicator.size)]
            for group in groups:
                for piece in group.partition.pieces(self.communicator.rank):
                    segment = shards[id(group)][piece.offset : piece.offset + piece.length]
                    sent[self._owner[id(group), piece.parameter]].append(segment.detach().to(group.device))
            lengths = [0] * self.communicator.size
            for rank, _, _, length in self._cuts(groups, owned_by_me=True):
                lengths[rank] += length
            received = self.communicator.exchange([_joined(parts, dtype, groups[0].device) for parts in sent], lengths)
            at = [0] * self.communicator.size
            for rank, name, start, length in self._cuts(groups, owned_by_me=True):
                if name not in wholes:
                    wholes[name] = torch.empty(self.shapes[name], dtype=dtype, device=groups[0].device)
                wholes[name].view(-1)[start : start + length] = received[rank][at[rank] : at[rank] + length]
                at[rank] += length
        return {name: whole.to(self.groups[0].home) for name, whole in wholes.items()}

    def canonical(self, name: str, value: Tensor) -> Tensor | FlatShard:
        """Returns a state tensor of a parameter as checkpoints hold it."""
        return value

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | FlatShard:
        """Returns room for a state tensor of a given whole shape."""
        return torch.empty(shape, dtype=dtype, device=self.groups[0].home)


def _joined(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=dtype, device=device)
