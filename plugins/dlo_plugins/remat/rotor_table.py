"""Rotor's table: the least time of each sub-chain in each amount of memory.

Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory. Beaumont,
Eyraud-Dubois, Herrmann, Joly & Shilova, 2019, arXiv 1911.13214. Departures from it: a stage has several modes, as
blocks have options in Rockmate (Zhao, Le Hellard, Eyraud-Dubois, Gusak & Beaumont, ICML 2023, arXiv 2307.01236); a
forward that keeps nothing has transient bytes of its own, and a region needs those of its own stages alone; equal
sub-chains are computed once.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dlo_framework.errors import check_number
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.schedule import Keep, Node, Recompute


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

    Attributes:
        slots: Number of slots in the memory.
    """

    def __init__(self, chain: Chain, memory: int, slot: int) -> None:
        self.chain, self.slot, self.slots = chain, slot, memory // slot
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

    def time(self, first: int, last: int, memory: int) -> float:
        """Returns the least seconds of forward and backward of the stages `first` to `last`; inf if they do not fit.

        Args:
            first: Index of the first stage.
            last: Index of the last stage.
            memory: Bytes for all but the first stage's input; more than the table's memory counts as that.
        """
        slots = self.slots_of(memory)
        return float(self._times[self._rows[first, last], slots]) if slots >= 0 else math.inf

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

    def slots_of(self, memory: int) -> int:
        """Returns the number of full slots in some bytes, at most those of the table, -1 for negative bytes."""
        return min(memory // self.slot, self.slots) if memory >= 0 else -1

    def nodes(self, first: int, last: int, memory: int) -> tuple[Node, ...]:
        """Returns the nodes of the fastest schedule of the stages `first` to `last`.

        Args:
            first: Index of the first stage.
            last: Index of the last stage.
            memory: Bytes for all but the first stage's input.

        Raises:
            ValueError: The stages do not fit.
        """
        slots = self.slots_of(memory)
        if slots < 0 or math.isinf(self._times[self._rows[first, last], slots]):
            raise ValueError(f"stages {first} to {last} do not fit in {memory} bytes")
        return self._nodes(first, last, slots)

    def _nodes(self, first: int, last: int, slots: int) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while first <= last:
            target = self._times[self._rows[first, last], slots]
            mode = self._mode_of(first, last, slots, target)
            if mode is not None:
                nodes.append(Keep(first, mode))
                slots -= self._ceil(self.chain.stages[first].modes[mode].saved)
                first += 1
                continue
            found = self._region_times(first, last)[:, slots]
            end = first + int(np.argmin(found))
            nodes.append(Recompute(first, end, self._nodes(first, end, slots)))
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
        if first < last:
            np.minimum(times, self._region_times(first, last).min(axis=0), out=times)
        self._least[row] = np.searchsorted(-times, -math.inf, side="right")
        beside = self._ceil(self._inputs[first])
        if beside <= self.slots:
            self._kept[row, beside:] = times[: len(times) - beside]

    def _region_times(self, first: int, last: int) -> np.ndarray:
        """Returns the times of a schedule that begins with a region, [region's last stage - first, slots + 1]."""
        regions, rests = self._rows[first, first:last], self._rows[first + 1 : last + 1, last]
        found = self._kept[rests]
        found += self._times[regions]
        found += (self._forward_sums[first + 1 : last + 1] - self._forward_sums[first])[:, None]
        # The forwards of the region must fit beside the gradient, as what follows them does.
        peaks = np.maximum.accumulate(np.append(self._firsts[first], self._others[first + 1 : last]))
        least = -(-(peaks + self._inputs[last + 1]) // self.slot)
        for index in np.flatnonzero(least > self._least[regions]):
            found[index, : least[index]] = math.inf
        return found

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
        modes = tuple(dataclasses.replace(mode, name="") for mode in stage.modes)
        key = (chain.input_of(index), stage.output, stage.forward_peak, modes)
        kinds.append(classes.setdefault(key, len(classes)))
    rows = np.zeros((len(chain), len(chain)), dtype=int)
    numbers: dict[tuple[int, int], int] = {}  # By the number of the sub-chain without its last stage, and that stage.
    for first in range(len(chain)):
        before = -1
        for last in range(first, len(chain)):
            before = rows[first, last] = numbers.setdefault((before, kinds[last]), len(numbers))
    return rows, len(numbers)
