"""Rotor against brute force over its schedules."""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from dlo_framework.errors import DloError
from dlo_plugins.memory.rotor import LeastMemory, RotorTable, keep_fastest, solve, solve_alone
from dlo_plugins.memory.schedule import Chain, Keep, Mode, Recompute, Stage, predict, simulate
from support.remat_chains import all_nodes, equal_chain, random_chain, time_and_peak


def brute_force(chain):
    """Returns time and peak of all persistent schedules of a chain."""
    modes = tuple(len(stage.modes) for stage in chain.stages)
    return [time_and_peak(chain, nodes) for nodes in all_nodes(modes)]


def best_within(found, budget):
    return min((time for time, peak in found if peak <= budget), default=math.inf)


def check_against_brute_force(chain):
    """Checks the table, the least budget and the schedules of every budget of a chain, in slots of a byte."""
    found = brute_force(chain)
    least, most = min(peak for _, peak in found), keep_fastest(chain).peak
    assert LeastMemory(chain).budget == least
    assert time_and_peak(chain, LeastMemory(chain).nodes())[1] == least
    table, last = RotorTable(chain, most, 1), len(chain) - 1
    for budget in range(most + 1):
        best = best_within(found, budget)
        slots = budget - chain.input
        assert (table.times(0, last)[slots] if slots >= 0 else math.inf) == best
        if budget < least:
            with pytest.raises(DloError, match=f"budget must be at least {least} bytes"):
                solve(chain, budget)
            continue
        schedule = solve(chain, budget)
        assert (schedule.time, schedule.peak) == time_and_peak(chain, schedule.nodes)
        assert schedule.time == best
        assert schedule.peak <= budget


def chains(seed, count):
    """Yields random chains of at most 6 stages; the longer ones have fewer modes."""
    rng = random.Random(seed)
    for _ in range(count):
        length = rng.randint(1, 6)
        yield random_chain(rng, length, modes=rng.randint(1, 2 if length < 5 else 1), loss=rng.random() < 0.8)


@pytest.mark.parametrize(("seed", "count"), [(0, 30), pytest.param(1, 1000, marks=pytest.mark.slow)])
def test_the_table_equals_brute_force(seed, count):
    for chain in chains(seed, count):
        check_against_brute_force(chain)


def scaled(chain, rng, unit=10**6):
    """Returns the chain with sizes that are no multiples of each other."""

    def size(value):
        return value * unit + rng.randrange(unit) * (value > 0)

    stages = []
    for stage in chain.stages:
        output = size(stage.output)
        modes = [
            replace(
                mode,
                saved=output + size(mode.saved - stage.output),
                forward_peak=size(mode.forward_peak),
                backward_peak=size(mode.backward_peak),
            )
            for mode in stage.modes
        ]
        stages.append(replace(stage, output=output, modes=tuple(modes), forward_peak=size(stage.forward_peak)))
    return Chain(tuple(stages), size(chain.input))


@pytest.mark.parametrize("slots", [1, 50, 500])
def test_sizes_that_are_not_whole_slots_stay_within_the_budget(slots):
    """And near the best: the loss is that of rounding."""
    rng, losses = random.Random(5), []
    for chain in chains(6, 8):
        chain = scaled(chain, rng)
        found = brute_force(chain)
        least, most = min(peak for _, peak in found), max(peak for _, peak in found)
        for budget in (least, least + 1, *(rng.randint(least, most) for _ in range(4)), 10**15):
            schedule = solve(chain, budget, slots)
            assert schedule.peak <= budget
            assert (schedule.time, schedule.peak) == time_and_peak(chain, schedule.nodes)
            losses.append(schedule.time / best_within(found, budget) - 1)
        with pytest.raises(DloError, match=f"budget must be at least {least} bytes"):
            solve(chain, least - 1, slots)
    assert min(losses) >= 0
    assert sum(losses) / len(losses) < {1: 0.5, 50: 0.02, 500: 0.002}[slots]


def test_edges():
    one = Chain((Stage("head", 0, (Mode("all", 5, 1.0, 2.0, backward_peak=2),)),), input=3)
    assert solve(one, 13).peak == 13  # Input, its gradient, 5 kept, 2 transient.
    with pytest.raises(
        DloError, match=re.escape("budget must be at least 13 bytes (13 B) for activations of 1 stages, got 12")
    ):
        solve(one, 12)
    nothing = equal_chain(4, Mode("all", 0, 1.0, 1.0), 0)
    assert solve(nothing, 0).time == 10
    with pytest.raises(DloError, match="budget must be at least 0 bytes"):
        solve(nothing, -1)
    with pytest.raises(DloError, match="slots must be at least 1, got 0"):
        solve(equal_chain(4, Mode("all", 9, 1.0, 1.0), 1), 30, slots=0)
    assert solve(nothing, 10**18).nodes == keep_fastest(nothing).nodes


def test_blocks_that_recompute_alone_have_the_best_of_these_schedules():
    for chain in chains(9, 40):
        ways = [[Keep(n, mode) for mode in range(len(stage.modes))] for n, stage in enumerate(chain.stages)]
        for index, own in enumerate(ways[:-1]):
            own.append(Recompute(index, index, (Keep(index),)))
        found = [time_and_peak(chain, nodes) for nodes in itertools.product(*ways)]
        least = min(peak for _, peak in found)
        for budget in range(least, keep_fastest(chain).peak + 1):
            schedule = solve_alone(chain, budget)
            assert (schedule.time, schedule.peak) == time_and_peak(chain, schedule.nodes)
            assert schedule.time == best_within(found, budget)
            assert schedule.peak <= budget
        with pytest.raises(DloError, match=f"budget must be at least {least} bytes"):
            solve_alone(chain, least - 1)


def test_parameters_that_stay_gathered_count():
    """A region's parameters are there from a stage's recomputation until its own backward: the budget has them."""
    stages = tuple(Stage(f"{n}", 1, (Mode("all", 20, 1.0, 2.0),), gathered=30) for n in range(8))
    chain = Chain((*stages, Stage("head", 0, (Mode("all", 0, 0.5, 1.0),))), 1)
    without = Chain(tuple(replace(stage, gathered=0) for stage in chain.stages), 1)
    nodes = (Recompute(0, 2, (Keep(0), Keep(1), Keep(2))), *(Keep(n) for n in range(3, 9)))
    # In the backward of the region's last stage, the parameters of its other two stages are still there.
    found = [
        max(item.peak for item in simulate(one, predict(one, nodes)).operations if item.operation.run and kind(item))
        for one in (chain, without)
    ]
    assert found[0] == found[1] + 60
    slower = 0
    for budget in range(26, 170, 4):
        try:
            schedule, free = solve(chain, budget, 50), solve(without, budget, 50)
        except DloError as error:
            assert "budget must be at least" in str(error)  # noqa: PT017
            continue
        assert schedule.peak <= budget
        assert schedule.time >= free.time
        slower += predict(chain, free.nodes).peak > budget
    assert slower > 0


def kind(item):
    return item.operation.kind.value == "backward"
