"""Rotor and offloading against brute force; chains and schedules: the operations of a step, their time and memory."""

import dataclasses
import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from dlo_framework.errors import DloError
from dlo_plugins.memory.offload import solve_offload
from dlo_plugins.memory.rotor import LeastMemory, RotorTable, keep_fastest, solve, solve_alone
from dlo_plugins.memory.schedule import (
    Chain,
    Keep,
    Link,
    Mode,
    Recompute,
    Schedule,
    Stage,
    Transfer,
    list_operations,
    plan_transfers,
    predict,
    simulate,
)
from dlo_plugins.plan.command import remat
from support.remat_chains import all_nodes, equal_chain, random_chain, random_nodes, time_and_peak


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
    with pytest.raises(DloError, match=r"must be at least 13 bytes \(13 B\) for activations of 1 stages, got 12"):
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


# offloading against enumeration of all its schedules; the simulator's own times are those of test_remat_schedule


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


def test_edges_of_offloading():
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


# --- chains and schedules: validation, the operations of a step, their time and memory -------------------------------


MODE = Mode("all", 10, 1.0, 2.0)


def test_operations_come_in_the_order_of_a_step():
    chain = equal_chain(3, MODE, 2)
    inner = (Recompute(0, 0, (Keep(0),)), Keep(1))
    schedule = predict(chain, (Recompute(0, 1, inner), Keep(2), Keep(3)))
    operations = list(list_operations(schedule))
    assert [(o.kind.value, o.stage, o.run, o.drops_input) for o in operations] == [
        ("run", 0, 0, False),
        ("run", 1, 0, True),
        ("save", 2, 0, False),
        ("save", 3, 0, False),
        ("backward", 3, 0, False),
        ("backward", 2, 0, False),
        ("run", 0, 1, False),
        ("save", 1, 1, False),
        ("backward", 1, 1, False),
        ("save", 0, 2, False),
        ("backward", 0, 2, False),
    ]
    assert {o.node for o in operations if o.stage < 2} == {0}
    assert schedule.forwards == (3, 2, 1, 1)
    assert schedule.time == 7 * 1.0 + 4 * 2.0


def test_memory_over_time_of_a_schedule_by_hand():
    """Two blocks of output 2 that keep 10, the first recomputed, and a loss."""
    chain = equal_chain(2, dataclasses.replace(MODE, backward_peak=1), 2, forward_peak=5)
    found = simulate(chain, predict(chain, (Recompute(0, 0, (Keep(0),)), Keep(1), Keep(2))))
    # Columns: kind, stage, peak while it runs, bytes after it.
    assert [(r.operation.kind.value, r.operation.stage, r.peak, r.memory) for r in found.operations] == [
        ("run", 0, 2 + 2 + 5, 4),
        ("save", 1, 4 + 10, 14),
        ("save", 2, 14, 14),
        ("backward", 2, 14 + 2, 16),  # The gradient of the second block's output is made.
        ("backward", 1, 16 + 2 + 1, 4),  # Left: the first block's input, and the gradient of its output.
        ("save", 0, 4 + 10, 14),
        ("backward", 0, 14 + 2 + 1, 2),
    ]
    assert found.peak == 19


def test_time_and_peak_are_those_of_the_papers_definitions():
    rng = random.Random(0)
    for _ in range(300):
        chain = random_chain(rng, rng.randint(1, 7), modes=3, loss=rng.random() < 0.5)
        nodes = random_nodes(rng, chain)
        found = simulate(chain, Schedule(nodes))
        assert (found.time, found.peak) == time_and_peak(chain, nodes)


def test_copies_run_beside_computation_in_the_order_of_issue():
    chain = equal_chain(3, MODE, 2)  # Each block keeps 8 bytes besides input and output.
    nodes = (Keep(0, offload=True), Keep(1, offload=True), Keep(2), Keep(3))
    transfers = (Transfer(0, release=2, prefetch=1), Transfer(1, release=3, prefetch=3))
    link = Link(to_host=4.0, to_device=5.0)
    found = simulate(chain, Schedule(nodes, transfers=transfers), link)
    rows = {(r.operation.kind.value, r.operation.stage): (r.start, r.end, r.memory) for r in found.operations}
    assert rows["offload", 0][:2] == (1.0, 3.0)  # 8 bytes: the chain's input is never copied.
    assert rows["offload", 1][:2] == (3.0, 5.5)  # 10 bytes, after the copy before.
    assert rows["release", 0] == (2.0, 3.0, 2 + 2 + 8 + 2)
    assert rows["release", 1][:2] == (4.0, 5.5)
    assert rows["save", 3][:2] == (5.5, 6.5)
    assert rows["prefetch", 1][:2] == (6.5, 8.5)
    assert rows["arrive", 1][:2] == (10.5, 10.5)
    assert rows["prefetch", 0][:2] == (10.5, pytest.approx(12.1))
    assert rows["backward", 0][:2] == (12.5, 14.5)
    assert found.waited == 1.0 + 1.5
    assert found.time == 14.5


# --- the command ``dlo remat``: ranks of the axes where devices is auto, offloading, and wrong options ---------------


@pytest.mark.slow
def test_it_plans_with_offloading_for_the_ranks_of_the_axes(capsys, tmp_path):
    picture = tmp_path / "schedule.png"
    options = ["--config", "digits/mesh", "--budget", "60%", "--offload", "--link", "1TB/s", "--json"]
    options += ["--trainer.strategy.init_args.micro_batches", "2"]
    assert remat([*options, "--png", str(picture), "--trainer.devices", "auto"]) == 0
    found = capsys.readouterr()
    assert "devices is auto; ranks: " in found.err
    for own in json.loads(found.out):
        for plan in own:
            assert plan["predicted_peak"] <= plan["budget"]
            assert plan["offloaded_bytes"] > 0
            assert any(stage["offloaded"] for stage in plan["stages"])
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "25GB/s"], "remat: --link must come with --offload, got 25GB/s without; add --offload"),
        (["--offload", "--link", "auto"], "remat: --link must be a rate, got auto, which a run measures; give 25GB/s"),
        (["--budget", "auto"], "remat: --budget must be a size or a share, got auto"),
    ],
)
def test_wrong_options_name_the_fix(options, message):
    with pytest.raises(DloError, match=message):
        remat(["--config", "digits/rotor", *options])
