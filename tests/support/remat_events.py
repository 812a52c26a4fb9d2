"""A discrete-event simulation of a schedule with copies, and a search over all its schedules: independent of dlo's.

Computation and the two directions of the link are processes, each with its own list of jobs. A job starts when the
process is free and what it waits for has ended. Memory is counted by time: a bundle's memory is free when its copy to
the host has ended, and in use from the start of its copy to the device.
"""

import itertools
from dataclasses import dataclass, field, replace

from dlo_plugins.memory.schedule import Chain, Keep, Link, Node, Recompute, Transfer
from support.remat_search import all_nodes


@dataclass
class Job:
    """Work of a process.

    Attributes:
        seconds: Duration.
        after: Jobs that must have ended.
        begin: Bytes that are allocated at its start.
        transient: Bytes that are in use while it runs.
        end: Bytes that are freed at its end.
    """

    seconds: float = 0.0
    after: list["Job"] = field(default_factory=list)
    begin: int = 0
    transient: int = 0
    end: int = 0
    start: float = -1.0
    stop: float = -1.0


def run_events(chain: Chain, nodes: tuple[Node, ...], transfers: tuple[Transfer, ...], link: Link) -> tuple[float, int]:
    """Returns the seconds of a step and the peak of memory in bytes."""
    compute: list[Job] = []
    to_host: list[Job] = []
    to_device: list[Job] = []
    by_node = {item.node: item for item in transfers}
    outs, ins, begins = {}, {}, {}

    def size_of_bundle(index: int) -> int:
        node = nodes[index]
        size = chain.input_of(node.first) if index else 0
        return size + (chain.interior(node.stage, node.mode) if isinstance(node, Keep) else 0)

    def forward(node: Node) -> None:
        """Adds jobs of a forward; a region frees what is between its stages."""
        if isinstance(node, Keep):
            mode = chain.stages[node.stage].modes[node.mode]
            compute.append(Job(mode.forward, begin=mode.saved, transient=mode.forward_peak))
            return
        for index in range(node.first, node.last + 1):
            stage = chain.stages[index]
            freed = chain.input_of(index) if index > node.first else 0
            compute.append(Job(stage.modes[0].forward, begin=stage.output, transient=stage.forward_peak, end=freed))

    def backward(node: Node, before: Node | None) -> None:
        """Adds jobs of a backward. The output of a stage before a region goes with the region's backward."""
        if isinstance(node, Recompute):
            for item in node.inner:
                forward(item)
            for item, previous in reversed(list(zip(node.inner, (before, *node.inner[:-1]), strict=True))):
                backward(item, previous)
            return
        stage, mode = chain.stages[node.stage], chain.stages[node.stage].modes[node.mode]
        # The input goes now, unless the stage before keeps it as its output until its own backward.
        own_input = 0 if isinstance(before, Keep) else chain.input_of(node.stage)
        compute.append(
            Job(
                mode.backward,
                begin=chain.input_of(node.stage),  # Its gradient.
                transient=mode.backward_peak,
                end=mode.saved + stage.output + own_input,
            )
        )

    for index, node in enumerate(nodes):
        waits = [outs[item.node] for item in transfers if item.release == index]
        compute.append(Job(after=waits))
        forward(node)
        if index in by_node:
            size = size_of_bundle(index)
            outs[index] = Job(size / link.to_host, after=[compute[-1]], end=size)
            to_host.append(outs[index])
    compute.append(Job(after=[outs[item.node] for item in transfers if item.release == len(nodes)]))
    for index in reversed(range(len(nodes))):
        begins[index] = Job()
        compute.append(begins[index])
        for item in reversed(transfers):
            if item.prefetch == index:
                size = size_of_bundle(item.node)
                job = Job(size / link.to_device, after=[begins[index], outs[item.node]], begin=size)
                ins[item.node] = job
                to_device.append(job)
        compute.append(Job(after=[ins[index]] if index in by_node else []))
        backward(nodes[index], nodes[index - 1] if index else None)

    queues, clocks = [compute, to_host, to_device], [0.0, 0.0, 0.0]
    places = [0, 0, 0]
    while any(place < len(queue) for place, queue in zip(places, queues, strict=True)):
        for process, queue in enumerate(queues):
            while places[process] < len(queue) and all(job.stop >= 0 for job in queue[places[process]].after):
                job = queue[places[process]]
                job.start = max([clocks[process], *(other.stop for other in job.after)])
                job.stop = clocks[process] = job.start + job.seconds
                places[process] += 1
    return clocks[0], _peak_of(chain, queues)


def _peak_of(chain: Chain, queues: list[list[Job]]) -> int:
    """Returns the most bytes in use at any time: what ends at a time is freed before what starts then."""
    events: list[tuple[float, int, int, int]] = []
    for queue in queues:
        for job in queue:
            events.append((job.start, 1, next(_ORDER), job.begin + job.transient))
            events.append((job.stop, 0, next(_ORDER), -job.transient - job.end))
    used = most = chain.input + chain.stages[-1].output
    for *_, change in sorted(events):
        used += change
        most = max(most, used)
    assert used == chain.input  # Its gradient.
    return most


_ORDER = itertools.count()


def all_offloaded(chain: Chain) -> list[tuple[Node, ...]]:
    """Returns the nodes of all persistent schedules of a chain, with any outermost nodes but the last offloaded."""
    found = []
    for nodes in all_nodes(tuple(len(stage.modes) for stage in chain.stages)):
        for flags in itertools.product((False, True), repeat=len(nodes) - 1):
            found.append(tuple(replace(node, offload=flag) for node, flag in zip(nodes, (*flags, False), strict=True)))
    return found
