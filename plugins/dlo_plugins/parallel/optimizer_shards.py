"""Optimizer shards: the local tensors that this rank's optimizer steps in place of the parameters.

An elementwise optimizer steps this rank's pieces of the parameters, which are views of the group's shard. An optimizer
that needs full tensors steps those that the rank owns; they are assigned so that the ranks' loads are balanced. In both
cases parameters and gradients stay cut into equal flat segments. Owners have full tensors during the step only; one
all-to-all before and one after it exchange 1/N of the elements each.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.local_memory import local_tensor
from dlo_framework.shards import FlatShard, Shard, SlicedShard, shard_maker
from dlo_plugins.parallel.flat_slices import FlatSlice, assign_balanced


class Partition(Protocol):
    """Partition of the parameters of a group over ranks."""

    def pieces(self, rank: int) -> list[FlatSlice]:
        """Returns the pieces of parameters that a rank owns, in the order of its shard."""


class ParamGroup(Protocol):
    """Parameters of one dtype that are partitioned together: a flat group of ZeRO, or rows of FSDP.

    Attributes:
        names: Names of the parameters.
        parameters: Parameters.
        dtype: Dtype of the shard, the gradient and the optimizer state.
        device: Device that computes.
        step_device: Device of the step, of gradients and of optimizer state.
        keep_full: Whether each rank has the full parameters between steps.
        has_master_weights: Whether the shard is a copy of the parameters in another dtype.
        partition: Partition over the ranks.
        owned: Number of the parameter of each of this rank's pieces.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    dtype: torch.dtype
    device: torch.device
    step_device: torch.device
    keep_full: bool
    has_master_weights: bool
    owned: list[int]

    @property
    def partition(self) -> Partition:
        """Partition over the ranks."""

    @property
    def shard(self) -> Tensor:
        """Values of this rank's pieces, in one dim."""

    @property
    def gradient(self) -> Tensor | None:
        """Gradients of this rank's pieces, in one dim; None where there are none."""

    def load_params(self) -> bool:
        """Loads the parameters' values into what the optimizer steps, where that is a copy.

        Returns:
            Whether the user's code has written to the parameters since the last call.
        """

    def stepped_pieces(self) -> Sequence[FlatShard | SlicedShard]:
        """Returns the pieces that optimizers step."""

    def in_partition_order(self, number: int, full: Tensor) -> Tensor:
        """Returns a full tensor of a parameter's shape, flat, in the order in which the partition's pieces cut it."""

    def full_tensor(self, number: int, flat: Tensor) -> Tensor:
        """Returns the full tensor from :meth:`in_partition_order`."""

    def piece_gradients(self) -> list[Tensor]:
        """Returns the gradient of each piece."""

    def store_step(self) -> None:
        """Stores the stepped values in the shard, where the optimizer steps a copy."""

    def all_gather_params(self) -> None:
        """Starts to give all ranks the shards' new values."""


Group = TypeVar("Group", bound=ParamGroup)


