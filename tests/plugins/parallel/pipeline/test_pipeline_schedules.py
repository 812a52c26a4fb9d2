"""Schedules as data: complete, in order, without deadlock, as fast and as sparing as their papers say."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_plugins.parallel.mesh.pipelined_task import PipelineOptions
from dlo_plugins.parallel.pipeline.pipeline_schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Placement,
    Schedule,
    flushes,
    forward_only,
    make_placement,
    make_schedule,
    splits_backward,
    theoretical_bubble,
)
from dlo_plugins.parallel.pipeline.simulation import StageCosts, dependencies, simulate
from support.named_sets import isolate_named_sets
from support.pipeline_nets import most_in_flight

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT  # noqa: E741
R = ActionKind.RECOMPUTE


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(list(SCHEDULES.loaded())))
    ranks = draw(st.integers(1, 6))
    chunks = draw(st.integers(2, 4)) if name == "Interleaved1F1B" else None
    number = draw(st.integers(1, 20))
    if name == "Interleaved1F1B":
        number = ranks * draw(st.integers(1, 4))
    if name == "PipeDream2BW":
        return make_schedule(name, ranks, max(number, ranks)).unroll(draw(st.integers(1, 3)))
    return make_schedule(name, ranks, number, chunks)


costs_of_stages = st.lists(st.tuples(*[st.floats(0.1, 3)] * 3), min_size=24, max_size=24)


@settings(deadline=None, max_examples=150)
@given(schedules(), costs_of_stages, st.floats(0, 2))
def test_every_action_runs_once_after_what_it_waits_for(
    schedule: Schedule, costs: list[tuple[float, float, float]], transfer: float
) -> None:
    stages = schedule.placement.stages
    forward, input, weight = zip(*costs[:stages], strict=True)
    timeline = simulate(schedule, StageCosts(forward, input, weight, transfer))
    ends: dict[tuple[ActionKind, int, int], float] = {}
    for rank, row in enumerate(timeline.rows):
        at = 0.0
        for item in row:
            assert schedule.placement.rank_of(item.action.stage) == rank
            assert item.action not in ends
            assert item.start >= at
            ends[item.action] = at = item.end
    for stage in range(stages):
        for number in range(schedule.micro_batches):
            assert Action(F, stage, number) in ends
            whole, split = Action(B, stage, number) in ends, Action(I, stage, number) in ends
            assert whole is not split
            assert (Action(W, stage, number) in ends) is split
    for row in timeline.rows:
        for item in row:
            for backward, stage in dependencies(item.action, stages):
                number = item.action.micro_batch
                kinds = (B, I) if backward else (F,)
                before = next(ends[Action(k, stage, number)] for k in kinds if Action(k, stage, number) in ends)
                apart = schedule.placement.rank_of(stage) != schedule.placement.rank_of(item.action.stage)
                assert item.start >= before + transfer * apart - 1e-9
    assert schedule.splits_backward <= splits_backward(schedule.name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", [name for name in SCHEDULES.loaded() if theoretical_bubble(name, 1, 1) is not None])
def test_equal_stages_wait_as_long_as_the_formula_says(name: str, ranks: int) -> None:
    chunks = make_placement(name, ranks).stages_per_rank
    for number in (2 * ranks, 4 * ranks):
        for whole in ((1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 2.0, 1.0)):
            if chunks == 2 and splits_backward(name) and len(set(whole)) > 1:
                continue
            if name == "Varuna" and whole[1] + whole[2] != 2 * whole[0]:
                continue
            part = [cost / chunks for cost in whole]
            schedule = make_schedule(name, ranks, number)
            timeline = simulate(
                schedule if flushes(name) else schedule.unroll(3), StageCosts.equal(ranks * chunks, *part)
            )
            work = number * (sum(whole) + whole[0] * (name == "Varuna" and ranks > 1))
            expected = work + theoretical_bubble(name, ranks, number, whole, chunks)
            if not flushes(name):
                # Of three steps, only the first waits for its first forwards, and the last for its last backwards.
                assert timeline.makespan == pytest.approx(3 * expected + (ranks - 1) * sum(whole))
                continue
            assert timeline.makespan == pytest.approx(expected), whole
            # Varuna's last rank does not recompute, and waits meanwhile.
            idle = number * whole[0] / ranks if name == "Varuna" and ranks > 1 else 0.0
            assert timeline.bubble == pytest.approx(1 - (work - idle) / expected)
    if name in ("GPipe", "1F1B"):
        assert timeline.bubble == pytest.approx((ranks - 1) / (number + ranks - 1))


@given(schedules())
def test_activations_in_flight_are_bounded(schedule: Schedule) -> None:
    ranks, number, chunks = schedule.placement.ranks, schedule.micro_batches, schedule.placement.stages_per_rank
    for rank, order in enumerate(schedule.orders):
        bound = {
            "GPipe": number,
            "1F1B": ranks - rank,
            "Interleaved1F1B": 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1,
            "ZBH1": ranks,
            "ZBV": 2 * ranks,
            "Varuna": 3 * (ranks - rank - 1) + (rank == ranks - 1),
            "PipeDream2BW": ranks - rank,
        }.get(schedule.name, number * chunks)
        inputs = most_in_flight(action for action in order if action.kind is not R)
        assert inputs <= bound
        assert most_in_flight(order) <= (1 if schedule.name == "Varuna" else bound)
        assert sum(+1 if a.kind is F else -1 if a.kind in (B, W) else 0 for a in order) == 0


def test_varuna_s_orders_are_those_of_its_authors() -> None:
    """The output of their generator (github.com/microsoft/varuna, varuna/generate_schedule.cc)."""
    orders = make_schedule("Varuna", 4, 5).orders
    assert [" ".join(f"{a.kind}{a.micro_batch}" for a in order) for order in orders] == [
        "F0 F1 F2 F3 F4 R0 B0 R1 B1 R2 B2 R3 B3 R4 B4",
        "F0 F1 F2 F3 F4 R0 B0 R1 B1 R2 B2 R3 B3 R4 B4",
        "F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 F4 R3 B3 R4 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_varuna_s_backwards_follow_their_recomputation_and_its_last_stage_has_none(ranks: int) -> None:
    schedule = make_schedule("Varuna", ranks, 4 * ranks)
    assert schedule.recomputed_stages == {*range(ranks - 1)}
    for order in schedule.orders[:-1]:
        for one, other in itertools.pairwise(order):
            assert (one.kind is R) == (other.kind is B)
            assert one.kind is not R or one[1:] == other[1:]
    assert [a.kind for a in schedule.orders[-1]] == [F, B] * (4 * ranks)
    # Recomputation of 1F1B in each backward takes a full forward more on every rank, and in filling and draining.
    everywhere = StageCosts([1.0] * ranks, [2.0] * ranks, [1.0] * ranks)
    own = simulate(schedule, StageCosts.equal(ranks))
    assert own.makespan < simulate(make_schedule("1F1B", ranks, 4 * ranks), everywhere).makespan


@pytest.mark.parametrize(("ranks", "number", "steps"), [(2, 2, 1), (2, 4, 3), (4, 4, 5), (4, 9, 2), (8, 8, 3)])
def test_steps_without_flushes_fill_and_drain_the_pipeline_once(ranks: int, number: int, steps: int) -> None:
    costs = StageCosts.equal(ranks)  # F = 1, B = 2
    late = simulate(make_schedule("PipeDream2BW", ranks, number).unroll(steps), costs)
    assert late.makespan == steps * number * 3 + (ranks - 1) * 3
    assert steps * simulate(make_schedule("1F1B", ranks, number), costs).makespan == steps * (number + ranks - 1) * 3


def test_torch_has_the_same_orders() -> None:
    """ZBV against torch.distributed.pipelining, an implementation of their own."""
    from torch.distributed.pipelining import schedules as theirs

    for ranks in (2, 4):
        for number in (2 * ranks, 4 * ranks):
            made = object.__new__(theirs.get_schedule_class("ZBVZeroBubble"))
            made.pp_group_size, made.num_stages, made._n_microbatches = ranks, 2 * ranks, number
            for rank, order in enumerate(make_schedule("ZBV", ranks, number).orders):
                found = [a for a in made._calculate_single_rank_operations(rank) if a is not None]
                assert [(str(a.kind), a.stage, a.micro_batch) for a in order] == [
                    (a.computation_type.value, a.stage_index, a.microbatch_index) for a in found
                ]


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 17))
def test_evaluation_runs_any_number(ranks: int, chunks: int, number: int) -> None:
    for where in (Placement(ranks, chunks), Placement(ranks, 2, "v")):
        schedule = forward_only(where, number)
        simulate(schedule, StageCosts.equal(where.stages))
        counted = Counter((a.stage, a.micro_batch) for order in schedule.orders for a in order)
        assert counted == {(stage, n): 1 for stage in range(where.stages) for n in range(number)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F2B", 2, 4), r"unknown schedule '1F2B', did you mean '1F1B'|unknown schedule '1F2B'"),
        (("1F1B", 2, 0), r"micro_batches must be at least 1, got 0; set 4"),
        (("Interleaved1F1B", 4, 6), r"multiple of the pipeline's 4 ranks for Interleaved1F1B, got 6; set 4 or 8"),
        (("Interleaved1F1B", 4, 8, 1), r"stages_per_rank must be 2 or more for Interleaved1F1B, got 1"),
        (("dualpipev", 4, 8), r"unknown schedule 'dualpipev'; removed in 0\.2: use ZBV\. available: GPipe, "),
        (("ZBV", 4, 6, 3), r"stages_per_rank must be 2 for ZBV, got 3"),
        (("pipedream-2bw", 4, 3), r"at least 4, the number of stages, for PipeDream2BW, got 3; set 4, or sched"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(DloError, match=message):
        make_schedule(*arguments)  # type: ignore[arg-type]


# --- schedules of a user's own --------------------------------------------------------------------------------

OWN = """
from dlo_plugins.parallel.pipeline.pipeline_schedules import Action, ActionKind
from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES


