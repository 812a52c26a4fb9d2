"""Process groups: of a mesh along its axes, and of callbacks, apart from the strategy's own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.mesh import AXES, Coordinates, MeshSpec

#: Groups of :func:`kept_group` by the default group under which they were made; they end with it.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def kept_group(
    purpose: str, ranks: Sequence[int], *, timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    """Returns this process's group of these ranks for a purpose, made on first use and kept for its later runs.

    A group has threads and buffers of its own until the process group is destroyed: groups of each run by itself would
    add up in a process that trains many times.

    Args:
        purpose: Name of what communicates. Two purposes do not share a group: their collectives could be paired.
        ranks: Ranks of the group; they alone call this, at the same point.
        timeout: Time limit of a collective; None for torch's default.
        backend: Backend of the group; None for the default group's.
    """
    assert dist.group.WORLD is not None
    groups, key = _GROUPS.setdefault(dist.group.WORLD, {}), (purpose, tuple(ranks), timeout, backend)
    if key not in groups:
        among_members = len(ranks) < dist.get_world_size()
        made: Any = dist.new_group(list(ranks), timeout, backend, None, among_members, group_desc=purpose)
        groups[key] = made
    return groups[key]


def forget_groups() -> None:
    """Makes later runs of this process use new groups: after an error, messages may be left that nobody has taken."""
    _GROUPS.clear()


def gloo_group(strategy: Strategy) -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks for a strategy; None for a single process.

    Its time limit is the strategy's. The first call must come at the same point on all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    timeout = getattr(strategy, "_timeout", None)  # Lightning's name for it (2.6).
    return kept_group("control", range(dist.get_world_size()), timeout=timeout, backend="gloo")


def control_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Returns a gloo group over which callbacks communicate, in the main thread; None for a single process.

    It is not the default group, on which other threads reduce gradients: a callback's collectives could pair with
    those of another rank's backward.

    The first call must come at the same point on all ranks, and all ranks must use the group in the same order.
    """
    return gloo_group(trainer.strategy) if trainer.world_size > 1 else None