class OptimizerShard(ABC, Generic[Group]):
    """Optimizer shard: this rank's part of one optimizer's parameters.

    Args:
        groups: Groups of the optimizer's parameters.
        communicator: Communicator of the ranks.

    Attributes:
        local_params: Tensors that the optimizer steps, by parameter name, without parameters of other ranks.
        group_names: Parameter names of each of the optimizer's parameter groups, all ranks' parameters included.
        stepped: Whether the optimizer has taken a step with the gradients that were set.
    """

    def __init__(self, groups: list[Group], communicator: Communicator) -> None:
        self.groups, self.communicator = groups, communicator
        self.shapes = {
            name: parameter.shape
            for group in groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        }
        self.local_params: dict[str, Tensor] = {}
        self.group_names: list[list[str]] = []
        self.stepped = False
        self._grad_params: list[Tensor] = []

    def replace_params(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Replaces the parameters in the optimizer's parameter groups by the local ones, in the same order.

        A rank that owns nothing gets an empty placeholder, so that changes to the optimizer's parameters (such as
        ``toggle_optimizer``, which switches their ``requires_grad``) are seen on every rank.

        Args:
            optimizer: Optimizer from ``configure_optimizers``; it has taken no step.
            names: Names of the parameters by id.

        Raises:
            DloError: The optimizer's constructor has filled a state tensor with several values.
        """
        self.group_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        given = [p for group in optimizer.param_groups for p in group["params"]]
        made = {names[id(p)]: optimizer.state.pop(p) for p in given if p in optimizer.state}
        for group, members in zip(optimizer.param_groups, self.group_names, strict=True):
            group["params"] = [self.local_params[name] for name in members if name in self.local_params]
        for name, state in made.items():
            if name in self.local_params:
                optimizer.state[self.local_params[name]] = {
                    key: self._local_state(optimizer, name, key, value) for key, value in state.items()
                }
        if not any(group["params"] for group in optimizer.param_groups):
            home = self.groups[0].step_device if self.groups else None
            self.placeholder = torch.empty(0, device=home, requires_grad=True)
            optimizer.param_groups[0]["params"].append(self.placeholder)

    def _local_state(self, optimizer: Optimizer, name: str, key: str, value: Any) -> Any:
        """Returns the local shard of state that a constructor has made, as torch's Adagrad does."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        room = self.empty_shard(name, self.full_shape(name), value.dtype)
        part = room if isinstance(room, Tensor) else flat_piece(room).data
        made = local_tensor(value).flatten()
        if part.numel() and not (made.numel() and bool((made == made[0]).all())):
            raise DloError(
                f"an optimizer's state must be made in its first step, or be one value a tensor, got {key!r} of"
                f" {name!r} from {type(optimizer).__name__}'s constructor; make it in step()"
            )
        return part.copy_(made[0]) if part.numel() else part

    def full_shape(self, name: str) -> torch.Size:
        """Returns the shape of a parameter, all ranks' shards together."""
        return self.shapes[name]

    def load_params(self) -> bool:
        """Loads the shards' values into the local parameters, where these are copies.

        Returns:
            Whether the user's code has written to the parameters since the last call.
        """
        return sum(group.load_params() for group in self.groups) > 0

    @abstractmethod
    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the local parameters; unused parameters keep None."""

    @abstractmethod
    def all_gather_params(self) -> None:
        """Copies the stepped values into the shards, and starts their all-gather."""

    @abstractmethod
    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor of a parameter as a shard of the full one, for checkpoints."""

    @abstractmethod
    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard for a state tensor of a full shape."""

    @property
    def stepped_tensors(self) -> list[Tensor]:
        """Tensors in the optimizer's parameter groups: the local parameters, or the placeholder."""
        return list(self.local_params.values()) or [self.placeholder]

    def _in_order_of_use(self) -> list[Group]:
        """Returns the groups in the order of forward: buckets of stages 1 and 2 are in that of backward."""
        return self.groups[::-1] if self.groups and self.groups[0].keep_full else self.groups

    def record_grads(self) -> None:
        """Records which local parameters have gradients now."""
        self._grad_params = [tensor for tensor in self.local_params.values() if tensor.grad is not None]

    def grads_dropped(self) -> bool:
        """Returns whether ``zero_grad`` or a step has dropped the gradients; False where this rank had none."""
        return bool(self._grad_params) and all(tensor.grad is None for tensor in self._grad_params)

    def reset(self) -> None:
        """Resets the record of gradients and steps, as a new accumulation begins."""
        self.stepped, self._grad_params = False, []


