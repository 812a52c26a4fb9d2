"""Points of a step at which copies of offloaded nodes end and begin, so that memory stays within a budget.

The points depend on bytes alone: each copy to the host has until its memory is needed, and each copy to the device
begins as soon as there is memory for it. No other points make the step faster, whatever the rates of the link:
computation then waits for the fewest copies, and every copy has the most time.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.node_costs import NodeCosts, node_costs
from dlo_plugins.remat.schedule import Node, Transfer


def plan_transfers(chain: Chain, nodes: Sequence[Node], budget: int) -> tuple[Transfer, ...]:
    """Returns the copies of a schedule's offloaded nodes.

    Args:
        chain: Chain.
        nodes: Nodes of the schedule.
        budget: Bytes for all that forward and backward of the chain allocate, and for its input.

    Raises:
        DloError: The nodes that stay on the device do not fit in the budget.
    """
    costs = [node_costs(chain, node) for node in nodes]
    resident = [chain.input]  # Before each node: the chain's input, and what nodes before it keep on the device.
    for node, cost in zip(nodes, costs, strict=True):
        resident.append(resident[-1] + (0 if node.offload else cost.bundle))
    free = [budget - held - cost.forward for held, cost in zip(resident, costs, strict=False)]
    free_later = [budget - held - cost.backward for held, cost in zip(resident, costs, strict=False)]
    short = min(*free, *free_later)
    if short < 0:
        raise DloError(
            f"budget must be at least {budget - short} bytes ({format_bytes(budget - short)}) for these nodes, got"
            f" {budget} ({format_bytes(budget)}); offload more nodes, or recompute more"
        )
    offloaded = [index for index, node in enumerate(nodes) if node.offload]
    releases = _release(offloaded, costs, free)
    prefetches = _prefetch(offloaded, costs, free_later)
    return tuple(Transfer(index, releases[index], prefetches[index]) for index in offloaded)


def _release(offloaded: Sequence[int], costs: Sequence[NodeCosts], free: Sequence[int]) -> dict[int, int]:
    """Returns the node before whose forward each offloaded node's memory is released: the last before it is needed."""
    found = dict.fromkeys(offloaded, len(free))
    pending: list[int] = []
    for index, left in enumerate(free):
        while sum(costs[item].bundle for item in pending) > left:
            found[pending.pop(0)] = index
        if index in found:
            pending.append(index)
    return found


def _prefetch(offloaded: Sequence[int], costs: Sequence[NodeCosts], free: Sequence[int]) -> dict[int, int]:
    """Returns the node before whose backward each copy to the device begins: the earliest from which there is memory.

    Copies begin in the order in which they are needed: none before that of a later node.
    """
    left, found = list(free), {}
    earliest = len(free) - 1
    for index in reversed(offloaded):
        start = index  # During its own backward, a node's bytes are counted in its costs.
        while start < earliest and left[start + 1] >= costs[index].bundle:
            start += 1
            left[start] -= costs[index].bundle
        found[index] = earliest = start
    return found
