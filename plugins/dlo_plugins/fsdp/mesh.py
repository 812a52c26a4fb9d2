"""The mesh of fully sharded data parallelism: into how many shards, and how many copies of the shards there are.

Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, arXiv 2304.11277: sharding over
all ranks holds 1/N of the state on each; hybrid sharding (HSDP) over the ranks of a node, say, with a copy on each
node, keeps the gathers within a node and sends only gradient shards between nodes.
"""

from __future__ import annotations

from dlo_framework.errors import DloError
from dlo_framework.mesh import nearest_divisor

#: Names of the axes, outer to inner, as in the design of all meshes.
REPLICATE, SHARD = "dp_replicate", "dp_shard"


def mesh_sizes(replicate: int, shard: int, world_size: int) -> tuple[int, int]:
    """Returns the sizes of the two axes, with -1 filled in.

    Args:
        replicate: copies of the model; -1 for as many as there are ranks for.
        shard: ranks that share one copy; -1 likewise.
        world_size: all ranks.

    Raises:
        DloError: if the sizes are not possible, or their product is not the world size; the message computes one that
            is.
    """
    for name, size in (("replicate", replicate), ("shard", shard)):
        if size == 0 or size < -1:
            raise DloError(f"{name} is at least 1, or -1 for what is left, but was {size}")
    if replicate == shard == -1:
        raise DloError("one of replicate and shard may be -1, not both; replicate: 1 is sharding over all ranks")
    for name, given, other in (("shard", shard, replicate), ("replicate", replicate, shard)):
        if given == -1:
            if world_size % other:
                known = "replicate" if name == "shard" else "shard"
                nearest, multiples = nearest_divisor(other, world_size), _multiples(other, world_size)
                raise DloError(
                    f"world size {world_size} is not divisible by {known}={other};"
                    f" use {known}={nearest} or run {multiples} processes"
                )
            rest = world_size // other
            return (replicate, rest) if name == "shard" else (rest, shard)
    if replicate * shard != world_size:
        fixes = [f"shard={world_size // replicate}"] if world_size % replicate == 0 else []
        fixes += [f"replicate={world_size // shard}"] if world_size % shard == 0 else []
        fixes += [f"run {replicate * shard} processes"]
        raise DloError(
            f"world size {world_size} != replicate {replicate} x shard {shard} = {replicate * shard};"
            f" set {' or '.join(fixes) if len(fixes) > 1 else f'one of them to -1, or {fixes[0]}'}"
        )
    return replicate, shard


def check_reshard(reshard_after_forward: bool | int | None, shard: int) -> None:
    """Checks the number of ranks to which parameters are resharded after forward.

    Raises:
        DloError: if it is no divisor of ``shard`` between the two.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return
    possible = [size for size in range(2, shard) if shard % size == 0]
    if reshard_after_forward not in possible:
        fix = f"use {', '.join(map(str, possible))}, true or false" if possible else "use true or false"
        raise DloError(
            f"reshard_after_forward as a number divides the {shard} ranks that share a copy, and is neither 1 nor"
            f" {shard}, but was {reshard_after_forward}; {fix}"
        )


def _multiples(size: int, near: int) -> str:
    """Returns the multiples of ``size`` around ``near``, as words."""
    below = near // size * size
    return f"{below} or {below + size}" if below else str(size)
