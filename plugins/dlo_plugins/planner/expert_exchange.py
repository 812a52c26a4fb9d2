"""Predicts the exchange of tokens between the ranks of `ep`: its time, and the memory of its buffers.

With k experts of a token, a rank's T tokens of width D take 2 k T D (1 - 1 / ep) elements in forward, to the experts
and back, and as many in backward; routers are taken as balanced. Nothing overlaps it.
"""

from __future__ import annotations

from dlo_plugins.planner.layout import Layout, repeats_messages
from dlo_plugins.planner.machine import Machine
from dlo_plugins.planner.work import Part


def exchanged_bytes(part: Part, layout: Layout) -> float:
    """Returns the bytes that a rank's micro-batch exchanges in a part's forward, its own share included."""
    mesh = layout.mesh
    return part.exchanged * layout.micro_batch / mesh.cp if mesh.ep > 1 else 0.0


def exchange_seconds(machine: Machine, size: float, ranks: int, spread: int) -> float:
    """Returns the time of an all-to-all.

    A rank sends to ranks of its own node over the node's link, and at the same time to the others over its share of the
    network.

    Args:
        machine: Machine.
        size: Bytes that a rank sends, its own share included, the same number to each rank.
        ranks: Number of ranks of the group.
        spread: Distance between neighbouring ranks of the group in the numbering of all ranks.

    Raises:
        DloError: The group has ranks on several nodes, and the machine has no link between nodes.
    """
    if ranks == 1 or size == 0:
        return 0.0
    _, latency = machine.link_of(ranks, spread)
    own = ranks if ranks * spread <= machine.ranks_per_node else max(1, min(ranks, machine.ranks_per_node // spread))
    seconds = size * (own - 1) / ranks / machine.node.rate(1)
    if own < ranks:
        assert machine.network is not None, "link_of has raised an error"
        seconds = max(seconds, size * (ranks - own) / ranks / machine.network.rate(max(2, ranks // own)))
    return latency * (ranks - 1) + seconds


def part_exchange(machine: Machine, part: Part, mode: str, layout: Layout) -> tuple[float, float, float]:
    """Returns the seconds of a micro-batch's exchange in a part: in forward, in backward and in what backward repeats.

    Args:
        machine: Machine.
        part: Part of the model.
        mode: Mode of recomputation of the part.
        layout: Layout of the run.
    """
    size, mesh = exchanged_bytes(part, layout), layout.mesh
    once = 2 * exchange_seconds(machine, size / 2, mesh.ep, mesh.tp)
    return once, once, once if repeats_messages(mode) else 0.0
