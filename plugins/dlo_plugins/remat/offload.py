"""Rotor with offloading: the fastest schedule that keeps, recomputes and offloads within a memory budget."""

from __future__ import annotations

import numpy as np

from dlo_framework.errors import DloError, check_number
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.link import Link
from dlo_plugins.remat.offload_program import OffloadProgram
from dlo_plugins.remat.rotor import check_budget, keep_fastest, solve
from dlo_plugins.remat.rotor_table import RotorTable, choose_slot
from dlo_plugins.remat.schedule import Schedule
from dlo_plugins.remat.schedule_simulation import predict
from dlo_plugins.remat.transfer_plan import plan_transfers


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

    Its time is the simulator's. It is never slower than the schedule of :func:`~dlo_plugins.remat.rotor.solve`. Some
    budgets are enough with offloading alone.

    Args:
        chain: Chain.
        budget: Bytes for all that forward and backward of the chain allocate, and for its input.
        link: Link of the copies.
        slots: Largest number of slots that the budget is divided into, for the regions that are recomputed.
        states: Largest number of states that the program keeps after each stage.
        places: Largest number of bundles that it releases one by one, among those on their way in one direction.
        known: Schedule of :func:`~dlo_plugins.remat.rotor.solve`, if it has been found.

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
            found = predict(chain, nodes, plan_transfers(chain, nodes, budget), link)
            # With parameters that stay gathered, which the program leaves out, the peak may be above the budget.
            if found.peak <= budget and (best is None or found.time < best.time):
                best = found
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
