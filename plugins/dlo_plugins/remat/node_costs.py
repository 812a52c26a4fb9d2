"""Seconds and bytes of a schedule's outermost nodes: what the plans of copies are made from."""

from __future__ import annotations

from dataclasses import dataclass

from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.schedule import Keep, Node, shift_nodes
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


def region_peak(chain: Chain, first: int, last: int) -> int:
    """Returns the bytes that forwards of the stages `first` to `last` need that keep nothing, without their input."""
    peak = 0
    for index in range(first, last + 1):
        stage = chain.stages[index]
        own_input = chain.input_of(index) if index > first else 0
        peak = max(peak, own_input + stage.output + stage.forward_peak)
    return peak
