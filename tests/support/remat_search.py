"""Searches over all schedules of a short chain: all persistent ones, and shortest paths over states of memory."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator

from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.schedule import Keep, Node, Recompute


@functools.cache
def all_nodes(modes: tuple[int, ...], first: int = 0) -> list[tuple[Node, ...]]:
    """Returns the nodes of all persistent schedules of stages, given the number of modes of each.

    Args:
        modes: Number of modes of each stage.
        first: Index of the first stage.
    """
    if not modes:
        return [()]
    found: list[tuple[Node, ...]] = []
    for rest in all_nodes(modes[1:], first + 1):
        found += [(Keep(first, mode), *rest) for mode in range(modes[0])]
    for length in range(1, len(modes)):
        rests = all_nodes(modes[length:], first + length)
        for inner in all_nodes(modes[:length], first):
            found += [(Recompute(first, first + length - 1, inner), *rest) for rest in rests]
    return found


def shortest_time(chain: Chain, budget: int) -> float:
    """Returns the least time over all schedules, persistent or not, by Dijkstra's algorithm; inf if none fits.

    A state is the set of stored objects and the stage whose backward comes next. Objects are outputs `(l, -1)` of the
    stages, counted from 1, and `(l, o)`, what a stage keeps in mode `o`.
    """
    inputs = [chain.input, *(stage.output for stage in chain.stages)]
    sizes = {(index, -1): size for index, size in enumerate(inputs)}
    for index, stage in enumerate(chain.stages):
        sizes |= {(index + 1, number): mode.saved for number, mode in enumerate(stage.modes)}
    start = (frozenset({(0, -1)}), len(chain))
    best, order = {start: 0.0}, itertools.count()
    heap = [(0.0, next(order), start)]
    while heap:
        time, _, state = heapq.heappop(heap)
        if time > best[state]:
            continue
        if state[1] == 0:
            return time
        for cost, following in _moves(chain, budget, sizes, inputs, *state):
            if time + cost < best.get(following, math.inf):
                best[following] = time + cost
                heapq.heappush(heap, (time + cost, next(order), following))
    return math.inf


_Item = tuple[int, int]
_State = tuple[frozenset[_Item], int]


def _moves(
    chain: Chain, budget: int, sizes: dict[_Item, int], inputs: list[int], stored: frozenset[_Item], gradient: int
) -> Iterator[tuple[float, _State]]:
    """Yields the operations of a state that fit in the budget: their seconds, and the state after them."""
    used = sum(sizes[item] for item in stored) + inputs[gradient]
    present = {item[0] for item in stored}
    for index in range(1, gradient + 1):
        if index - 1 not in present:
            continue
        stage = chain.stages[index - 1]
        ways = [(-1, stage.forward, stage.forward_peak)]
        ways += [(number, mode.forward, mode.forward_peak) for number, mode in enumerate(stage.modes)]
        for number, cost, peak in ways:
            item = (index, number)
            if item not in stored and used + sizes[item] + peak <= budget:
                yield cost, (stored | {item}, gradient)
    if gradient - 1 in present:
        for index, number in stored:
            if index == gradient and number >= 0:
                mode = chain.stages[gradient - 1].modes[number]
                if used + inputs[gradient - 1] + mode.backward_peak <= budget:
                    left = frozenset(item for item in stored if item[0] < gradient)
                    yield mode.backward, (left, gradient - 1)
    for item in stored - {(0, -1)}:
        yield 0.0, (stored - {item}, gradient)
