"""Chains of blocks and their schedules: what is kept, recomputed and copied to the host, in which time and memory.

A schedule is a sequence of nodes that cover the stages in order. Forward runs them from first to last. Backward runs
them from last to first: a :class:`Keep` runs its stage's backward; a :class:`Recompute` runs its inner nodes, forward
and backward, on the stages that it covers.

The simulation counts memory in the order in which operations are issued, as torch's caching allocator does, in exact
bytes. Forward and backward run one after another on the device; the copies of each direction run beside them, in the
order of their issue. The points of a step at which copies end and begin depend on bytes alone: each copy to the host
has until its memory is needed, and each copy to the device begins as soon as there is memory for it. No other points
make the step faster, whatever the rates of the link: computation then waits for the fewest copies, and every copy has
the most time.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes


@dataclass(frozen=True)
class Mode:
    """One way in which a stage runs forward with gradients.

    Attributes:
        name: Name of the mode: `all`, `selective`, ...
        saved: Bytes that it keeps for backward, with the stage's output and without its input.
        forward: Seconds of the forward.
        backward: Seconds of the backward, with what the mode recomputes.
        forward_peak: Transient bytes of the forward, above its input and `saved`.
        backward_peak: Transient bytes of the backward, above its input, `saved` and the gradients of input and output.
        movable: Whether what it keeps can be copied to the host and back.
    """

    name: str
    saved: int
    forward: float
    backward: float
    forward_peak: int = 0
    backward_peak: int = 0
    movable: bool = True


@dataclass(frozen=True)
class Stage:
    """Stage of a chain: a block, or the head with the loss.

    Attributes:
        name: Name of the stage's module.
        output: Bytes of the stage's output, and of its gradient; 0 for a loss.
        modes: Ways in which the stage runs with gradients; the first keeps everything.
        forward_peak: Transient bytes of a forward that keeps nothing, above its input and output. Such a forward takes
            the first mode's `forward` seconds.
        gathered: Bytes of the stage's parameters that a sharding strategy gathers for its forward. In backward they
            stay gathered from a recomputation to the stage's own backward.
    """

    name: str
    output: int
    modes: tuple[Mode, ...]
    forward_peak: int = 0
    gathered: int = 0

    @property
    def forward(self) -> float:
        """Seconds of a forward that keeps nothing."""
        return self.modes[0].forward


@dataclass(frozen=True)
class Chain:
    """Stages that run one after another, each on the output of the one before.

    Attributes:
        stages: The blocks of a plan, then the head with the loss. The last stage is never recomputed.
        input: Bytes of the first stage's input, which stays on the device until the first stage's backward.
    """

    stages: tuple[Stage, ...]
    input: int

    def __post_init__(self) -> None:
        assert self.stages, "a chain has stages"
        for stage in self.stages:
            assert stage.modes, f"{stage.name} has no mode"
            values: list[float] = [self.input, stage.output, stage.forward_peak, stage.gathered]
            for mode in stage.modes:
                values += [mode.saved, mode.forward, mode.backward, mode.forward_peak, mode.backward_peak]
                assert mode.saved >= stage.output, f"{stage.name}: what is saved includes the output"
            assert all(0 <= value < math.inf for value in values), f"{stage.name}: {values}"

    def __len__(self) -> int:
        return len(self.stages)

    def input_of(self, stage: int) -> int:
        """Returns the bytes of a stage's input, which are also those of the input's gradient."""
        return self.stages[stage - 1].output if stage else self.input

    def interior(self, stage: int, mode: int = 0) -> int:
        """Returns the bytes that a stage keeps for backward besides its input and output."""
        return self.stages[stage].modes[mode].saved - self.stages[stage].output

    @property
    def kept_time(self) -> float:
        """Seconds of forward and backward of all stages in their first modes: a step without recomputation."""
        return sum(stage.modes[0].forward + stage.modes[0].backward for stage in self.stages)


@dataclass(frozen=True)
class Link:
    """Link on which the copies of each direction run in the order of their issue, beside computation.

    Attributes:
        to_host: Bytes per second from the device to the host.
        to_device: Bytes per second from the host to the device.
    """

    to_host: float
    to_device: float


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
    time: float = 0.0
    peak: int = 0
    transfers: tuple[Transfer, ...] = ()
    waited: float = 0.0

    @property
    def forwards(self) -> tuple[int, ...]:
        """Number of forwards of each stage in a step."""
        runs = (OperationKind.RUN, OperationKind.SAVE)
        counts = Counter(operation.stage for operation in list_operations(self) if operation.kind in runs)
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


def list_operations(schedule: Schedule) -> Iterator[Operation]:
    """Yields the operations of a step, in the order of their issue."""
    nodes, by_node = schedule.nodes, {item.node: item for item in schedule.transfers}
    runs: Counter[int] = Counter()

    def count(stage: int) -> int:
        runs[stage] += 1
        return runs[stage] - 1

    def forward(node: Node, index: int) -> Iterator[Operation]:
        if isinstance(node, Keep):
            yield Operation(OperationKind.SAVE, node.stage, index, node.mode, count(node.stage))
            return
        for stage in range(node.first, node.last + 1):
            yield Operation(OperationKind.RUN, stage, index, run=count(stage), drops_input=stage > node.first)

    def backward(node: Node, index: int) -> Iterator[Operation]:
        if isinstance(node, Keep):
            yield Operation(OperationKind.BACKWARD, node.stage, index, node.mode, runs[node.stage] - 1)
            return
        for item in node.inner:
            yield from forward(item, index)
        for item in reversed(node.inner):
            yield from backward(item, index)

    def copy(kind: OperationKind, index: int) -> Operation:
        node = nodes[index]
        return Operation(kind, node.first, index, node.mode if isinstance(node, Keep) else 0)

    for index, node in enumerate(nodes):
        yield from (copy(OperationKind.RELEASE, item.node) for item in schedule.transfers if item.release == index)
        yield from forward(node, index)
        if index in by_node:
            yield copy(OperationKind.OFFLOAD, index)
    yield from (copy(OperationKind.RELEASE, item.node) for item in schedule.transfers if item.release >= len(nodes))
    for index in reversed(range(len(nodes))):
        prefetched = (item.node for item in reversed(schedule.transfers) if item.prefetch == index)
        yield from (copy(OperationKind.PREFETCH, node) for node in prefetched)
        if index in by_node:
            yield copy(OperationKind.ARRIVE, index)
        yield from backward(nodes[index], index)


def _check_nodes(chain: Chain, nodes: Sequence[Node], first: int, last: int) -> None:
    """Asserts that nodes cover stages in order, and end with one that is kept, since its backward comes next."""
    expected = first
    for node in nodes:
        assert node.first == expected <= node.last <= last, f"{node} where stage {expected} comes next"
        expected = node.last + 1
        if isinstance(node, Recompute):
            _check_nodes(chain, node.inner, node.first, node.last)
            assert not any(item.offload for item in node.inner), "a region's own input is offloaded"
        else:
            assert not node.offload or chain.stages[node.stage].modes[node.mode].movable, f"{node} cannot be copied"
    assert expected == last + 1, f"no node for stage {expected}"
    assert isinstance(nodes[-1], Keep), f"{nodes[-1]} is the last of its sequence"


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


def simulate(chain: Chain, schedule: Schedule, link: Link | None = None) -> Simulation:
    """Returns time and memory of a schedule.

    Args:
        chain: Chain that the schedule is of.
        schedule: Schedule; its predicted time and peak are not read.
        link: Link of the copies; needed if the schedule offloads.
    """
    nodes, transfers = schedule.nodes, schedule.transfers
    _check_nodes(chain, nodes, 0, len(chain) - 1)
    assert [item.node for item in transfers] == [index for index, node in enumerate(nodes) if node.offload]
    assert all(item.node < item.release <= len(nodes) and item.node <= item.prefetch < len(nodes) for item in transfers)
    assert link is not None or not transfers, "copies need a link"
    device = _Device(chain, schedule.nodes, link)
    for operation in list_operations(schedule):
        device.issue(operation)
    return Simulation(device.clock, max(row.peak for row in device.rows), tuple(device.rows), device.waited)


def predict(
    chain: Chain, nodes: Sequence[Node], transfers: Sequence[Transfer] = (), link: Link | None = None
) -> Schedule:
    """Returns the schedule that nodes and copies are, with its simulated time and peak."""
    schedule = Schedule(tuple(nodes), transfers=tuple(transfers))
    simulation = simulate(chain, schedule, link)
    return replace(schedule, time=simulation.time, peak=simulation.peak, waited=simulation.waited)


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
    releases = dict.fromkeys(offloaded, len(free))
    pending: list[int] = []
    for index, left in enumerate(free):
        while sum(costs[item].bundle for item in pending) > left:
            releases[pending.pop(0)] = index
        if index in releases:
            pending.append(index)
    return releases


def _prefetch(offloaded: Sequence[int], costs: Sequence[NodeCosts], free: Sequence[int]) -> dict[int, int]:
    """Returns the node before whose backward each copy to the device begins: the earliest from which there is memory.

    Copies begin in the order in which they are needed: none before that of a later node.
    """
    left, prefetches = list(free), {}
    earliest = len(free) - 1
    for index in reversed(offloaded):
        start = index  # During its own backward, a node's bytes are counted in its costs.
        while start < earliest and left[start + 1] >= costs[index].bundle:
            start += 1
            left[start] -= costs[index].bundle
        prefetches[index] = earliest = start
    return prefetches
