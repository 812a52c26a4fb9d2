"""Schedule of a chain: which stages keep what for backward, which are recomputed, and which copies go to the host.

A schedule is a sequence of nodes that cover the stages in order. Forward runs them from first to last. Backward runs
them from last to first: a :class:`Keep` runs its stage's backward; a :class:`Recompute` runs its inner nodes, forward
and backward, on the stages that it covers.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlo_framework.errors import DloError
from dlo_plugins.remat.chain import Chain


@dataclass(frozen=True)
class Keep:
    """Stage that runs with gradients, in one of its modes.

    Attributes:
        stage: Index of the stage.
        mode: Index of the mode.
        offload: Whether the stage's input and what it keeps besides input and output are on the host between forward
            and backward.
    """

    stage: int
    mode: int = 0
    offload: bool = False

    @property
    def first(self) -> int:
        """Index of the first stage that the node covers."""
        return self.stage

    @property
    def last(self) -> int:
        """Index of the last stage that the node covers."""
        return self.stage


@dataclass(frozen=True)
class Recompute:
    """Region of stages that run without keeping anything but the region's input, and run again in backward.

    Attributes:
        first: Index of the first stage.
        last: Index of the last stage.
        inner: Nodes of the region's run in backward.
        offload: Whether the region's input is on the host between forward and backward.
    """

    first: int
    last: int
    inner: tuple[Node, ...]
    offload: bool = False


Node = Keep | Recompute


@dataclass(frozen=True)
class Transfer:
    """Copies of an offloaded node, and the points of the step at which they begin and end.

    The copy to the host begins after the node's forward, that to the device when it is prefetched.

    Attributes:
        node: Index of the node among the schedule's.
        release: Index of the node before whose forward the copy to the host has ended and the memory is released;
            the number of nodes stands for the end of the forward.
        prefetch: Index of the node before whose backward the memory is allocated and the copy to the device begins.
    """

    node: int
    release: int
    prefetch: int


@dataclass(frozen=True)
class Schedule:
    """Schedule of a chain, with its predicted time and memory.

    Attributes:
        nodes: Nodes that cover all stages of the chain in order.
        time: Predicted seconds of forward and backward.
        peak: Predicted peak of memory in bytes, with the chain's input.
        transfers: Copies of the offloaded nodes, in the order of the nodes.
        waited: Seconds of `time` in which the device waits for copies.
    """

    nodes: tuple[Node, ...]
    time: float
    peak: int
    transfers: tuple[Transfer, ...] = ()
    waited: float = 0.0

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Operations of a step, in the order of their issue."""
        return tuple(list_operations(self.nodes, self.transfers))

    @property
    def forwards(self) -> tuple[int, ...]:
        """Number of forwards of each stage in a step."""
        runs = (OperationKind.RUN, OperationKind.SAVE)
        counts = Counter(operation.stage for operation in list_operations(self.nodes) if operation.kind in runs)
        return tuple(counts[stage] for stage in range(self.nodes[-1].last + 1))


class OperationKind(enum.Enum):
    """Kind of an operation."""

    #: Forward of a stage that keeps nothing of its inside.
    RUN = "run"
    #: Forward of a stage with gradients.
    SAVE = "save"
    #: Backward of a stage.
    BACKWARD = "backward"
    #: Start of a node's copy to the host.
    OFFLOAD = "offload"
    #: Wait for the end of the copy to the host; the device's memory is released.
    RELEASE = "release"
    #: Start of a node's copy to the device, into memory that is allocated for it.
    PREFETCH = "prefetch"
    #: Wait for the end of the copy to the device.
    ARRIVE = "arrive"


@dataclass(frozen=True)
class Operation:
    """Operation of a step.

    Attributes:
        kind: Kind of the operation.
        stage: Index of the stage; for copies, of the first stage of their node.
        node: Index of the schedule's outermost node that the operation belongs to.
        mode: Index of the mode, for `SAVE` and `BACKWARD`, and for copies of a :class:`Keep`.
        run: Number of forwards of the stage before this one: above 0, it is a recomputation. For `BACKWARD`, that of
            the `SAVE` which it belongs to.
        drops_input: Whether a `RUN` frees its input: all of a region but the first.
    """

    kind: OperationKind
    stage: int
    node: int
    mode: int = 0
    run: int = 0
    drops_input: bool = False


def list_operations(nodes: Sequence[Node], transfers: Sequence[Transfer] = ()) -> list[Operation]:
    """Returns the operations of a step, in the order of their issue."""
    return list(_Walk(nodes, transfers).step())


