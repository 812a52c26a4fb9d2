"""Under Varuna a rank whose gradient is late runs forwards ahead of its order, and the numbers stay the same."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.testing import run_distributed
from dlo_plugins.pipeline.actions import Action, ActionKind
from dlo_plugins.pipeline.pipeline_engine import Pipeline
from dlo_plugins.pipeline.pipeline_schedules import make_schedule
from dlo_plugins.pipeline.simulation import StageCosts, simulate, simulate_ahead
from dlo_plugins.pipeline.transport import Arrivals, ReceiveQueue
from support.pipeline_nets import Noisy, plain

MICRO_BATCHES = 12


class Watched(Pipeline):
    """Notes its actions, and delays its gradients, or finds those of others late at random."""

    delay = 0.0
    lateness: random.Random | None = None

    def train_step(self, *args: Any, **options: Any) -> Tensor:
        self.done: list[Action] = []
        self.stored = self.most_stored = 0
        return super().train_step(*args, **options)

    def _forward(self, step: Any, action: Action) -> None:
        self.done.append(action)
        super()._forward(step, action)
        self.most_stored = max(self.most_stored, len(step.inputs))

    def _backward(self, step: Any, action: Action, number: int) -> None:
        self.done.append(action)
        time.sleep(self.delay)
        super()._backward(step, action, number)

    def _is_late(self, step: Any, backward: Action, forward: Action) -> bool:
        if self.lateness is None:
            return super()._is_late(step, backward, forward)
        return self.lateness.random() < 0.5


def forwards_ahead(done: list[Action], order: list[Action]) -> int:
    """Returns the largest number of forwards that ran before an action that precedes them in an order."""
    most = 0
    for number, action in enumerate(done):
        if action.kind is ActionKind.BACKWARD:
            before = set(order[: order.index(action)])
            most = max(most, sum(other.kind is ActionKind.FORWARD and other not in before for other in done[:number]))
    return most


def _run_ahead(rank: int, world_size: int, random_lateness: bool) -> int:
    found = {}
    for ahead in (False, True):
        torch.manual_seed(17)
        case = plain(MICRO_BATCHES)
        layers: Any = case.model.layers
        for at, layer in enumerate(layers):
            layers[at] = Noisy(layer)
        pipeline = Watched(case.model, case.plan, dist.group.WORLD, schedule="Varuna")
        pipeline.runs_ahead = ahead
        pipeline.delay = 0.02 if rank == world_size - 1 and not random_lateness else 0.0
        losses: list[Tensor] = []
        threads = set[threading.Thread]()
        own = [(n, p) for n, p in case.model.named_parameters() if pipeline.ownership(n)]
        for step in range(3):
            if ahead and random_lateness and rank == 0:  # Its hidden states are always there.
                pipeline.lateness = random.Random(step)
            losses.append(case.step(pipeline))
            threads |= {thread for thread in threading.enumerate() if thread.name == "dlo-arrivals"}
        neighbours = (rank > 0) + (rank + 1 < world_size)
        assert len(threads) == (neighbours if ahead else 0), "one for each neighbour, for all steps"
        buffers = [b.clone() for b in case.model.buffers() if not b.is_meta]
        found[ahead] = losses, [p.grad for _, p in own], buffers, torch.rand(4)
        order = make_schedule("Varuna", world_size, MICRO_BATCHES).orders[rank]
        most = forwards_ahead(pipeline.done, list(order))
        kept = most_kept(list(order))
        if not ahead:
            assert most == 0
            assert pipeline.most_stored == kept
        assert most <= 2
        assert pipeline.most_stored <= kept + 2
    for one, other in zip(*found.values(), strict=True):
        assert all(map(torch.equal, one, other))
    return most


def most_kept(order: list[Action]) -> int:
    """Returns the largest number of forwards that wait for their recomputation."""
    if not any(action.kind is ActionKind.RECOMPUTE for action in order):
        return 0
    most = now = 0
    for action in order:
        now += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.RECOMPUTE)
        most = max(most, now)
    return most


def test_forwards_run_ahead_while_the_last_rank_is_slow() -> None:
    first, _, last = run_distributed(_run_ahead, 3, False, timeout=120)
    assert first == 2
    assert last == 0


def test_numbers_are_the_same_whenever_gradients_are_late() -> None:
    assert run_distributed(_run_ahead, 2, True, timeout=120)[0] > 0


@pytest.mark.slow
def test_forwards_run_ahead_on_four_ranks() -> None:
    assert run_distributed(_run_ahead, 4, False, timeout=120)[0] == 2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("transfer", [0.0, 0.3, 0.5, 1.0, 2.0])
def test_a_simulated_step_with_forwards_ahead_takes_no_longer(ranks: int, transfer: float) -> None:
    generator = random.Random(ranks)
    for number in (1, 3, 4 * ranks):
        for forward in ([1.0] * ranks, [generator.uniform(0.7, 1.3) for _ in range(ranks)]):
            costs = StageCosts(forward, forward, forward, transfer)
            schedule = make_schedule("Varuna", ranks, number)
            fixed, ahead = simulate(schedule, costs), simulate_ahead(schedule, costs)
            assert ahead.makespan <= fixed.makespan * (1.0 if len(set(forward)) == 1 else 1.03)
            for row, order in zip(ahead.rows, schedule.orders, strict=True):
                done = [timed.action for timed in row]
                assert Counter(done) == Counter(order)
                assert forwards_ahead(done, list(order)) <= 2
                for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                    assert [a for a in done if a.kind is kind] == [a for a in order if a.kind is kind]
            static = simulate_ahead(dataclasses.replace(schedule, ahead=0), costs)
            assert [tuple(timed.action for timed in row) for row in static.rows] == list(schedule.orders)
            assert static.makespan == pytest.approx(fixed.makespan)


@pytest.mark.parametrize(("transfer", "share"), [(0.0, 1.0), (0.5, 0.90), (1.0, 0.86)])
def test_late_messages_cost_less_as_the_page_says(transfer: float, share: float) -> None:
    schedule, costs = make_schedule("Varuna", 4, 16), StageCosts([1.0] * 4, [1.0] * 4, [1.0] * 4, transfer)
    fixed = simulate(schedule, costs).makespan
    assert simulate_ahead(schedule, costs).makespan / fixed == pytest.approx(share, abs=6e-3)


def test_a_failed_receive_raises_where_its_item_is_used() -> None:
    def wait(work: Any) -> None:
        if work == "broken":
            raise RuntimeError("connection reset by peer")

    works = iter(["whole", "broken"])
    link: Any = SimpleNamespace(
        ahead=0,
        receive=lambda buffer: next(works),
        wait=lambda work: work.result() if isinstance(work, Future) else wait(work),
    )
    queue = ReceiveQueue(link, range(2), lambda item: torch.full((1,), float(item)), lambda *_: None, Arrivals())
    later = queue.arrival(1)
    assert later is not None
    assert float(queue.receive(0)) == 0
    with pytest.raises(RuntimeError, match="connection reset"):
        queue.receive(1)


def test_an_item_of_unknown_size_has_no_arrival() -> None:
    queue = ReceiveQueue(SimpleNamespace(ahead=0), range(1), lambda _: None, lambda *_: None, Arrivals())  # type: ignore[arg-type]
    assert queue.arrival(0) is None


def test_the_thread_has_ended_when_its_object_is_gone() -> None:
    def count() -> int:
        return sum(thread.name == "dlo-arrivals" for thread in threading.enumerate())

    gc.collect()
    before = count()
    arrivals = Arrivals()
    assert count() == before + 1
    del arrivals
    gc.collect()
    assert count() == before, "a thread that runs while the interpreter shuts down can abort the process"


def test_the_thread_keeps_no_receive_and_so_no_process_group() -> None:
    class Work:
        pass

    arrivals, work = Arrivals(), Work()
    link: Any = SimpleNamespace(wait=lambda work: None)
    arrivals.follow(link, work).result()  # type: ignore[arg-type]
    kept = weakref.ref(work)
    del work
    deadline = time.monotonic() + 20
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept() is None
