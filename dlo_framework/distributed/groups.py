"""Process groups of a mesh along its axes, on this rank."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.mesh import AXES, Coordinates, MeshSpec


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
                made = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True)
                assert made is not None
                self._groups[key] = made  # type: ignore[assignment]
        return self._groups[key]

    def _expert_ranks(self) -> list[list[int]]:
        """Returns the ranks of dp_shard x cp as rows: in a row ranks differ in `ep`, in a column in its shard."""
        ranks, ep = self.ranks("dp_shard", "cp"), self.spec.ep
        return [ranks[first : first + ep] for first in range(0, len(ranks), ep)]

    def _named_group(self, name: str, ranks: list[int]) -> dist.ProcessGroup:
        if (name,) not in self._groups:
            made = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True)
            assert made is not None
            self._groups[(name,)] = made  # type: ignore[assignment]
        return self._groups[(name,)]

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
        return self._named_group("ep", next(row for row in self._expert_ranks() if me in row))

    @property
    def expert_shard_group(self) -> dist.ProcessGroup:
        """Ranks that shard this rank's experts."""
        column = self.spec.expert_rank(self.coordinates)
        return self._named_group("expert shards", [row[column] for row in self._expert_ranks()])

    @property
    def expert_slice_group(self) -> dist.ProcessGroup:
        """Ranks of `ep` and of `tp` whose shards of the experts' slices are together a shard of the full experts."""
        if self.spec.tp == 1:
            return self.expert_group
        ranks, ep, tp = self.ranks("dp_shard", "cp", "tp"), self.spec.ep, self.spec.tp
        first = (self.coordinates.dp_shard * self.spec.cp + self.coordinates.cp) // ep * ep
        return self._named_group("expert slices", ranks[first * tp : (first + ep) * tp])

    @property
    def expert_data_group(self) -> dist.ProcessGroup:
        """Ranks that have this rank's experts, in other copies of the model too."""
        if self.spec.dp_replicate == 1:
            return self.expert_shard_group
        return self._named_group("expert data", [rank for row in self._expert_copies() for rank in row])

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
        if self._averaged_copies == 1:
            return DeviceMesh.from_group(self.expert_shard_group, self.device_type, mesh_dim_names=(shards,))
        return DeviceMesh.from_group(
            [self.group("dp_replicate"), self.expert_shard_group],
            self.device_type,
            mesh=torch.tensor(self._expert_copies()),
            mesh_dim_names=(copies, shards),
        )

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
        if self._averaged_copies == 1:
            return DeviceMesh.from_group(self.shard_group, self.device_type, mesh_dim_names=(shards,))
        ranks = torch.tensor(self.ranks("dp_replicate", "dp_shard", "cp")).view(self.spec.dp_replicate, -1)
        return DeviceMesh.from_group(
            [self.group("dp_replicate"), self.shard_group],
            self.device_type,
            mesh=ranks,
            mesh_dim_names=(copies, shards),
        )