class _Walk:
    """Walk over the nodes of a schedule in the order of a step.

    Args:
        nodes: Nodes of the schedule.
        transfers: Copies of the offloaded nodes.
    """

    def __init__(self, nodes: Sequence[Node], transfers: Sequence[Transfer]) -> None:
        self.nodes, self.transfers = nodes, {item.node: item for item in transfers}
        self.runs: dict[int, int] = {}

    def step(self) -> Iterator[Operation]:
        released = sorted(self.transfers.values(), key=lambda item: item.node)
        for index, node in enumerate(self.nodes):
            yield from (self.copy(OperationKind.RELEASE, item.node) for item in released if item.release == index)
            yield from self.forward(node, index)
            if index in self.transfers:
                yield self.copy(OperationKind.OFFLOAD, index)
        yield from (self.copy(OperationKind.RELEASE, item.node) for item in released if item.release >= len(self.nodes))
        for index in reversed(range(len(self.nodes))):
            prefetched = (item for item in reversed(released) if item.prefetch == index)
            yield from (self.copy(OperationKind.PREFETCH, item.node) for item in prefetched)
            if index in self.transfers:
                yield self.copy(OperationKind.ARRIVE, index)
            yield from self.backward(self.nodes[index], index)

    def forward(self, node: Node, index: int) -> Iterator[Operation]:
        if isinstance(node, Keep):
            yield Operation(OperationKind.SAVE, node.stage, index, node.mode, self.count(node.stage))
            return
        for stage in range(node.first, node.last + 1):
            yield Operation(OperationKind.RUN, stage, index, run=self.count(stage), drops_input=stage > node.first)

    def backward(self, node: Node, index: int) -> Iterator[Operation]:
        if isinstance(node, Keep):
            yield Operation(OperationKind.BACKWARD, node.stage, index, node.mode, self.runs[node.stage] - 1)
            return
        for item in node.inner:
            yield from self.forward(item, index)
        for item in reversed(node.inner):
            yield from self.backward(item, index)

    def copy(self, kind: OperationKind, index: int) -> Operation:
        node = self.nodes[index]
        return Operation(kind, node.first, index, node.mode if isinstance(node, Keep) else 0)

    def count(self, stage: int) -> int:
        self.runs[stage] = self.runs.get(stage, 0) + 1
        return self.runs[stage] - 1


def check_nodes(chain: Chain, nodes: Sequence[Node], transfers: Sequence[Transfer] = ()) -> None:
    """Checks that nodes and copies are a schedule of a chain.

    Raises:
        DloError: Nodes that do not cover the stages in order, a mode that the stage does not have, a sequence of nodes
            that ends in a region, an offloaded node inside a region or without a transfer, or a transfer whose points
            are not after its node.
    """
    _check_sequence(chain, nodes, 0, len(chain) - 1)
    offloaded = [index for index, node in enumerate(nodes) if node.offload]
    if offloaded != [item.node for item in transfers]:
        raise DloError(
            f"transfers must be of the offloaded nodes {offloaded}, in order, got"
            f" {[item.node for item in transfers]}; make them with plan_transfers"
        )
    for item in transfers:
        if not (item.node < item.release <= len(nodes) and item.node <= item.prefetch < len(nodes)):
            raise DloError(
                f"release and prefetch of node {item.node} must be after its forward and before its backward, got"
                f" {item.release} and {item.prefetch}; make them with plan_transfers"
            )


def _check_sequence(chain: Chain, nodes: Sequence[Node], first: int, last: int) -> None:
    expected = first
    for node in nodes:
        if node.first != expected or node.last < node.first or node.last > last:
            raise DloError(
                f"nodes must cover stages {first} to {last} in order, got stages {node.first} to {node.last} where"
                f" stage {expected} is next; begin the node with stage {expected}"
            )
        expected = node.last + 1
        if isinstance(node, Recompute):
            _check_sequence(chain, node.inner, node.first, node.last)
            if any(item.offload for item in node.inner):
                raise DloError(
                    f"offload must be False inside a region, got True in stages {node.first} to {node.last}; offload"
                    " the region's own input"
                )
        elif not 0 <= node.mode < len(chain.stages[node.stage].modes):
            raise DloError(
                f"mode of stage {node.stage} must be less than {len(chain.stages[node.stage].modes)}, got {node.mode};"
                " choose one of the stage's modes"
            )
        elif node.offload and not chain.stages[node.stage].modes[node.mode].movable:
            raise DloError(
                f"offload of stage {node.stage} must be False in mode {chain.stages[node.stage].modes[node.mode].name},"
                " got True; what that mode keeps cannot be copied"
            )
    if expected != last + 1:
        raise DloError(f"nodes must cover stages {first} to {last}, got none for stage {expected}; add a node for it")
    if not isinstance(nodes[-1], Keep):
        raise DloError(
            f"the last node of a sequence must be Keep, got Recompute of stages {nodes[-1].first} to {last}; its"
            f" backward comes next, so keep stage {last}"
        )


def shift_nodes(nodes: Sequence[Node], by: int) -> tuple[Node, ...]:
    """Returns nodes of other stages: those whose indices are larger by a number."""
    shifted: list[Node] = []
    for node in nodes:
        if isinstance(node, Keep):
            shifted.append(Keep(node.stage + by, node.mode, node.offload))
        else:
            inner = shift_nodes(node.inner, by)
            shifted.append(Recompute(node.first + by, node.last + by, inner, node.offload))
    return tuple(shifted)
