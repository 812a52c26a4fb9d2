"""Rotor with offloading: the program that chooses which nodes of a chain are kept, recomputed and offloaded.

Efficient Combination of Rematerialization and Offloading for Training DNNs. Beaumont, Eyraud-Dubois & Shilova, NeurIPS
2021. The decisions are the paper's; the program is not.

**Model.** A schedule's outermost nodes cover the chain. From its forward to its backward a node keeps a bundle of
bytes: its input, and, if it is a Keep, what it saves besides input and output. The output is the next node's input, and
in that node's bundle: that node's backward needs it, and comes first. A bundle stays on the device, or is copied to the
host after the node's forward, and back before the node's backward. Copies of one direction run one after another. A
bundle's memory is released when all of it is copied to the host, and allocated when its copy to the device begins.

**Program.** Both passes of a node are charged at once, because backward is planned in reversed time: there, the copy
back of a bundle begins at the node's backward, and its memory is released when the copy ends, as in forward. A state
after a node has the bytes that stay on the device, a queue of bundles that the link to the host has yet to copy, a
queue of those that the link from the host has yet to copy in reversed time, and the seconds so far. A node changes it::

    forward:  wait until resident bytes + bundles in the queue + bytes of the forward <= budget; run, while the link
              copies
    backward: the same in reversed time, with the other queue and the bytes of the backward
    then:     add the bundle to the resident bytes, or to both queues
    at the end of the forward: wait until both queues are empty

A region's backward takes C(first, last, m) seconds of Rotor's table, where m is the memory that is left; every number
of bundles that it may wait for is tried. The charge is the simulator's time with the copies of
:func:`~dlo_plugins.memory.schedule.plan_transfers`: operations and what they wait for are one graph, whose longest
path is the same in reversed time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlo_framework.errors import DloError, check_number
from dlo_plugins.memory.rotor import RotorTable, check_budget, choose_slot, keep_fastest, solve
from dlo_plugins.memory.schedule import (
    Chain,
    Keep,
    Link,
    Node,
    Recompute,
    Schedule,
    node_costs,
    plan_transfers,
    predict,
    region_peak,
)


@dataclass(frozen=True)
class LinkQueues:
    """Bundles that a link copies one after another, of which each stays in memory until it is copied as a whole.

    A queue has a fixed number of places, the oldest bundle first; a place without a bundle has 0 bytes.

    Attributes:
        left: Bytes that the link has yet to copy until each bundle is copied, ascending, [places, states].
        sizes: Bytes of each bundle, [places, states].
    """

    left: np.ndarray
    sizes: np.ndarray

    @classmethod
    def empty(cls, places: int) -> LinkQueues:
        """Returns one queue without bundles."""
        return cls(np.zeros((places, 1)), np.zeros((places, 1)))

    @property
    def held(self) -> np.ndarray:
        """Bytes in memory once all bundles before each place are copied, and once all are, [places + 1, states]."""
        sums = np.cumsum(self.sizes[::-1], axis=0)[::-1]
        return np.concatenate([sums, np.zeros_like(sums[:1])])

    @property
    def total(self) -> np.ndarray:
        """Bytes that the link has yet to copy, [states]."""
        return self.left[-1]

    def take(self, index: Any) -> LinkQueues:
        """Returns some of the queues: those of an index or a mask."""
        return LinkQueues(self.left[:, index], self.sizes[:, index])

    def bytes_until(self, free: np.ndarray) -> np.ndarray:
        """Returns the bytes to copy until no more than `free` bytes are held, [states]; `free` is at least 0."""
        return (self.left * (self.held[:-1] > free)).max(axis=0)

    def copy(self, count: np.ndarray) -> LinkQueues:
        """Returns the queues after the link has copied some bytes of each, [states]."""
        left = np.maximum(0.0, self.left - count)
        return LinkQueues(left, self.sizes * (left > 0))

    def append(self, size: np.ndarray) -> LinkQueues:
        """Returns the queues with one more bundle each, [states].

        Where all places have a bundle, the two oldest become one, which is held until both are copied.
        """
        left = np.concatenate([self.left[1:], (self.total + size)[None]])
        sizes = np.concatenate([self.sizes[1:], np.broadcast_to(size, self.total.shape)[None]])
        sizes[0] += self.sizes[0]
        return LinkQueues(left, sizes)

    @staticmethod
    def concat(items: list[LinkQueues]) -> LinkQueues:
        """Returns all queues of several sets."""
        left = np.concatenate([item.left for item in items], axis=1)
        return LinkQueues(left, np.concatenate([item.sizes for item in items], axis=1))


@dataclass(frozen=True)
class States:
    """States after a node.

    Attributes:
        resident: Bytes that stay on the device, [states].
        pending: Bundles to copy to the host.
        arriving: Bundles to copy to the device, in reversed time.
        seconds: Seconds so far, of forward and backward, [states].
        nodes: The last node of each state, [5, states]: number of the state before it, its first stage, its mode (-1
            for a region), whether it is offloaded, and the slots of a region's backward.
    """

    resident: np.ndarray
    pending: LinkQueues
    arriving: LinkQueues
    seconds: np.ndarray
    nodes: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, index: Any) -> States:
        """Returns some of the states: those of an index or a mask."""
        queues = self.pending.take(index), self.arriving.take(index)
        return States(self.resident[index], *queues, self.seconds[index], self.nodes[:, index])

    @staticmethod
    def concat(items: list[States]) -> States:
        """Returns all states of several sets."""
        return States(
            np.concatenate([item.resident for item in items]),
            LinkQueues.concat([item.pending for item in items]),
            LinkQueues.concat([item.arriving for item in items]),
            np.concatenate([item.seconds for item in items]),
            np.concatenate([item.nodes for item in items], axis=1),
        )


class OffloadProgram:
    """Least time of the schedules of a chain with one link, and the nodes of the best.

    It is exact where no set of states is larger than `states`, and no more bundles than `places` are in a queue. Of a
    larger set, it goes on with the fastest of the states of about the same bytes; of more bundles, the oldest two are
    released together. The seconds and bytes of a state are upper bounds always.

    Args:
        chain: Chain.
        budget: Bytes for all that forward and backward of the chain allocate, and for its input.
        link: Link of the copies.
        table: Rotor's table of the chain for the budget less the chain's input.
        bound: Seconds that a schedule must be below.
        states: Largest number of states after a stage.
        places: Largest number of bundles in a queue.
    """

    def __init__(
        self,
        chain: Chain,
        budget: int,
        link: Link,
        table: RotorTable,
        bound: float = math.inf,
        states: int = 1000,
        places: int = 4,
    ) -> None:
        self.chain, self.link, self.table = chain, link, table
        self.budget, self.bound, self.states, self.places = budget - chain.input, bound, states, places
        self._sums = np.cumsum([0.0, *(stage.forward for stage in chain.stages)])
        least = [[min(getattr(m, key) for m in s.modes) for s in chain.stages] for key in ("forward", "backward")]
        # Least seconds of forward and backward from each stage on, [2, stages + 1].
        self._rest = np.pad(np.cumsum(np.array(least)[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))
        self._inputs = np.array([0, *(stage.output for stage in chain.stages[:-1])])
        empty = LinkQueues.empty(places)
        self._all = States(np.zeros(1), empty, empty, np.zeros(1), np.zeros((5, 1), dtype=np.int64))
        self._starts = [0, 1]  # Numbers of the first states before stages 0, 1, ...; the last number is the end.

    def solve(self) -> tuple[float, tuple[Node, ...]]:
        """Returns the least seconds of a schedule and its nodes; inf and none if none is below the bound."""
        last = len(self.chain) - 1
        for stage in range(last):
            kept = self._prune(States.concat([*self._keeps(stage), *self._regions(stage)]), stage)
            self._all = States.concat([self._all, kept])
            self._starts.append(len(self._all))
        ends = States.concat(self._keeps(last))
        seconds = ends.seconds + ends.pending.total / self.link.to_host + ends.arriving.total / self.link.to_device
        if not len(ends) or seconds.min() >= self.bound:
            return math.inf, ()
        best = int(np.argmin(seconds))
        return float(seconds[best]), self._trace(ends.nodes[:, best], last)

    def _keeps(self, stage: int) -> list[States]:
        """Returns the states after a stage that is kept, in each of its modes; the last stage is not offloaded."""
        before = self._all.take(slice(self._starts[stage], self._starts[stage + 1]))
        numbers = np.arange(self._starts[stage], self._starts[stage + 1])
        new_states = []
        for index, mode in enumerate(self.chain.stages[stage].modes):
            costs = node_costs(self.chain, Keep(stage, index))
            free = self.budget - costs.forward - before.resident
            free_later = self.budget - costs.backward - before.resident
            fits = (free >= 0) & (free_later >= 0)
            states = _with_nodes(before, numbers, stage, index, 0).take(fits)
            states = self._forward(states, free[fits], mode.forward)
            states = self._backward(states, states.arriving.bytes_until(free_later[fits]), mode.backward)
            new_states += self._place(states, costs.bundle, stage, mode.movable)
        return new_states

    def _regions(self, last: int) -> list[States]:
        """Returns the states after the regions that end with a stage."""
        firsts = np.repeat(np.arange(last + 1), np.diff(self._starts))  # First stage of the region after each state.
        peaks = np.array([region_peak(self.chain, first, last) for first in range(last + 1)])
        inputs, seconds = self._inputs[firsts], self._sums[last + 1] - self._sums[firsts]
        left = self.budget - inputs - self._all.resident
        free = left - peaks[firsts] - self.chain.stages[-1].output
        spare = left - self.table.least_bytes(last)[firsts]  # For bundles, beside the least memory of the inner nodes.
        below = self._all.seconds + self._rest.sum(axis=0)[firsts] + seconds < self.bound  # It runs forward twice.
        fits = np.flatnonzero((free >= 0) & (spare >= 0) & below)
        states = _with_nodes(self._all.take(fits), fits, firsts[fits], -1, 0)
        states = self._forward(states, free[fits], seconds[fits])
        firsts, inputs, left, spare = firsts[fits], inputs[fits], left[fits], spare[fits]
        held, new_states = states.arriving.held, []
        for copied in range(self.places + 1):  # Number of bundles that the backward waits for.
            use = held[copied] <= spare
            if copied:
                use &= states.arriving.sizes[copied - 1] > 0
            if not (some := np.flatnonzero(use)).size:
                continue
            after = states.take(some)
            waited = after.arriving.left[copied - 1] if copied else np.zeros(some.size)
            slots = np.minimum((left[some] - held[copied, some]) // self.table.slot, self.table.slots).astype(np.int64)
            after.nodes[4] = slots
            after = self._backward(after, waited, self.table.times_at(firsts[some], last, slots))
            new_states += self._place(after, inputs[some], last)
        return new_states

    def _forward(self, states: States, free: np.ndarray, seconds: Any) -> States:
        """Returns the states after a forward, before which pending bundles are copied until the others fit."""
        waited = states.pending.bytes_until(free)
        pending = states.pending.copy(waited + self.link.to_host * seconds)
        time = states.seconds + waited / self.link.to_host + seconds
        return States(states.resident, pending, states.arriving, time, states.nodes)

    def _backward(self, states: States, waited: np.ndarray, seconds: Any) -> States:
        """Returns the states after a backward, before which some bytes are copied to the device."""
        arriving = states.arriving.copy(waited + self.link.to_device * seconds)
        time = states.seconds + waited / self.link.to_device + seconds
        return States(states.resident, states.pending, arriving, time, states.nodes)

    def _place(self, states: States, bundle: Any, stage: int, movable: bool = True) -> list[States]:
        """Returns the states in which the last node's bundle stays on the device, and those in which it does not."""
        bundle = np.broadcast_to(bundle, len(states))
        stay = States(states.resident + bundle, states.pending, states.arriving, states.seconds, states.nodes)
        if stage == len(self.chain) - 1 or not movable:
            return [stay]
        away, bundle = states.take(bundle > 0), bundle[bundle > 0]
        away.nodes[3] = 1
        queues = away.pending.append(bundle), away.arriving.append(bundle)
        return [stay, States(away.resident, *queues, away.seconds, away.nodes)]

    def _prune(self, states: States, stage: int) -> States:
        """Returns at most `states` states after a stage, of those that can be below the bound.

        Of the states with about the same resident and pending bytes it takes the one with the least lower bound.
        """
        copied = states.pending.total / self.link.to_host, states.arriving.total / self.link.to_device
        bounds = states.seconds.copy()
        for least, queued in zip(self._rest[:, stage + 1], copied, strict=True):
            bounds += np.maximum(least, queued)
        states, bounds = states.take(bounds < self.bound), bounds[bounds < self.bound]
        if len(states) <= self.states:
            return states
        states = states.take(np.argsort(bounds, kind="stable"))
        cells = np.stack([states.resident, states.pending.total])
        # Resident bytes, which last until backward, are told apart more finely.
        cells *= self.states * np.array([[4.0], [1.0]]) / np.maximum(cells.max(axis=1, keepdims=True), 1e-30)
        picked = np.arange(len(states))
        while len(picked) > self.states:
            cells /= 1.3
            numbers = (cells[:, picked].astype(np.int64) * [[2 * self.states], [1]]).sum(axis=0)
            _, fastest = np.unique(numbers, return_index=True)
            picked = picked[np.sort(fastest)]
        return states.take(picked)

    def _trace(self, node: np.ndarray, last: int) -> tuple[Node, ...]:
        """Returns the nodes up to a last one, which ends with a stage."""
        nodes: list[Node] = []
        while last >= 0:
            number, first, mode, offload, slots = map(int, node)
            if mode >= 0:
                nodes.append(Keep(first, mode, bool(offload)))
            else:
                inner = self.table.nodes(first, last, slots)
                nodes.append(Recompute(first, last, inner, bool(offload)))
            node, last = self._all.nodes[:, number], first - 1
        return tuple(reversed(nodes))


