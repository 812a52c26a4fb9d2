"""Rotor: the fastest schedule of a chain within a memory budget; also of blocks that cannot run as regions.

Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory. Beaumont,
Eyraud-Dubois, Herrmann, Joly & Shilova, 2019, arXiv 1911.13214. Departures from it: a stage has several modes, as
blocks have options in Rockmate (Zhao, Le Hellard, Eyraud-Dubois, Gusak & Beaumont, ICML 2023, arXiv 2307.01236); a
forward that keeps nothing has transient bytes of its own, and a region needs those of its own stages alone; equal
sub-chains are computed once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from dlo_framework.errors import DloError, check_number
from dlo_framework.units import format_bytes
from dlo_plugins.memory.schedule import Chain, Keep, Mode, Node, Recompute, Schedule, Stage, predict


class RotorTable:
    """Least time C(s, t, m) of forward and backward of the stages s to t within m bytes, for all s, t and m.

    The m bytes hold all that forward and backward of the stages allocate, and the gradient of the last stage's output,
    but not the first stage's input. Schedules are persistent: what a forward keeps stays until its backward. With
    a(l) bytes of the output of stage l, `saved` and transient bytes of its modes::

        C(s, t, m) = min of
            min over modes o, if m suffices for forward and backward of s:
                forward(s, o) + backward(s, o) + C(s+1, t, m - saved(s, o))
            min over k in s..t-1, if m suffices for forwards of s..t-1 that keep nothing:
                forward(s) + .. + forward(k) + C(k+1, t, m - a(k)) + C(s, k, m)

    Memory is counted in slots. Sizes are rounded up, so a schedule never needs more than it was given. Time is
    O(slots L^3) for L different stages, and O(slots L^2) for equal ones; memory is O(slots) for each different
    sub-chain.

    Args:
        chain: Chain.
        memory: Largest number of bytes that can be asked for.
        slot: Bytes of a slot, as :func:`choose_slot` returns them.
        regions: Whether schedules have regions.

    Attributes:
        slots: Number of slots in the memory.
    """

    def __init__(self, chain: Chain, memory: int, slot: int, regions: bool = True) -> None:
        self.chain, self.slot, self.slots, self._regions = chain, slot, memory // slot, regions
        self._rows, self._kinds = _number_subchains(chain)
        self._inputs = np.array([chain.input_of(index) for index in range(len(chain) + 1)])
        self._forward_sums = np.cumsum([0.0, *(stage.forward for stage in chain.stages)])
        shape = self._kinds, self.slots + 1
        self._times = np.full(shape, math.inf)
        # The same times where the input of the sub-chain is to be kept beside it: C(s, t, m - a(s-1)).
        self._kept = np.full(shape, math.inf)
        self._least = np.zeros(self._kinds, dtype=int)  # First slot with a finite time.
        # Bytes of forwards that keep nothing: a region's first, whose input counts elsewhere, and the others.
        self._firsts = self._inputs[1:] + np.array([stage.forward_peak for stage in chain.stages])
        self._others = self._firsts + self._inputs[:-1]
        self._fill()

    def times(self, first: int, last: int) -> np.ndarray:
        """Returns the least seconds of the stages `first` to `last` within 0, 1, 2, ... slots: a view, [slots + 1]."""
        return self._times[self._rows[first, last]]

    def times_at(self, firsts: np.ndarray, last: int, slots: np.ndarray) -> np.ndarray:
        """Returns the least seconds of sub-chains that end with one stage, each within some slots: [sub-chains].

        Args:
            firsts: Indices of the first stages, [sub-chains].
            last: Index of the last stage.
            slots: Numbers of slots, [sub-chains].
        """
        return self._times[self._rows[firsts, last], slots]

    def least_bytes(self, last: int) -> np.ndarray:
        """Returns the bytes of the fewest slots with which each sub-chain runs that ends with a stage, [last + 1].

        A sub-chain that does not fit in the table's memory gets more than that memory.
        """
        return self._least[self._rows[: last + 1, last]] * self.slot

    def nodes(self, first: int, last: int, slots: int) -> tuple[Node, ...]:
        """Returns the nodes of the fastest schedule of the stages `first` to `last`, which fit in some slots."""
        nodes: list[Node] = []
        while first <= last:
            target = self._times[self._rows[first, last], slots]
            mode = self._mode_of(first, last, slots, target)
            if mode is not None:
                nodes.append(Keep(first, mode))
                slots -= self._ceil(self.chain.stages[first].modes[mode].saved)
                first += 1
                continue
            times = self._region_times(first, last)[:, slots]
            end = first + int(np.argmin(times))
            nodes.append(Recompute(first, end, self.nodes(first, end, slots)))
            slots -= self._ceil(self._inputs[end + 1])
            first = end + 1
        return tuple(nodes)

    def _mode_of(self, first: int, last: int, slots: int, target: float) -> int | None:
        """Returns the mode with which keeping the first stage takes the target time, None if none does."""
        for index in range(len(self.chain.stages[first].modes)):
            least, saved, time = self._keep_costs(first, last, index)
            if slots >= least:
                rest = self._times[self._rows[first + 1, last], slots - saved] if first < last else 0.0
                if rest + time == target:
                    return index
        return None

    def _fill(self) -> None:
        stages = len(self.chain)
        done = np.zeros(self._kinds, dtype=bool)
        for length in range(1, stages + 1):
            for first in range(stages - length + 1):
                last = first + length - 1
                row = self._rows[first, last]
                if not done[row]:
                    self._fill_row(first, last, row)
                    done[row] = True

    def _fill_row(self, first: int, last: int, row: int) -> None:
        times = self._times[row]
        for mode in range(len(self.chain.stages[first].modes)):
            least, saved, time = self._keep_costs(first, last, mode)
            if least <= self.slots:
                kept = (
                    self._times[self._rows[first + 1, last], least - saved : len(times) - saved]
                    if first < last
                    else 0.0
                )
                np.minimum(times[least:], kept + time, out=times[least:])
        if first < last and self._regions:
            np.minimum(times, self._region_times(first, last).min(axis=0), out=times)
        self._least[row] = np.searchsorted(-times, -math.inf, side="right")
        beside = self._ceil(self._inputs[first])
        if beside <= self.slots:
            self._kept[row, beside:] = times[: len(times) - beside]

    def _region_times(self, first: int, last: int) -> np.ndarray:
        """Returns the times of a schedule that begins with a region, [region's last stage - first, slots + 1]."""
        regions, rests = self._rows[first, first:last], self._rows[first + 1 : last + 1, last]
        times = self._kept[rests]
        times += self._times[regions]
        times += (self._forward_sums[first + 1 : last + 1] - self._forward_sums[first])[:, None]
        # The forwards of the region must fit beside the gradient, as what follows them does.
        peaks = np.maximum.accumulate(np.append(self._firsts[first], self._others[first + 1 : last]))
        least = -(-(peaks + self._inputs[last + 1]) // self.slot)
        for index in np.flatnonzero(least > self._least[regions]):
            times[index, : least[index]] = math.inf
        return times

    def _keep_costs(self, first: int, last: int, index: int) -> tuple[int, int, float]:
        """Returns the slots that forward and backward of the first stage need, those that it keeps, and its seconds."""
        mode, stage = self.chain.stages[first].modes[index], self.chain.stages[first]
        forward = self.chain.stages[last].output + mode.saved + mode.forward_peak
        backward = self.chain.input_of(first) + stage.output + mode.saved + mode.backward_peak
        return self._ceil(max(forward, backward)), self._ceil(mode.saved), mode.forward + mode.backward

    def _ceil(self, size: int) -> int:
        return -(-int(size) // self.slot)


def choose_slot(chain: Chain, memory: int, slots: int) -> int:
    """Returns the bytes of a slot: of the sizes that give about as many slots, the one that rounds up least.

    Args:
        chain: Chain whose outputs and saved bytes are rounded up.
        memory: Bytes that the slots divide.
        slots: Largest number of slots.

    Raises:
        DloError: Fewer than one slot.
    """
    check_number("slots", slots, "at least 1", "500 are within a percent of the best schedule")
    smallest = max(1, -(-memory // slots))
    sizes = [stage.output for stage in chain.stages]
    sizes += [mode.saved for stage in chain.stages for mode in stage.modes]
    common = math.gcd(*sizes)
    counts = np.arange(slots, slots // 2, -1)
    candidates = np.unique([*np.maximum(smallest, -(-memory // counts)), -(-common // max(1, common // smallest))])
    candidates = candidates[candidates >= smallest]
    rounded = -(-np.array(sizes)[:, None] // candidates) * candidates  # [sizes, candidates]
    return int(candidates[np.argmin(rounded.sum(axis=0))])


def _number_subchains(chain: Chain) -> tuple[np.ndarray, int]:
    """Returns a number for each sub-chain, equal for equal ones, [stages, stages], and how many there are.

    Sub-chains are equal if their stages' bytes and times are, and the bytes of their inputs.
    """
    classes: dict[tuple[object, ...], int] = {}
    kinds = []
    for index, stage in enumerate(chain.stages):
        modes = tuple(replace(mode, name="") for mode in stage.modes)
        key = (chain.input_of(index), stage.output, stage.forward_peak, modes)
        kinds.append(classes.setdefault(key, len(classes)))
    rows = np.zeros((len(chain), len(chain)), dtype=int)
    numbers: dict[tuple[int, int], int] = {}  # By the number of the sub-chain without its last stage, and that stage.
    for first in range(len(chain)):
        before = -1
        for last in range(first, len(chain)):
            before = rows[first, last] = numbers.setdefault((before, kinds[last]), len(numbers))
    return rows, len(numbers)


class LeastMemory:
    """Least bytes of each sub-chain over all persistent schedules: the recurrence of RotorTable, for memory alone.

    As in the table, the bytes of a sub-chain hold the gradient of its last output, but not its first input. Among the
    schedules with the least memory it takes a fast one.

    Args:
        chain: Chain.
        regions: Whether schedules have regions.
    """

    def __init__(self, chain: Chain, regions: bool = True) -> None:
        self.chain, self._regions = chain, regions
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
        if first < last and self._regions:
            peaks = np.maximum.accumulate(np.append(self._firsts[first], self._others[first + 1 : last]))
            rests = self._inputs[first + 1 : last + 1] + self._bytes[first + 1 : last + 1, last]
            needs = np.maximum(np.maximum(peaks + self._inputs[last + 1], rests), self._bytes[first, first:last])
            times = self._sums[first + 1 : last + 1] - self._sums[first]
            times += self._times[first + 1 : last + 1, last] + self._times[first, first:last]
            ties = np.flatnonzero(needs == needs.min())
            best = ties[np.argmin(times[ties])]
            options.append((needs[best], times[best], first + best))
        self._bytes[first, last], self._times[first, last], self._choices[first, last] = min(options)


def solve(chain: Chain, budget: int, slots: int = 500, regions: bool = True) -> Schedule:
    """Returns the fastest persistent schedule of a chain whose peak is within a budget.

    The table counts in slots and rounds sizes up, and a schedule's peak is in exact bytes. The table therefore goes
    beyond the budget, and the schedule is the fastest in it whose exact peak is within the budget.

    Args:
        chain: Chain.
        budget: Bytes for all that forward and backward of the chain allocate, and for its input.
        slots: Largest number of slots that the budget is divided into.
        regions: Whether schedules have regions.

    Raises:
        DloError: Fewer than one slot, or no schedule fits; the message has the least budget that does.
    """
    fastest = keep_fastest(chain)
    if fastest.peak <= budget:
        return fastest
    check_budget(chain, budget, regions)
    available = budget - chain.input
    slot = choose_slot(chain, available, slots)
    table = RotorTable(chain, available + slot * _rounding(chain, slot, available // slot), slot, regions)
    last = len(chain) - 1
    finite = np.isfinite(table.times(0, last))

    @functools.cache
    def schedule(count: int) -> Schedule:
        return predict(chain, table.nodes(0, last, count))

    # A schedule within the budget's slots is within the budget; beyond, more slots need more bytes, almost always.
    low, high = max(int(np.argmax(finite)), available // slot), table.slots
    if finite.any() and schedule(low).peak > budget:  # By parameters that stay gathered, which the table leaves out.
        low, high = int(np.argmax(finite)), low
    if not finite.any() or schedule(low).peak > budget:
        return _least_schedule(chain, budget, regions)
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


def _least_schedule(chain: Chain, budget: int, regions: bool) -> Schedule:
    """Returns the schedule in the least memory.

    Raises:
        BudgetTooSmall: It does not fit, with the parameters that stay gathered in its regions.
    """
    schedule = predict(chain, LeastMemory(chain, regions).nodes())
    if schedule.peak > budget:
        raise BudgetTooSmall(chain, schedule.peak, budget, " and parameters that regions keep gathered")
    return schedule


def check_budget(chain: Chain, budget: int, regions: bool = True) -> None:
    """Checks that a chain fits in a budget.

    Raises:
        BudgetTooSmall: No schedule fits; the message has the least budget that does.
    """
    least = LeastMemory(chain, regions).budget
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


def solve_alone(chain: Chain, budget: int, slots: int = 500) -> Schedule:
    """Returns the fastest schedule within a budget in which each block is kept, in a mode, or recomputed alone.

    To recompute alone is one more mode of each block, and the table has no regions.

    Args:
        chain: Chain.
        budget: Bytes, as for :func:`solve`.
        slots: Largest number of slots that the budget is divided into.

    Raises:
        BudgetTooSmall: No schedule fits; the message has the least budget that does.
    """
    stages = [*(_with_recomputation(chain, index) for index in range(len(chain) - 1)), chain.stages[-1]]
    schedule = solve(Chain(tuple(stages), chain.input), budget, slots, regions=False)
    alone = [len(stage.modes) for stage in chain.stages]
    nodes = [
        Recompute(node.first, node.first, (Keep(node.first),))
        if isinstance(node, Keep) and node.mode == alone[node.first]
        else node
        for node in schedule.nodes
    ]
    return predict(chain, nodes)


def _with_recomputation(chain: Chain, index: int) -> Stage:
    """Returns a stage with one more mode, which keeps its output alone, and repeats its forward in its backward."""
    stage, first = chain.stages[index], chain.stages[index].modes[0]
    peak = max(first.forward_peak - chain.input_of(index), first.backward_peak)
    mode = Mode(
        "alone", stage.output, stage.forward, first.forward + first.backward, stage.forward_peak,
        max(0, first.saved - stage.output + peak),
    )  # fmt: skip
    return replace(stage, modes=(*stage.modes, mode))