@SCHEDULES.register("OneByOne")
def one_by_one(placement, rank, micro_batches):
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [Action(kind, rank, number) for number in range(micro_batches) for kind in kinds]
"""


def test_a_user_s_file_adds_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_named_sets(monkeypatch)
    (tmp_path / "own_schedule.py").write_text(OWN)
    assert Registry().load_user_module(str(tmp_path / "own_schedule.py")) == []
    schedule = make_schedule("onebyone", 2, 2)
    assert [" ".join(map(str, order)) for order in schedule.orders] == ["F0.0 B0.0 F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1"]
    with pytest.raises(DloError, match="unknown schedule 'OneBeOne'; did you mean 'OneByOne'"):
        make_schedule("OneBeOne", 2, 2)


def actions(text: str) -> list[Action]:
    return [Action(ActionKind(action[0]), 0, int(action[1:])) for action in text.split()]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda placement, rank: [], "must return a rank's actions for .* got TypeError: "),
        (lambda *_: None, "must return a rank's actions for .* got TypeError: 'NoneType'"),
        (lambda *_: ["F"], "must return Actions, got 'F'; return Action"),
        (lambda *_: actions("F0 B0 F1"), "a rank's stages, got F for stage 0 and micro-batch 1; correct"),
        (lambda *_: actions("F0 I0 W0 F1 B1"), "registered with splits_backward=True to run .* on rank 0; add it"),
        (lambda *_: actions("F0 R0 B0 R0 F1 R1 B1"), r"a recomputation \(R\) or none, .* got F R B R for stage 0"),
        (lambda *_: actions("F0 R0 B0 F1 B1"), r"none of the last stage, got 1 of 2 for stage 0 \(the last\)"),
        (lambda *_: actions("F0 B-1 F1 B0"), r"of its own step, got B0\.-1; register it with flushes=False"),
    ],
)
def test_a_user_s_schedule_that_cannot_run_is_named(order: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_named_sets(monkeypatch)
    SCHEDULES.register("Wrong")(order)
    with pytest.raises(DloError, match=f"schedule Wrong .*{message}"):
        PipelineOptions("Wrong", micro_batches=2).check_schedule(1)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    order = tuple(Action(kind, stage, 0) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in (1, 0))
    schedule = Schedule("Wrong", Placement(1, 2), 1, (order,))
    with pytest.raises(DloError, match=r"schedule Wrong, got rank 0 at F1\.0 wait for one another; order each rank's"):
        simulate(schedule, StageCosts.equal(2))
