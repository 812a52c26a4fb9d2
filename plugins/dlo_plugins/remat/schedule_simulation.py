"""Simulation of a schedule: time of each operation, memory over time, and what is in memory when.

Memory is counted in the order in which operations are issued, as torch's caching allocator does, in exact bytes.
Forward and backward run one after another on the device; the copies of each direction run beside them, in the order of
their issue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlo_framework.errors import DloError
from dlo_plugins.remat.chain import Chain, Link
from dlo_plugins.remat.schedule import (
    Keep,
    Node,
    Operation,
    OperationKind,
    Schedule,
    Transfer,
    check_nodes,
    list_operations,
)


@dataclass(frozen=True)
class TimedOperation:
    """Operation with its time and memory.

    Attributes:
        operation: Operation.
        start: Second at which it starts; for a wait, that at which the device begins to wait.
        end: Second at which it ends.
        peak: Bytes on the device while it runs, with its transient bytes.
        memory: Bytes on the device after it.
    """

    operation: Operation
    start: float
    end: float
    peak: int
    memory: int


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        time: Seconds of the step.
        peak: Peak of memory in bytes.
        operations: Operations with their time and memory, in the order of issue.
        waited: Seconds in which the device waits for copies.
    """

    time: float
    peak: int
    operations: tuple[TimedOperation, ...]
    waited: float

    @property
    def recomputed(self) -> float:
        """Seconds of forwards beyond the first of each stage."""
        forwards = (OperationKind.RUN, OperationKind.SAVE)
        return sum(
            item.end - item.start
            for item in self.operations
            if item.operation.kind in forwards and item.operation.run > 0
        )


def simulate(chain: Chain, schedule: Schedule, link: Link | None = None) -> Simulation:
    """Returns time and memory of a schedule.

    Args:
        chain: Chain that the schedule is of.
        schedule: Schedule; its predicted time and peak are not read.
        link: Link of the copies; needed if the schedule offloads.

    Raises:
        DloError: A schedule that does not fit the chain, or that offloads without a link.
    """
    return simulate_nodes(chain, schedule.nodes, schedule.transfers, link)


def simulate_nodes(
    chain: Chain, nodes: Sequence[Node], transfers: Sequence[Transfer] = (), link: Link | None = None
) -> Simulation:
    """Returns time and memory of the schedule that nodes and copies are: :func:`simulate` before a schedule is made."""
    check_nodes(chain, nodes, transfers)
    if transfers and link is None:
        raise DloError("link must be given for a schedule that offloads, got None; give Link(to_host, to_device)")
    device = _Device(chain, nodes, link)
    for operation in list_operations(nodes, transfers):
        device.issue(operation)
    return device.result()


def predict(
    chain: Chain, nodes: Sequence[Node], transfers: Sequence[Transfer] = (), link: Link | None = None
) -> Schedule:
    """Returns the schedule that nodes and copies are, with its simulated time and peak."""
    found = simulate_nodes(chain, nodes, transfers, link)
    return Schedule(tuple(nodes), found.time, found.peak, tuple(transfers), found.waited)


_Tensor = tuple[str, int]


