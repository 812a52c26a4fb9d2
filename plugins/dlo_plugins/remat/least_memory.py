"""Least memory in which a chain can run at all, in exact bytes, and the schedule that needs it."""

from __future__ import annotations

import numpy as np

from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.schedule import Keep, Node, Recompute


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

    def bytes_of(self, first: int, last: int) -> int:
        """Returns the least bytes of the stages `first` to `last`, without the first stage's input."""
        return int(self._bytes[first, last])

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
