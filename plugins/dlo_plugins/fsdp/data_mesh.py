"""Computes the mesh of fully sharded data parallelism: the numbers of shards and of copies.

Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, arXiv 2304.11277. Sharding over all
ranks stores 1/N of the state on each. Hybrid sharding (HSDP), for example over the ranks of a node with one copy per
node, keeps all-gathers within a node and reduces only gradient shards between nodes.
"""

from __future__ import annotations

from dlo_framework.errors import DloError
from dlo_framework.mesh import nearest_divisor

#: Names of the axes, outer to inner.
REPLICATE, SHARD = "dp_replicate", "dp_shard"


def mesh_sizes(replicate: int, shard: int, world_size: int) -> tuple[int, int]:
    """Returns the sizes of the two axes, with -1 filled in.

    Args:
        replicate: Number of copies of the model; -1 for all remaining ranks.
        shard: Number of ranks that share one copy; -1 for all remaining ranks.
        world_size: Number of all ranks.

    Raises:
        DloError: A size is impossible, or the product is not the world size; the message computes one that is.
    """
    for name, size in (("replicate", replicate), ("shard", shard)):
        if size == 0 or size < -1:
            raise DloError(f"{name} must be at least 1, or -1 for all remaining ranks, got {size}; use 1 or -1")
    if replicate == shard == -1:
        raise DloError("only one of replicate and shard may be -1, got both; use replicate: 1 to shard over all ranks")
    for name, given, other in (("shard", shard, replicate), ("replicate", replicate, shard)):
        if given == -1:
            if world_size % other:
                known = "replicate" if name == "shard" else "shard"
                nearest, multiples = nearest_divisor(other, world_size), _multiples(other, world_size)
                raise DloError(
                    f"{known} must divide the world size {world_size}, got {other};"
                    f" use {known}={nearest} or run {multiples} processes"
                )
            rest = world_size // other
            return (replicate, rest) if name == "shard" else (rest, shard)
    if replicate * shard != world_size:
        fixes = [f"shard={world_size // replicate}"] if world_size % replicate == 0 else []
        fixes += [f"replicate={world_size // shard}"] if world_size % shard == 0 else []
        fixes += [f"run {replicate * shard} processes"]
        raise DloError(
            f"replicate x shard must be the world size {world_size}, got {replicate} x {shard} = {replicate * shard};"
            f" set {' or '.join(fixes) if len(fixes) > 1 else f'one of them to -1, or {fixes[0]}'}"
        )
    return replicate, shard


def check_reshard(reshard_after_forward: bool | int | None, shard: int) -> None:
    """Checks the number of ranks over which parameters are resharded after forward.

    Raises:
        DloError: The number is not a divisor of ``shard`` between 1 and ``shard``.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return
    possible = [size for size in range(2, shard) if shard % size == 0]
    if reshard_after_forward not in possible:
        fix = f"use {', '.join(map(str, possible))}, true or false" if possible else "use true or false"
        raise DloError(
            f"reshard_after_forward must be a bool or a divisor of the {shard} ranks that share a copy, other than 1"
            f" and {shard}, got {reshard_after_forward}; {fix}"
        )


def _multiples(size: int, near: int) -> str:
    """Returns the multiples of ``size`` around ``near``, as text."""
    below = near // size * size
    return f"{below} or {below + size}" if below else str(size)