def _with_nodes(states: States, numbers: np.ndarray, first: Any, mode: int, offload: int) -> States:
    """Returns states with another last node; see :class:`States`."""
    nodes = np.stack(np.broadcast_arrays(numbers, first, mode, offload, 0))
    return States(states.resident, states.pending, states.arriving, states.seconds, nodes)


def solve_offload(
    chain: Chain,
    budget: int,
    link: Link,
    slots: int = 500,
    states: int = 1000,
    places: int = 4,
    known: Schedule | None = None,
) -> Schedule:
    """Returns the fastest schedule found that keeps, recomputes and offloads, with its peak within a budget.

    Its time is the simulator's. It is never slower than the schedule of :func:`~dlo_plugins.memory.rotor.solve`. Some
    budgets are enough with offloading alone.

    Args:
        chain: Chain.
        budget: Bytes for all that forward and backward of the chain allocate, and for its input.
        link: Link of the copies.
        slots: Largest number of slots that the budget is divided into, for the regions that are recomputed.
        states: Largest number of states that the program keeps after each stage.
        places: Largest number of bundles that it releases one by one, among those on their way in one direction.
        known: Schedule of :func:`~dlo_plugins.memory.rotor.solve`, if it has been found.

    Raises:
        DloError: Fewer than one slot, state or place, or no schedule is found; the message has the least budget without
            offloading.
    """
    for key, value, usual in (("states", states, 1000), ("places", places, 4)):
        check_number(key, value, "at least 1", f"{usual} is the default")
    best = known or _without_copies(chain, budget, slots)
    if best is not None and best.time <= keep_fastest(chain).time:
        return best
    available = max(0, budget - chain.input)
    table = RotorTable(chain, available, choose_slot(chain, available, slots))
    bound = best.time if best is not None else np.inf
    for count in sorted({-(-states // 5), states}):  # A quick run lowers the bound of the thorough one.
        charge, nodes = OffloadProgram(chain, budget, link, table, bound, count, places).solve()
        if nodes:
            bound = charge
            schedule = predict(chain, nodes, plan_transfers(chain, nodes, budget), link)
            # With parameters that stay gathered, which the program leaves out, the peak may be above the budget.
            if schedule.peak <= budget and (best is None or schedule.time < best.time):
                best = schedule
    if best is None:
        check_budget(chain, budget)
        return solve(chain, budget, slots)
    return best


def _without_copies(chain: Chain, budget: int, slots: int) -> Schedule | None:
    """Returns the fastest schedule without offloading; None if none fits."""
    try:
        return solve(chain, budget, slots)
    except DloError:
        return None
