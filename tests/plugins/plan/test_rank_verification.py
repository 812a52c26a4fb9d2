"""Plans on simulated ranks: their shards are counted, refused ones give their place to others."""

from dataclasses import replace
from typing import Any

import pytest

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.plan.layout import Layout, Request, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_plugins.plan.plan_report import RankVerification
from dlo_plugins.plan.plan_search import Candidate, PlanSearch, Rejection
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.step_time import TimeModel
from dlo_tasks.language.causal_lm import CausalLM
from support.planner_models import llama
from support.token_batches import GROUPED

SINGLE = StateFormat("float32", 4, 4, 4, 4, 8.0)


class _Data:
    seq_len = 16


def _planned(layout: Layout, **changes: Any) -> tuple[Candidate, list[RankMemory], RankVerification]:
    task: Any = CausalLM(config={"model_type": "llama", **GROUPED, **changes}).on_meta()
    profile: ModelProfile = profile_model(task, task.example_batch(_Data()), task.parallel_plan())
    times = TimeModel(profile, replace(load_machine("cpu"), ranks_per_node=64), SINGLE)
    memory = MemoryModel(times)
    found = Candidate(layout, times.split(layout), times.step(layout), memory.largest(layout), 1.0, 1.0, 1)
    verify = RankVerification(task, _Data(), {}, 1, SINGLE, found.memory.total * 1.05)
    return found, memory.ranks(layout), verify


@pytest.mark.parametrize(
    "mesh", [pytest.param(MeshSpec(pp=2, dp_shard=2), marks=pytest.mark.slow), MeshSpec(dp_shard=2, tp=2)]
)
def test_even_shards_are_as_predicted(mesh: MeshSpec) -> None:
    found, ranks, verify = _planned(Layout(mesh, 1, 4))
    verified = verify(found, ranks)
    assert isinstance(verified, Candidate)
    assert verified.is_verified
    assert verified.memory.total == pytest.approx(found.memory.total, rel=1e-3)


def test_shards_of_rows_that_ranks_do_not_divide_are_counted() -> None:
    """Of 33 rows, the first of 32 ranks gets two."""
    layout = Layout(MeshSpec(dp_shard=32), 1, 1)
    found, ranks, verify = _planned(layout, vocab_size=33)
    verified = with_limit(verify, 10.0)(found, ranks)
    assert isinstance(verified, Candidate)
    embeddings = 3 * 2 * 4 * GROUPED["hidden_size"]  # Parameters and two moments, of embeddings and head.
    more = verified.memory.parameters - found.memory.parameters
    assert more >= embeddings * (2 - 33 / 32) * 0.9
    refused = with_limit(verify, found.memory.total / 1e9)(found, ranks)
    assert isinstance(refused, Rejection)
    assert refused.kind == "memory"
    assert refused.value > refused.limit == found.memory.total


def with_limit(verify: RankVerification, gigabytes: float) -> RankVerification:
    verify._memory = gigabytes * 1e9
    return verify


def test_what_a_rank_cannot_run_is_refused_with_its_message() -> None:
    found, ranks, verify = _planned(Layout(MeshSpec(dp_shard=2, tp=2), 1, 4))
    impossible = replace(found, layout=replace(found.layout, mesh=MeshSpec(dp_shard=1, tp=4)))
    refused = verify(impossible, ranks)
    assert isinstance(refused, Rejection)
    assert refused.kind == "refused"
    assert "tp must divide" in str(refused)


def _search() -> PlanSearch:
    machine = replace(load_machine("h100"), reserved=1e6, ranks_per_node=4)
    return PlanSearch(llama(1024, 2816, 8, 8, 8, 1024, 8192), machine, StateFormat(), Request(4, 4e9, 8, top=3))


def test_others_take_the_place_of_refused_plans() -> None:
    plain = _search().run()
    first = plain.candidates[0].layout.mesh

    def verify(candidate: Candidate, ranks: list[RankMemory]) -> Candidate | Rejection:
        assert max(rank.total for rank in ranks) == pytest.approx(candidate.memory.total)
        if candidate.layout.mesh == first:
            return Rejection(candidate.layout, "refused", 1.0, 1.0, "rank 0 cannot")
        return replace(candidate, is_verified=True)

    found = _search().run(verify)
    assert len(found.candidates) == 3
    assert all(candidate.is_verified and candidate.layout.mesh != first for candidate in found.candidates)
    assert any(rejection.kind == "refused" for rejection in found.rejections)
    assert len(found.rejections) + 3 == found.count == plain.count


def test_if_no_plan_can_run_the_error_is_that_of_the_first() -> None:
    def refuse(candidate: Candidate, _: list[RankMemory]) -> Rejection:
        return Rejection(candidate.layout, "refused", 1.0, 1.0, "the model must return a tensor, got None; return it")

    with pytest.raises(DloError, match="the model must return a tensor"):
        _search().run(refuse)