class MeshGroups:
    """This rank's process groups along the axes of a mesh, each made on first use.

    All ranks must ask for the same groups in the same order.

    Args:
        spec: Sizes of the mesh's axes, without -1; their product is the world size.
        device_type: Type of the device on which ranks compute, such as ``cuda``.
        timeout: Time limit of a collective; None for torch's default.
        separate_copies: Whether each copy of the model trains by itself.

    Attributes:
        coordinates: Coordinates of this rank.
    """

    def __init__(
        self, spec: MeshSpec, device_type: str, timeout: timedelta | None = None, *, separate_copies: bool = False
    ) -> None:
        assert spec.world_size == dist.get_world_size()
        self.spec, self.device_type, self.timeout = spec, device_type, timeout
        self.separate_copies = separate_copies
        self.coordinates = spec.coordinates(dist.get_rank())
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def ranks(self, *axes: str) -> list[int]:
        """Returns the ranks that differ from this rank along these axes only, this rank included."""
        spans = [
            range(size) if axis in axes else [at] for (axis, size), at in zip(self.sizes, self.coordinates, strict=True)
        ]
        return [self.spec.rank(Coordinates(*place)) for place in itertools.product(*spans)]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Axes and their sizes, outer to inner."""
        return list(self.spec.sizes.items())

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Returns the process group of :meth:`ranks`."""
        key = tuple(axis for axis, size in self.sizes if axis in axes and size > 1)
        if key not in self._groups:
            ranks = self.ranks(*key)
            if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
                self._groups[key] = dist.group.WORLD
            else:
                return self._named_group(key, ranks)
        return self._groups[key]

    def _expert_ranks(self) -> list[list[int]]:
        """Returns the ranks of dp_shard x cp as rows: in a row ranks differ in `ep`, in a column in its shard."""
        ranks, ep = self.ranks("dp_shard", "cp"), self.spec.ep
        return [ranks[first : first + ep] for first in range(0, len(ranks), ep)]

    def _named_group(self, key: tuple[str, ...], ranks: list[int]) -> dist.ProcessGroup:
        if key not in self._groups:
            self._groups[key] = kept_group(" x ".join(key), ranks, timeout=self.timeout)
        return self._groups[key]

    def axis_of(self, name: str) -> str:
        """Returns the axes of a group of this rank, joined by " x "; "all" for a group of no axes.

        Args:
            name: Name of the process group.
        """
        axes = next((axes for axes, group in self._groups.items() if group.group_name == name), None)
        return "all" if axes is None else " x ".join(axes)

    # --- the groups that strategies use --------------------------------------------------------------------

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks with the same part of the model and other samples, or other slices of the sequence."""
        return self.group("dp_replicate", "dp_shard", "cp")

    @property
    def averaging_group(self) -> dist.ProcessGroup:
        """Ranks over which the gradients of this rank's part of the model are averaged."""
        return self.shard_group if self.separate_copies else self.data_group

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks over which one part of the model is sharded."""
        return self.group("dp_shard", "cp")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that together hold one replica of the model."""
        return self.group("pp", "dp_shard", "cp", "tp")

    @property
    def has_data_parallelism(self) -> bool:
        """Whether several ranks hold the same part of the model, and average its gradients."""
        return self._averaged_copies * self.spec.dp_shard * self.spec.cp > 1

    @property
    def _averaged_copies(self) -> int:
        """Number of copies of the model whose gradients are averaged."""
        return 1 if self.separate_copies else self.spec.dp_replicate

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """Ranks of `ep`, which exchange tokens."""
        me = dist.get_rank()
        return self._named_group(("ep",), next(row for row in self._expert_ranks() if me in row))

    @property
    def expert_shard_group(self) -> dist.ProcessGroup:
        """Ranks that shard this rank's experts."""
        column = self.spec.expert_rank(self.coordinates)
        return self._named_group(("expert shards",), [row[column] for row in self._expert_ranks()])

    @property
    def expert_slice_group(self) -> dist.ProcessGroup:
        """Ranks of `ep` and of `tp` whose shards of the experts' slices are together a shard of the full experts."""
        if self.spec.tp == 1:
            return self.expert_group
        ranks, ep, tp = self.ranks("dp_shard", "cp", "tp"), self.spec.ep, self.spec.tp
        first = (self.coordinates.dp_shard * self.spec.cp + self.coordinates.cp) // ep * ep
        return self._named_group(("expert slices",), ranks[first * tp : (first + ep) * tp])

    @property
    def expert_data_group(self) -> dist.ProcessGroup:
        """Ranks that have this rank's experts, in other copies of the model too."""
        if self.spec.dp_replicate == 1:
            return self.expert_shard_group
        return self._named_group(("expert data",), [rank for row in self._expert_copies() for rank in row])

    @property
    def expert_averaging_group(self) -> dist.ProcessGroup:
        """Ranks over which the gradients of this rank's experts are averaged."""
        return self.expert_shard_group if self.separate_copies else self.expert_data_group

    def _expert_copies(self) -> list[list[int]]:
        """Returns the ranks with this rank's experts, by copy of the model."""
        ranks, ep = self.ranks("dp_replicate", "dp_shard", "cp"), self.spec.ep
        mine, shards = self.spec.expert_rank(self.coordinates), self.spec.dp_shard * self.spec.cp
        return [ranks[first + mine : first + shards : ep] for first in range(0, len(ranks), shards)]

    def expert_mesh(self, copies: str, shards: str) -> DeviceMesh:
        """Returns the DeviceMesh to shard this rank's experts over, with the axes of :meth:`data_mesh`.

        Args:
            copies: Name of the axis of replicas.
            shards: Name of the axis of shards.
        """
        return self._shard_mesh(copies, shards, self.expert_shard_group, self._expert_copies())

    def device_mesh(self) -> DeviceMesh:
        """Returns the DeviceMesh of all axes, for appliers."""
        groups = [self.group(axis) for axis in AXES]
        ranks = torch.arange(self.spec.world_size).view(tuple(self.spec.sizes.values()))
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=AXES)

    def data_mesh(self, copies: str, shards: str) -> DeviceMesh:
        """Returns the DeviceMesh to shard over: an axis of replicas, unless there is one or each trains by itself, and
        an axis of shards.

        Args:
            copies: Name of the axis of replicas.
            shards: Name of the axis of shards.
        """
        ranks, size = self.ranks("dp_replicate", "dp_shard", "cp"), self.spec.dp_shard * self.spec.cp
        rows = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        return self._shard_mesh(copies, shards, self.shard_group, rows)

    def _shard_mesh(self, copies: str, shards: str, group: dist.ProcessGroup, ranks: list[list[int]]) -> DeviceMesh:
        """Returns the DeviceMesh of a group of shards, with an axis of replicas where there are several.

        Args:
            copies: Name of the axis of replicas.
            shards: Name of the axis of shards.
            group: Group of this rank's shards.
            ranks: Ranks of the shards, by replica.
        """
        if self._averaged_copies == 1:
            return DeviceMesh.from_group(group, self.device_type, mesh_dim_names=(shards,))
        groups, mesh = [self.group("dp_replicate"), group], torch.tensor(ranks)
        return DeviceMesh.from_group(groups, self.device_type, mesh=mesh, mesh_dim_names=(copies, shards))
