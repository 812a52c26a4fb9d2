"""Second models, such as a teacher: their bytes and forwards are in the figures, and limit the axes of a plan."""

from dataclasses import replace

import pytest

from dlo_framework.mesh import MeshSpec
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import load_machine
from dlo_plugins.planner.plan_request import Request
from dlo_plugins.planner.plan_search import PlanSearch
from dlo_plugins.planner.second_model import SecondModel, SecondModels
from dlo_plugins.planner.step_time import TimeModel
from support.planner_models import llama

STATE = StateFormat("bfloat16", 4, 2, 4, 4, 8.0)
MACHINE = load_machine("h100")


def _student_and_teacher() -> tuple[PlanSearch, PlanSearch]:
    student, teacher = llama(512, 1536, 4, 8, 4, 256, 1000), llama(512, 1536, 8, 8, 4, 256, 1000)
    request = Request(8, 80e9, 64)
    return (
        PlanSearch(student, MACHINE, STATE, request),
        PlanSearch(student, MACHINE, STATE, request, [SecondModel(teacher)]),
    )


def test_memory_has_the_shards_of_a_second_model() -> None:
    teacher = llama(512, 1536, 8, 8, 4, 256, 1000)
    alone, both = _student_and_teacher()
    for sizes, zero, sharers in (({"dp_shard": 1}, 0, 1), ({"dp_shard": 8}, 3, 8), ({"dp_shard": 8}, 2, 8)):
        layout = Layout(MeshSpec(**sizes), 8, zero=zero)
        found, before = both.memory.largest(layout), alone.memory.largest(layout)
        assert found.second_model >= 4 * teacher.parameters / sharers
        assert found.total - before.total == pytest.approx(found.second_model * (1 + MACHINE.fragmentation))


def test_offloaded_parameters_and_those_of_half_precision_take_less() -> None:
    teacher = llama(512, 1536, 8, 8, 4, 256, 1000)
    layout = Layout(MeshSpec(dp_shard=1), 8, zero=0)
    kinds = (SecondModel(teacher), SecondModel(teacher, "bfloat16"), SecondModel(teacher, offload=True))
    full, half, offloaded = (SecondModels([kind], MACHINE, STATE).stored_bytes(layout) for kind in kinds)
    assert half == full / 2
    assert offloaded < full / 2


def test_time_has_its_forward() -> None:
    student, teacher = llama(512, 1536, 4, 8, 4, 256, 1000), llama(512, 1536, 8, 8, 4, 256, 1000)
    layout = Layout(MeshSpec(dp_shard=1), 8, 2, zero=0)
    times = TimeModel(teacher, MACHINE, STATE)
    forward = sum(times.part_time(part, layout, "none").forward for part in teacher.parts)
    assert SecondModels([SecondModel(teacher)], MACHINE, STATE).seconds(layout) == pytest.approx(2 * forward)
    alone, both = _student_and_teacher()
    best = both.run().candidates[0]
    assert best.time.second_model > 0
    assert best.time.total > alone.run().candidates[0].time.total
    assert student.flops < teacher.flops


def test_axes_that_cannot_cut_it_are_left_out() -> None:
    student = llama(512, 1536, 4, 8, 4, 256, 1000)
    uncut = replace(llama(512, 1536, 8, 8, 4, 256, 1000), tp=(1,), pp=1)
    found = PlanSearch(student, MACHINE, STATE, Request(8, 80e9, 64, top=50), [SecondModel(uncut)]).run()
    assert {(c.layout.mesh.tp, c.layout.mesh.pp) for c in found.candidates} == {(1, 1)}