@dataclass
class _Device:
    """State of the simulated device.

    Attributes:
        chain: Chain.
        nodes: Nodes of the schedule.
        link: Link of the copies.
        clock: Second at which the device has run all operations so far.
        memory: Bytes in use.
        alive: Bytes and second of allocation of each tensor in memory.
        needed: Stages whose backward has not run since they were kept: their output stays in memory.
    """

    chain: Chain
    nodes: Sequence[Node]
    link: Link | None
    clock: float = 0.0
    memory: int = 0
    waited: float = 0.0
    alive: dict[_Tensor, int] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    rows: list[TimedOperation] = field(default_factory=list)
    link_free: dict[OperationKind, float] = field(default_factory=dict)
    copied: dict[tuple[OperationKind, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocate(("input", 0), self.chain.input)
        self.allocate(("gradient", len(self.chain)), self.chain.stages[-1].output)

    def issue(self, operation: Operation) -> None:
        match operation.kind:
            case OperationKind.RUN | OperationKind.SAVE:
                self.forward(operation)
            case OperationKind.BACKWARD:
                self.backward(operation)
            case OperationKind.OFFLOAD | OperationKind.PREFETCH:
                self.copy(operation)
            case OperationKind.RELEASE | OperationKind.ARRIVE:
                self.wait(operation)

    def forward(self, operation: Operation) -> None:
        stage, saves = self.chain.stages[operation.stage], operation.kind is OperationKind.SAVE
        mode = stage.modes[operation.mode if saves else 0]
        start, self.clock = self.clock, self.clock + (mode.forward if saves else stage.forward)
        self.allocate(("input", operation.stage + 1), stage.output)
        if saves:
            self.allocate(("saved", operation.stage), mode.saved - stage.output)
            self.needed.add(operation.stage)
        peak = self.memory + (mode.forward_peak if saves else stage.forward_peak)
        if operation.drops_input:
            self.free(("input", operation.stage))
        if operation.run > 0 and ("gathered", operation.stage) not in self.alive:
            self.allocate(("gathered", operation.stage), stage.gathered)
        self.record(operation, start, peak)

    def backward(self, operation: Operation) -> None:
        index = operation.stage
        mode = self.chain.stages[index].modes[operation.mode]
        start, self.clock = self.clock, self.clock + mode.backward
        if ("gathered", index) in self.alive:  # Backward gathers them in any schedule.
            self.free(("gathered", index))
        self.allocate(("gradient", index), self.chain.input_of(index))
        peak = self.memory + mode.backward_peak
        self.needed.remove(index)
        self.free(("saved", index))
        self.free(("gradient", index + 1))
        if ("input", index + 1) in self.alive:
            self.free(("input", index + 1))
        if index - 1 not in self.needed:
            self.free(("input", index))
        self.record(operation, start, peak)

    def copy(self, operation: Operation) -> None:
        assert self.link is not None
        out = operation.kind is OperationKind.OFFLOAD
        tensors = self.bundle(operation)
        if not out:
            for tensor, size in tensors.items():
                self.allocate(tensor, size)
        ready = 0.0 if out else self.copied[OperationKind.OFFLOAD, operation.node]
        start = max(self.clock, self.link_free.get(operation.kind, 0.0), ready)
        end = start + sum(tensors.values()) / (self.link.to_host if out else self.link.to_device)
        self.link_free[operation.kind] = self.copied[operation.kind, operation.node] = end
        self.rows.append(TimedOperation(operation, start, end, self.memory, self.memory))

    def wait(self, operation: Operation) -> None:
        out = operation.kind is OperationKind.RELEASE
        start = self.clock
        ready = self.copied[OperationKind.OFFLOAD if out else OperationKind.PREFETCH, operation.node]
        self.clock = max(start, ready)
        self.waited += self.clock - start
        peak = self.memory
        for tensor in self.bundle(operation) if out else ():
            self.free(tensor)
        self.record(operation, start, peak)

    def bundle(self, operation: Operation) -> dict[_Tensor, int]:
        """Returns the tensors of a node's copies with their bytes; the chain's input is never copied."""
        node = self.nodes[operation.node]
        tensors = {("input", node.first): self.chain.input_of(node.first)} if node.first else {}
        if isinstance(node, Keep):
            tensors["saved", node.stage] = self.chain.interior(node.stage, node.mode)
        return tensors

    def allocate(self, tensor: _Tensor, size: int) -> None:
        self.alive[tensor] = size
        self.memory += size

    def free(self, tensor: _Tensor) -> None:
        self.memory -= self.alive.pop(tensor)

    def record(self, operation: Operation, start: float, peak: int) -> None:
        self.rows.append(TimedOperation(operation, start, self.clock, peak, self.memory))

    def result(self) -> Simulation:
        return Simulation(self.clock, max(row.peak for row in self.rows), tuple(self.rows), self.waited)
