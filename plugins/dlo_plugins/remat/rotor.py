"""Rotor: the fastest schedule of a chain within a memory budget."""

from __future__ import annotations

import functools

import numpy as np

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.least_memory import LeastMemory
from dlo_plugins.remat.rotor_table import RotorTable, choose_slot
from dlo_plugins.remat.schedule import Keep, Schedule
from dlo_plugins.remat.schedule_simulation import predict


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


def _least_schedule(chain: Chain, budget: int) -> Schedule:
    """Returns the schedule in the least memory.

    Raises:
        DloError: It does not fit, with the parameters that stay gathered in its regions.
    """
    found = predict(chain, LeastMemory(chain).nodes())
    if found.peak > budget:
        raise DloError(
            f"budget must be at least {found.peak} bytes ({format_bytes(found.peak)}) for activations of"
            f" {len(chain)} stages and parameters that regions keep gathered, got {budget} ({format_bytes(budget)});"
            " raise it to that, or make the micro-batch smaller"
        )
    return found


def check_budget(chain: Chain, budget: int) -> None:
    """Checks that a chain fits in a budget.

    Raises:
        DloError: No schedule fits; the message has the least budget that does.
    """
    least = LeastMemory(chain).budget
    if budget < least:
        raise DloError(
            f"budget must be at least {least} bytes ({format_bytes(least)}) for activations of {len(chain)} stages, got"
            f" {budget} ({format_bytes(budget)}); raise it to that, or make the micro-batch smaller"
        )


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