class ElementwiseShard(OptimizerShard[Group]):
    """Optimizer shard of elementwise optimizers: this rank's pieces of the parameters."""

    def __init__(self, groups: list[Group], communicator: Communicator) -> None:
        super().__init__(groups, communicator)
        self._pieces: dict[str, FlatShard | SlicedShard] = {}
        for group in groups:
            for number, piece in zip(group.owned, group.stepped_pieces(), strict=True):
                self._pieces[group.names[number]] = piece
                # A scalar parameter stays a scalar, so that its optimizer state has the shape of a single process's.
                data = flat_piece(piece).data
                data = data if piece.shape else data.view(())
                self.local_params[group.names[number]] = data.requires_grad_()

    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the local parameters; unused parameters keep None."""
        used = set(used)
        self.load_params()
        for group in self.groups:
            if group.gradient is None:
                continue
            for number, gradient in zip(group.owned, group.piece_gradients(), strict=True):
                if group.names[number] in used:
                    local_param = self.local_params[group.names[number]]
                    local_param.grad = gradient.view_as(local_param)

    def all_gather_params(self) -> None:
        """Copies the stepped values into the shards, and starts their all-gather."""
        for group in self._in_order_of_use():
            group.store_step()
            group.all_gather_params()

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor of a parameter as a shard of the full one, for checkpoints."""
        piece = self._pieces[name]
        of_the_piece = value.ndim == 1 and value.shape == flat_piece(piece).data.shape
        return shard_maker(piece)(value) if of_the_piece else value

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard for a state tensor of a full shape."""
        piece = self._pieces[name]
        if shape == piece.shape and shape.numel() > 0 and len(shape) > 0:
            return shard_maker(piece)(torch.empty_like(flat_piece(piece).data, dtype=dtype, requires_grad=False))
        return torch.empty(shape, dtype=dtype)


class FullTensorShard(OptimizerShard[Group]):
    """Optimizer shard of full tensors, for optimizers that need a tensor's norm, rows or singular values."""

    def __init__(self, groups: list[Group], communicator: Communicator) -> None:
        super().__init__(groups, communicator)
        self._loaded = False  # whether the local parameters have values
        self._stepped_early = False  # whether groups have been stepped in backward
        numels = [self.full_shape(name).numel() for name in self.shapes]
        self._owner = dict(zip(self.shapes, assign_balanced(numels, communicator.size), strict=True))
        for group in groups:
            for name in group.names:
                if self._owner[name] == communicator.rank:
                    # On the device of the step, to which torch moves the state of a checkpoint.
                    whole = torch.empty(0, dtype=group.dtype, device=group.step_device)
                    # Not a view of the parameter: its memory is allocated before a step and freed after it.
                    self.local_params[name] = whole.requires_grad_()

    def in_groups(self, groups: list[Group]) -> Self:
        """Returns this shard with its parameters in other groups; owners and local parameters stay."""
        shard = copy.copy(self)
        shard.groups, shard._loaded, shard._stepped_early = groups, False, False
        return shard

    def load_params(self) -> bool:
        """Loads the shards' values, and full ones again if the user's code has written since the gradients were set."""
        written = super().load_params()
        if written and self._loaded:
            self.load_full_params()
        return written

    @torch.no_grad()
    def load_full_params(self, groups: list[Group] | None = None) -> None:
        """Loads the parameters' full values into the tensors that this rank owns.

        Args:
            groups: Groups to load; None for all.
        """
        groups = self.groups if groups is None else groups
        if all(group.keep_full and not group.has_master_weights for group in self.groups):
            for group in groups:
                for name, parameter in zip(group.names, group.parameters, strict=True):
                    if name in self.local_params:
                        self.local_params[name].data = parameter.detach().to(group.step_device, copy=True)
            return
        wholes = self._gather_owned({id(group): group.shard for group in groups})
        for name, whole in wholes.items():
            self.local_params[name].data = whole

    @torch.no_grad()
    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the local parameters; unused parameters keep None."""
        used, self._loaded = set(used), False
        self.load_params()
        shards = {id(group): group.gradient for group in self.groups if group.gradient is not None}
        self._loaded = True
        self.load_full_params()
        for name, whole in self._gather_owned(shards).items():
            if name in used:
                self.local_params[name].grad = whole

    @torch.no_grad()
    def step_group(self, group: Group, ready: Callable[[list[Tensor]], None]) -> None:
        """Steps the full tensors of a group in backward; all ranks call it for the same groups in the same order.

        The owners get the group's gradients and values, and send the new values back, before backward continues. So no
        rank has full tensors of more than one group.

        Args:
            group: Group whose gradients are complete.
            ready: Function that steps tensors with gradients.
        """
        group.load_params()
        gradient = group.gradient
        assert gradient is not None
        self.load_full_params([group])
        wholes = self._gather_owned({id(group): gradient})
        for name, whole in wholes.items():
            self.local_params[name].grad = whole
        ready([self.local_params[name] for name in wholes])
        self._return_values([group])
        self._free(wholes)
        self._stepped_early = True

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Copies the stepped values into the shards, and starts their all-gather.

        A step without a backward before it has changed nothing, on any rank, and sends nothing.
        """
        if self._loaded:
            self._return_values(self.groups)
            self._free(self.local_params)
        elif not self._stepped_early:
            return
        self._loaded = self._stepped_early = False
        for group in self._in_order_of_use():
            group.all_gather_params()

    def _return_values(self, all_groups: list[Group]) -> None:
        """Sends the stepped values of groups from their owners to the ranks' shards."""
        by_dtype: dict[torch.dtype, list[Group]] = defaultdict(list)
        for group in all_groups:
            by_dtype[group.dtype].append(group)
        values_by_name = self._stepped_values({name for group in all_groups for name in group.names})
        stepped = {
            name: group.in_partition_order(number, values_by_name[name])
            for group in all_groups
            for number, name in enumerate(group.names)
            if name in values_by_name
        }
        for dtype, groups in by_dtype.items():
            sent: list[list[Tensor]] = [[] for _ in range(self.communicator.size)]
            for rank, name, start, length in self._owned_runs(groups):
                sent[rank].append(stepped[name][start : start + length])
            held = [0] * self.communicator.size  # Elements of each rank's tensors in this rank's segments.
            for group in groups:
                for piece in group.partition.pieces(self.communicator.rank):
                    held[self._owner[group.names[piece.parameter]]] += piece.length
            received = self.communicator.exchange([concat(parts, dtype, groups[0].device) for parts in sent], held)
            at = [0] * self.communicator.size
            for group in groups:
                for piece in group.partition.pieces(self.communicator.rank):
                    owner = self._owner[group.names[piece.parameter]]
                    values = received[owner][at[owner] : at[owner] + piece.length]
                    group.shard[piece.offset : piece.offset + piece.length].copy_(values)
                    at[owner] += piece.length

    def _free(self, names: Iterable[str]) -> None:
        """Frees the full tensors of local parameters, and their gradients."""
        for tensor in [self.local_params[name] for name in names]:
            tensor.grad = None
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _stepped_values(self, names: Set[str]) -> dict[str, Tensor]:
        """Returns the stepped values of those of the named tensors that this rank owns."""
        return {name: tensor.data for name, tensor in self.local_params.items() if name in names}

    def _owned_runs(self, groups: list[Group]) -> Iterable[tuple[int, str, int, int]]:
        """Yields the runs of this rank's tensors in each rank's segment, as rank, name, start and length."""
        for rank in range(self.communicator.size):
            for group in groups:
                for piece in group.partition.pieces(rank):
                    if self._owner[group.names[piece.parameter]] == self.communicator.rank:
                        yield rank, group.names[piece.parameter], piece.start, piece.length

    def _gather_owned(self, shards: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the full tensors that this rank owns, assembled from all ranks' segments."""
        wholes: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, list[Group]] = defaultdict(list)
        for group in self.groups:
            if id(group) in shards:
                by_dtype[shards[id(group)].dtype].append(group)
        for dtype, groups in by_dtype.items():
            sent: list[list[Tensor]] = [[] for _ in range(self.communicator.size)]
            for group in groups:
                for piece in group.partition.pieces(self.communicator.rank):
                    segment = shards[id(group)][piece.offset : piece.offset + piece.length]
                    sent[self._owner[group.names[piece.parameter]]].append(segment.detach().to(group.device))
            lengths = [0] * self.communicator.size
            for rank, _, _, length in self._owned_runs(groups):
                lengths[rank] += length
            received = self.communicator.exchange([concat(parts, dtype, groups[0].device) for parts in sent], lengths)
            at = [0] * self.communicator.size
            for rank, name, start, length in self._owned_runs(groups):
                if name not in wholes:
                    numel = self.shapes[name].numel()
                    wholes[name] = torch.empty(numel, dtype=dtype, device=groups[0].device)
                wholes[name][start : start + length] = received[rank][at[rank] : at[rank] + length]
                at[rank] += length
        return {
            name: group.full_tensor(number, wholes[name]).to(self.groups[0].step_device)
            for group in self.groups
            for number, name in enumerate(group.names)
            if name in wholes
        }

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor of a parameter as a shard of the full one, for checkpoints."""
        return value

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard for a state tensor of a full shape."""
        return torch.empty(shape, dtype=dtype, device=self.groups[0].step_device)


