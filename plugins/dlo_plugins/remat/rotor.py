"""Rotor: the fastest schedule of a chain within a memory budget; also of blocks that cannot run as regions."""

from __future__ import annotations

import functools
import math

import numpy as np

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.rotor_table import RotorTable, choose_slot
from dlo_plugins.remat.schedule import Keep, Node, Recompute, Schedule
from dlo_plugins.remat.schedule_simulation import predict


class LeastMemory:
    """Least bytes of each sub-chain over all persistent schedules: the recurrence of RotorTable, for memory alone.

    As in the table, the bytes of a sub-chain hold the gradient of its last output, but not its first input. Among the
    schedules with the least memory it takes a fast one.

    Args:
        chain: Chain.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        stages = len(chain)
        self._inputs = np.array([chain.input_of(index) for index in range(stages + 1)])
        peaks = np.array([stage.forward_peak for stage in chain.stages])
        self._firsts = self._inputs[1:] + peaks  # Bytes of a region's first forward, besides its input.
        self._others = self._firsts + self._inputs[:-1]
        self._sums = np.cumsum([0.0, *(stage.forward for stage in chain.stages)])
        self._bytes = np.zeros((stages, stages), dtype=np.int64)
        self._times = np.zeros((stages, stages))
        # Choices: a mode as -1 - mode, a region as its last stage.
        self._choices = np.zeros((stages, stages), dtype=np.int64)
        for length in range(1, stages + 1):
            for first in range(stages - length + 1):
                self._fill(first, first + length - 1)

    @property
    def budget(self) -> int:
        """Least budget of the chain, with its input."""
        return int(self._bytes[0, -1] + self.chain.input)

    def nodes(self, first: int = 0, last: int | None = None) -> tuple[Node, ...]:
        """Returns the nodes of a schedule of the stages `first` to `last` in the least memory."""
        last = len(self.chain) - 1 if last is None else last
        nodes: list[Node] = []
        while first <= last:
            choice = int(self._choices[first, last])
            end = first if choice < 0 else choice
            nodes.append(Keep(first, -1 - choice) if choice < 0 else Recompute(first, end, self.nodes(first, end)))
            first = end + 1
        return tuple(nodes)

    def _fill(self, first: int, last: int) -> None:
        options = []
        for index, mode in enumerate(self.chain.stages[first].modes):
            forward = self._inputs[last + 1] + mode.saved + mode.forward_peak
            backward = self._inputs[first] + self._inputs[first + 1] + mode.saved + mode.backward_peak
            need, time = max(forward, backward), mode.forward + mode.backward
            if first < last:
                need = max(need, mode.saved + self._bytes[first + 1, last])
                time += self._times[first + 1, last]
            options.append((need, time, -1 - index))
        if first < last:
            peaks = np.maximum.accumulate(np.append(self._firsts[first], self._others[first + 1 : last]))
            rests = self._inputs[first + 1 : last + 1] + self._bytes[first + 1 : last + 1, last]
            needs = np.maximum(np.maximum(peaks + self._inputs[last + 1], rests), self._bytes[first, first:last])
            times = self._sums[first + 1 : last + 1] - self._sums[first]
            times += self._times[first + 1 : last + 1, last] + self._times[first, first:last]
            ties = np.flatnonzero(needs == needs.min())
            best = ties[np.argmin(times[ties])]
            options.append((needs[best], times[best], first + best))
        self._bytes[first, last], self._times[first, last], self._choices[first, last] = min(options)


def solve(chain: Chain, budget: int, slots: int = 500) -> Schedule:
    """Returns the fastest persistent schedule of a chain whose peak is within a budget.

    The table counts in slots and rounds sizes up, and a schedule's peak is in exact bytes. The table therefore goes
    beyond the budget, and the schedule is the fastest in it whose exact peak is within the budget.

    Args:
        chain: Chain.
        budget: Bytes for all that forward and backward of the chain allocate, and for its input.
        slots: Largest number of slots that the budget is divided into.

    Raises:
        DloError: Fewer than one slot, or no schedule fits; the message has the least budget that does.
    """
    fastest = keep_fastest(chain)
    if fastest.peak <= budget:
        return fastest
    check_budget(chain, budget)
    available = budget - chain.input
    slot = choose_slot(chain, available, slots)
    table = RotorTable(chain, available + slot * _rounding(chain, slot, available // slot), slot)
    last = len(chain) - 1
    finite = np.isfinite(table.times(0, last))

    @functools.cache
    def schedule(count: int) -> Schedule:
        return predict(chain, table.nodes(0, last, count * slot))

    # A schedule within the budget's slots is within the budget; beyond, more slots need more bytes, almost always.
    low, high = max(int(np.argmax(finite)), available // slot), table.slots
    if finite.any() and schedule(low).peak > budget:  # By parameters that stay gathered, which the table leaves out.
        low, high = int(np.argmax(finite)), low
    if not finite.any() or schedule(low).peak > budget:
        return _least_schedule(chain, budget)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if schedule(middle).peak <= budget else (low, middle - 1)
    return schedule(low)


class BudgetTooSmall(DloError):
    """Budget in which no schedule of a chain fits.

    Args:
        chain: Chain.
        least: Bytes of the least budget that works.
        budget: Bytes of the given one.
        others: Words for the message on what counts beside activations.

    Attributes:
        least: Bytes of the least budget that works.
    """

    def __init__(self, chain: Chain, least: int, budget: int, others: str = "") -> None:
        self.least = least
        super().__init__(
            f"budget must be at least {least} bytes ({format_bytes(least)}) for activations of {len(chain)} stages"
            f"{others}, got {budget} ({format_bytes(budget)}); raise it to that, or make the micro-batch smaller"
        )


def _least_schedule(chain: Chain, budget: int) -> Schedule:
    """Returns the schedule in the least memory.

    Raises:
        BudgetTooSmall: It does not fit, with the parameters that stay gathered in its regions.
    """
    found = predict(chain, LeastMemory(chain).nodes())
    if found.peak > budget:
        raise BudgetTooSmall(chain, found.peak, budget, " and parameters that regions keep gathered")
    return found


def check_budget(chain: Chain, budget: int) -> None:
    """Checks that a chain fits in a budget.

    Raises:
        BudgetTooSmall: No schedule fits; the message has the least budget that does.
    """
    least = LeastMemory(chain).budget
    if budget < least:
        raise BudgetTooSmall(chain, least, budget)


def keep_fastest(chain: Chain) -> Schedule:
    """Returns the schedule that keeps every stage in its fastest mode: no schedule is faster."""
    nodes = []
    for index, stage in enumerate(chain.stages):
        times = [(mode.forward + mode.backward, mode.saved) for mode in stage.modes]
        nodes.append(Keep(index, times.index(min(times))))
    return predict(chain, nodes)


def _rounding(chain: Chain, slot: int, slots: int) -> int:
    """Returns the number of slots beyond the budget's that may be lost to rounding, at most a quarter more."""
    sizes = [stage.output for stage in chain.stages] + [mode.saved for stage in chain.stages for mode in stage.modes]
    lost = sum(-size % slot for size in sizes) / max(1, sum(sizes))
    return min(round(2 * lost * slots), slots // 4)


def solve_units(chain: Chain, budget: int, slots: int = 500) -> Schedule:
    """Returns the fastest schedule within a budget in which each block is kept, in a mode, or recomputed alone.

    Args:
        chain: Chain.
        budget: Bytes, as for :func:`~dlo_plugins.remat.rotor.solve`.
        slots: Number of slots that the budget is divided into.

    Raises:
        DloError: No schedule fits; the message has the least budget that does.
    """
    fastest, least = keep_fastest(chain), predict(chain, recompute_all(chain))
    if fastest.peak <= budget:
        return fastest
    if least.peak > budget:
        raise DloError(
            f"budget must be at least {least.peak} bytes ({format_bytes(least.peak)}) for {len(chain)} stages that each"
            f" recompute alone, got {budget} ({format_bytes(budget)}); raise it to that, or use a smaller micro-batch"
        )
    available = budget - chain.input
    slot = max(1, math.ceil(available / slots))
    nodes = _solve_units(chain, slot, available // slot)
    return least if nodes is None else predict(chain, nodes)


def recompute_all(chain: Chain) -> list[Node]:
    """Returns the nodes of the schedule in which each block recomputes alone."""
    last = len(chain) - 1
    return [*(Recompute(index, index, (Keep(index),)) for index in range(last)), Keep(last)]


def _solve_units(chain: Chain, slot: int, count: int) -> list[Node] | None:
    """Returns the nodes of the fastest schedule in a number of slots; None if rounding leaves none.

    The times of the stages from the `s`-th on, by slots of memory, follow from those of the stages after it.
    """
    times = np.zeros(count + 1)
    choices: list[list[tuple[int, Node]]] = []  # For each stage, its options: kept slots and node.
    chosen = []
    for index in reversed(range(len(chain))):
        options = list(_options(chain, index))
        table = np.full((len(options), count + 1), np.inf)
        for row, (node, need, kept, time) in enumerate(options):
            kept_slots, first = math.ceil(kept / slot), math.ceil(max(need, kept) / slot)
            if first <= count:
                table[row, first:] = time + times[first - kept_slots : count + 1 - kept_slots]
            options[row] = (node, need, kept_slots, time)
        times = table.min(axis=0)
        chosen.append(table.argmin(axis=0))
        choices.append([(kept, node) for node, _, kept, _ in options])
    if not np.isfinite(times[count]):
        return None
    nodes = []
    for index in range(len(chain)):
        kept, node = choices[-1 - index][chosen[-1 - index][count]]
        nodes.append(node)
        count -= kept
    return nodes


def _options(chain: Chain, index: int) -> list[tuple[Node, int, int, float]]:
    """Returns the nodes of a stage, each with the bytes that it needs and keeps, and its seconds."""
    stage, before, after = chain.stages[index], chain.input_of(index), chain.stages[index].output
    found: list[tuple[Node, int, int, float]] = []
    for number, mode in enumerate(stage.modes):
        need = max(mode.saved + mode.forward_peak, before + after + mode.saved + mode.backward_peak)
        found.append((Keep(index, number), need, mode.saved, mode.forward + mode.backward))
    if index + 1 < len(chain):
        again = stage.modes[0]
        need = max(after + again.saved + again.forward_peak, before + after + again.saved + again.backward_peak)
        time = stage.forward + again.forward + again.backward
        node = Recompute(index, index, (Keep(index),))
        found.append((node, max(need, after + stage.forward_peak), after, time))
    return found
