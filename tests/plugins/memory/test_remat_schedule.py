"""Chains and schedules: validation, the operations of a step, their time and memory."""

import dataclasses
import random

import pytest

from dlo_plugins.memory.schedule import (
    Keep,
    Link,
    Mode,
    Recompute,
    Schedule,
    Transfer,
    list_operations,
    predict,
    simulate,
)
from support.remat_chains import equal_chain, random_chain, random_nodes, time_and_peak

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
