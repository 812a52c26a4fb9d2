"""Offloading against enumeration of all its schedules; the simulator's own times are those of test_remat_schedule."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from dlo_framework.errors import DloError
from dlo_plugins.memory.offload import solve_offload
from dlo_plugins.memory.rotor import LeastMemory, keep_fastest, solve
from dlo_plugins.memory.schedule import Keep, Link, Mode, plan_transfers, predict
from support.remat_chains import all_nodes, equal_chain, random_chain


def random_link(rng):
    return Link(rng.choice((0.25, 0.5, 1.0, 2.0)), rng.choice((0.25, 0.5, 1.0, 2.0)))


def all_offloaded(chain):
    """Yields the nodes of all persistent schedules of a chain, with any outermost nodes but the last offloaded."""
    for nodes in all_nodes(tuple(len(stage.modes) for stage in chain.stages)):
        for flags in itertools.product((False, True), repeat=len(nodes) - 1):
            yield tuple(replace(node, offload=flag) for node, flag in zip(nodes, (*flags, False), strict=True))


def best_of_all(chain, budget, link):
    """Returns the least time of all schedules with copies within a budget."""
    best = math.inf
    for nodes in all_offloaded(chain):
        try:
            transfers = plan_transfers(chain, nodes, budget)
        except DloError:
            continue
        found = predict(chain, nodes, transfers, link)
        assert found.peak <= budget
        best = min(best, found.time)
    return best


def check_against_enumeration(rng, count, longest):
    """Compares the program with all schedules; returns the number of budgets, and of those in which it offloads."""
    total = offloads = 0
    for _ in range(count):
        length = rng.randint(2, longest)
        chain = random_chain(rng, length, modes=2 if length < 4 else 1, loss=rng.random() < 0.8)
        link = random_link(rng)
        least, most = LeastMemory(chain).budget, keep_fastest(chain).peak
        budget = rng.randint(max(0, least - 2), max(least, most - 1))
        best = best_of_all(chain, budget, link)
        if math.isinf(best):
            with pytest.raises(DloError, match="budget must be at least"):
                solve_offload(chain, budget, link)
            continue
        schedule = solve_offload(chain, budget, link, places=6)
        assert schedule.time == pytest.approx(best, rel=1e-9)
        assert schedule.peak <= budget
        total += 1
        offloads += any(node.offload for node in schedule.nodes)
    return total, offloads


@pytest.mark.parametrize(
    ("seed", "count", "longest", "offloads"),
    [(2, 60, 4, 8), pytest.param(3, 300, 6, 80, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_the_program_equals_enumeration(seed, count, longest, offloads):
    total, found = check_against_enumeration(random.Random(seed), count, longest)
    assert total > count / 2
    assert found > offloads


def test_edges():
    chain = equal_chain(4, Mode("all", 10, 1.0, 2.0), 2)
    fast = Link(1e6, 1e6)
    assert solve_offload(chain, 10**12, fast).nodes == keep_fastest(chain).nodes
    budget = LeastMemory(chain).budget
    assert solve_offload(chain, budget, fast).peak <= budget
    with pytest.raises(DloError, match=f"budget must be at least {budget} bytes"):
        solve_offload(chain, 3, fast)
    with pytest.raises(DloError, match="budget must be at least"):
        solve_offload(chain, -1, fast)
    for key in ("states", "places"):
        with pytest.raises(DloError, match=f"{key} must be at least 1, got 0"):
            solve_offload(chain, 40, fast, **{key: 0})
    # A link that is too slow for any copy leaves recomputation.
    slow = solve_offload(chain, 40, Link(1e-9, 1e-9))
    assert slow.time == solve(chain, 40).time
    with pytest.raises(DloError, match=r"budget must be at least 46 bytes .* for these nodes, got 21"):
        plan_transfers(chain, [Keep(stage) for stage in range(5)], 21)