def clips_by_global_norm(optimizer: Any) -> bool:
    """Returns whether an optimizer is timm's Lamb (1.0), which computes the norm of all gradients in one method."""
    return hasattr(optimizer, "_get_clip_grad_norm")


def patch_global_norm(optimizer: Any, norm: Callable[[], Tensor]) -> bool:
    """Makes an optimizer that clips by the global gradient norm compute that norm over all ranks.

    A reach into timm (1.0), which computes the norm in ``Lamb._get_clip_grad_norm`` and nowhere else.

    Args:
        optimizer: Optimizer whose update of an element depends on all tensors.
        norm: Function that returns the norm of its gradients over all ranks.

    Returns:
        Whether it clips by the global norm; False for one that depends on all tensors in another way.
    """
    if not clips_by_global_norm(optimizer):
        return False

    def clip_by_global_norm() -> Tensor | None:
        most = optimizer.defaults["max_grad_norm"]
        if most is None:
            return None
        home = next(tensor.device for group in optimizer.param_groups for tensor in group["params"])
        return (norm() / most).clamp_(min=1.0).to(home)

    optimizer._get_clip_grad_norm = clip_by_global_norm
    return True


def flat_piece(piece: FlatShard | SlicedShard) -> FlatShard:
    """Returns the flat shard of a piece, which may be in slices of the parameter."""
    inner: Shard = piece
    while isinstance(inner, SlicedShard):
        inner = inner.shard
    assert isinstance(inner, FlatShard)
    return inner


def concat(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns flat tensors, of any devices, as one on a device; an empty one if there are none."""
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    if len({part.device for part in parts}) > 1:  # Of an offloaded model, whose scalars stay on the device.
        parts = [part.to(device) for part in parts]
    return torch.cat(parts).to(device)
