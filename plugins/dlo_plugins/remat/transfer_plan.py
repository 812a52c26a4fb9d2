"""Points of a step at which copies of offloaded nodes end and begin, so that memory stays within a budget.

The points depend on bytes alone: each copy to the host has until its memory is needed, and each copy to the device
begins as soon as there is memory for it. No other points make the step faster, whatever the rates of the link:
computation then waits for the fewest copies, and every copy has the most time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.schedule import Keep, Node, Schedule, Transfer, shift_nodes
from dlo_plugins.remat.schedule_simulation import predict


@dataclass(frozen=True)
class NodeCosts:
    """Bytes of an outermost node of a schedule; each count leaves out the chain's input.

    Attributes:
        bundle: Bytes that the node keeps between its forward and its backward, and that its copies hold: its input, and
            for a :class:`Keep` what it keeps besides input and output. The output is the next node's input.
        forward: Bytes of the node's own while its forward runs, with its input.
        backward: Bytes of the node's own while its backward runs, with its input and the gradients.
    """

    bundle: int
    forward: int
    backward: int


def node_costs(chain: Chain, node: Node) -> NodeCosts:
    """Returns the bytes of a node."""
    own_input = chain.input_of(node.first) if node.first else 0
    gradient = chain.stages[-1].output  # Of the chain's output, which is there from the start.
    if isinstance(node, Keep):
        mode = chain.stages[node.stage].modes[node.mode]
        gradients = chain.input_of(node.stage) + chain.stages[node.stage].output
        return NodeCosts(
            own_input + chain.interior(node.stage, node.mode),
            gradient + own_input + mode.saved + mode.forward_peak,
            own_input + mode.saved + gradients + mode.backward_peak,
        )
    part = Chain(chain.stages[node.first : node.last + 1], chain.input_of(node.first))
    inner = predict(part, shift_nodes(node.inner, -node.first)).peak - part.input
    return NodeCosts(own_input, gradient + own_input + region_peak(chain, node.first, node.last), own_input + inner)


def offloaded_bytes(chain: Chain, schedule: Schedule) -> int:
    """Returns the bytes that a schedule copies to the host, and back."""
    return sum(node_costs(chain, schedule.nodes[item.node]).bundle for item in schedule.transfers)


def region_peak(chain: Chain, first: int, last: int) -> int:
    """Returns the bytes that forwards of the stages `first` to `last` need that keep nothing, without their input."""
    peak = 0
    for index in range(first, last + 1):
        stage = chain.stages[index]
        own_input = chain.input_of(index) if index > first else 0
        peak = max(peak, own_input + stage.output + stage.forward_peak)
    return peak


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
