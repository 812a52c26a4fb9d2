"""Schedules of a chain whose blocks cannot run together as regions: each block is kept or recomputed by itself."""

from __future__ import annotations

import math

import numpy as np

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.rotor import keep_fastest
from dlo_plugins.remat.schedule import Keep, Node, Recompute, Schedule
from dlo_plugins.remat.schedule_simulation import predict


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
    nodes = _solve(chain, slot, available // slot)
    return least if nodes is None else predict(chain, nodes)


def recompute_all(chain: Chain) -> list[Node]:
    """Returns the nodes of the schedule in which each block recomputes alone."""
    last = len(chain) - 1
    return [*(Recompute(index, index, (Keep(index),)) for index in range(last)), Keep(last)]


def _solve(chain: Chain, slot: int, count: int) -> list[Node] | None:
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
