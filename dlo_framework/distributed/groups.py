"""The process groups of a mesh, as this rank is in them."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.mesh import AXES, Coordinates, MeshSpec


class MeshGroups:
    """This rank's groups along any of the axes of a mesh; each is made when it is first asked for.

    All ranks ask for the same ones in the same order.

    Args:
        spec: the mesh, without -1; its ranks are the world's.
        device_type: what they compute on.
        timeout: how long a collective may take; None leaves torch's own.

    Attributes:
        place: this rank's.
    """

    def __init__(self, spec: MeshSpec, device_type: str, timeout: timedelta | None = None) -> None:
        assert spec.world_size == dist.get_world_size()
        self.spec, self.device_type, self.timeout = spec, device_type, timeout
        self.place = spec.coordinates(dist.get_rank())
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def ranks(self, *axes: str) -> list[int]:
        """Returns the ranks that differ from this one along these axes alone, this one among them."""
        spans = [range(size) if axis in axes else [at] for (axis, size), at in zip(self.sizes, self.place, strict=True)]
        return [self.spec.rank(Coordinates(*place)) for place in itertools.product(*spans)]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The axes and their sizes, outer to inner."""
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

    # --- as strategies use them ----------------------------------------------------------------------------

    @property
    def data(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model and see other samples, or other parts of the sequence."""
        return self.group("dp_replicate", "dp_shard", "cp")

    @property
    def sharers(self) -> dist.ProcessGroup:
        """Ranks that share the state of one part of the model."""
        return self.group("dp_shard", "cp")

    @property
    def copy(self) -> dist.ProcessGroup:
        """Ranks that together hold one copy of the model."""
        return self.group("pp", "dp_shard", "cp", "tp")

    @property
    def has_data_parallelism(self) -> bool:
        """Whether any rank holds the same part of the model as another."""
        return self.spec.dp_replicate * self.spec.dp_shard * self.spec.cp > 1

    def device_mesh(self) -> DeviceMesh:
        """Returns the mesh of all axes, for appliers."""
        groups = [self.group(axis) for axis in AXES]
        ranks = torch.arange(self.spec.world_size).view(tuple(self.spec.sizes.values()))
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=AXES)

    def data_mesh(self, copies: str, shards: str) -> DeviceMesh:
        """Returns the mesh to shard over: an axis of copies, unless there is but one, and one of shards.

        Args:
            copies: what the first axis is called.
            shards: what the second is called.
        """
        if self.spec.dp_replicate == 1:
            return DeviceMesh.from_group(self.sharers, self.device_type, mesh_dim_names=(shards,))
        ranks = torch.tensor(self.ranks("dp_replicate", "dp_shard", "cp")).view(self.spec.dp_replicate, -1)
        return DeviceMesh.from_group(
            [self.group("dp_replicate"), self.sharers], self.device_type, mesh=ranks, mesh_dim_names=(copies, shards)
        )
