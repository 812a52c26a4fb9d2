"""Bytes and communication of ranks of a mesh, counted on the code of a real run in a fake world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlo_framework import Task
from dlo_framework.distributed.traffic import Traffic, TrafficCounter
from dlo_framework.local_memory import local_tensor
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_plugins.parallel.fsdp.sharding import ShardedModule
from dlo_plugins.parallel.mesh.mesh_description import RankStateBytes
from dlo_plugins.parallel.mesh.mesh_simulation import fix_split, simulated_rank


@dataclass(frozen=True)
class SimulatedRank:
    """Rank of a mesh: bytes of its parameters, gradients and Adam's moments, and the communication of a step."""

    rank: int
    place: Coordinates
    state_bytes: RankStateBytes
    traffic: tuple[Traffic, ...]


def simulate_ranks(
    task: Task, strategy: Any, spec: MeshSpec, ranks: Sequence[int], batch: Any = None
) -> list[SimulatedRank]:
    """Returns chosen ranks of a mesh; without a batch of one data-parallel rank, they communicate nothing."""
    task = task.on_meta()
    if spec.tp > 1:  # Rules are inferred outside of the fake world.
        strategy.appliers.tensor.complete_plan(task, task.parallel_plan(), spec.tp)
    pipelining = fix_split(task, strategy, spec, None)
    found = []
    for rank in ranks:
        with simulated_rank(task, strategy, pipelining, spec, rank, batch) as view:
            with TrafficCounter(view.groups.axis_of) as count:
                if batch is not None:
                    view.step()
            held = _count_state_bytes(view.sharded)
            found.append(SimulatedRank(rank, spec.coordinates(rank), held, count.found))
    return found


def _count_state_bytes(sharded: ShardedModule) -> RankStateBytes:
    sizes = [(p.requires_grad, local_tensor(p).numel() * p.element_size()) for p in sharded.parameters.values()]
    trained = sum(size for is_trained, size in sizes if is_trained)
    return RankStateBytes(sum(size for _, size in sizes), trained, 2 * trained)
