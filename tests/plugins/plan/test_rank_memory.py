"""Memory and state of a rank: predictions by formulas and by an optimizer's step, and on simulated ranks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import Layout, Request, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_plugins.plan.plan_config import read_dtypes
from dlo_plugins.plan.plan_report import RankVerification
from dlo_plugins.plan.plan_search import Candidate, PlanSearch, Rejection
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import measure_optimizer, profile_run, state_format
from dlo_plugins.plan.step_time import TimeModel
from dlo_tasks.language.causal_lm import CausalLM
from support.planner_models import llama
from support.token_batches import GROUPED

SINGLE = StateFormat("bfloat16", 4, 4, 4, 4, 8.0)
_MACHINE = replace(load_machine("h100"), device="cpu")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def _memory(layout: Layout, state: StateFormat = SINGLE) -> RankMemory:
    profile = replace(llama(512, 1536, 8, 8, 4, 256, 1000, "cpu"), max_logits=256_000)
    return MemoryModel(TimeModel(profile, _MACHINE, state)).largest(layout)


def test_activations_are_what_forward_keeps() -> None:
    profile = llama(512, 1536, 8, 8, 4, 256, 1000, "cpu")
    kept = sum(block.modes["none"].saved.total + block.output.total for block in profile.blocks)
    found = _memory(Layout(MeshSpec(dp_shard=1), 4, zero=0))
    assert found.activations == pytest.approx(4 * (kept + profile.blocks[0].output.total))  # And the first's input.
    assert found.parameters == 4 * profile.parameters
    assert found.optimizer == 8 * profile.parameters
    assert found.gradients == 4 * profile.parameters  # Those of the last step, in forward.


def test_a_v100_is_planned_in_float16_whose_loss_scale_costs_a_pass_over_the_gradients() -> None:
    profile, machine = llama(512, 1536, 8, 8, 4, 256, 1000), load_machine("v100")
    layout = Layout(MeshSpec(dp_shard=4), 4, zero=3)
    half, brain = (state_format(f"{name}-mixed", fused=False) for name in ("16", "bf16"))
    with pytest.raises(DloError, match=r"got float16, float32, float64; set trainer\.precision to 16-mixed"):
        TimeModel(profile, machine, brain).step(layout)
    both = replace(machine, peak={**machine.peak, "bfloat16": machine.rate("float16")})
    models = [TimeModel(profile, both, state) for state in (half, brain)]
    times, (memory, other) = [model.step(layout) for model in models], [MemoryModel(m).largest(layout) for m in models]
    assert memory == other
    assert times[0].optimizer == pytest.approx(times[1].optimizer * (2.5 * 16 + 8) / (2.5 * 16))
    assert replace(times[0], optimizer=times[1].optimizer) == times[1]
    for precision, gathered in ((16, "float32"), ("bf16", "bfloat16"), ("16-true", None)):  # In a run; a plan sets it.
        assert read_dtypes({"trainer": {"precision": precision}}, "cuda") == (gathered, None)


class _Data:
    seq_len = 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_delayed_weights_have_the_gathered_dtype_beside_master_weights(dtype: str) -> None:
    task = CausalLM(config={"model_type": "llama", **GROUPED}).on_meta()
    state = state_format("bf16-mixed", fused=False, gather=dtype)
    mesh = MeshSpec(pp=2, dp_shard=2)
    layout = Layout(mesh, 1, 4, "PipeDream2BW", zero=1)
    predicted = MemoryModel(TimeModel(profile_run(task, _Data(), state), load_machine("h100"), state)).ranks(layout)
    strategy = MeshStrategy(
        **mesh.sizes, schedule="PipeDream2BW", micro_batches=4, appliers=[FullyShard(param_dtype=dtype)]
    )
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    strategy.parallel_devices = [torch.device("cpu")] * 4
    counted = strategy.describe(task, _Data()).ranks
    for stage, rank in enumerate(predicted):
        own = counted[mesh.rank(Coordinates(stage, 0, 0, 0, 0))].state_bytes
        assert rank.parameters == pytest.approx(own.parameters, rel=2e-3)
        assert rank.optimizer == pytest.approx(own.optimizer, rel=2e-3)
    assert state.casts(layout) == (0 if dtype == "bfloat16" else 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predictions_are_near_measured_peaks() -> None:
    """Peaks of three layouts on one rank and three on two; benchmarks/results has them all."""
    words = ["--only", "memory", "--ranks", "1", "2", "--cases", "3"]
    command = [sys.executable, str(BENCHMARKS / "planner_measured.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (table,) = json.loads(done.stdout.splitlines()[-1])["tables"]
    errors = [abs(row["median"] - 1) for row in table["rows"].values()]
    assert len(errors) == 6
    assert max(errors) < 0.1
    assert sum(errors) / 6 < 0.03


# --- state of a task's own optimizer: its bytes follow from a step, for plain, quantised and factored states ---------


CONFIG = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}


def _task(optimizer: str) -> Any:
    return CausalLM(config=dict(CONFIG), optimizer=optimizer, schedule="constant").on_meta()


@pytest.mark.parametrize(
    ("optimizer", "moments", "kind"),
    [("adamw", 2.0, "elementwise"), ("lion", 1.0, "elementwise"), ("adamw8bit", 2 * (1 + 4 / 256) / 4, "tensor")],
)
def test_bytes_follow_from_a_step(optimizer: str, moments: float, kind: str) -> None:
    found = measure_optimizer(_task(optimizer), torch.float32)
    assert found.moments == pytest.approx(moments, rel=0.02)  # Norms keep single precision under 8 bits.
    assert (found.kind, found.error) == (kind, "")


def test_a_factored_state_has_the_shapes_of_rows_and_columns() -> None:
    found = measure_optimizer(_task("adafactor"), torch.float32)
    assert 0 < found.moments < 0.05


class _NeedsTrainer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_steps)


def test_an_optimizer_that_needs_a_trainer_is_taken_as_adam_and_says_so() -> None:
    found = measure_optimizer(_NeedsTrainer(), torch.float32)
    assert found.moments == 2.0
    assert "not attached to a `Trainer`" in found.error


# --- plans on simulated ranks: their shards are counted, refused ones give their place to others ---------------------


FULL = StateFormat("float32", 4, 4, 4, 4, 8.0)


def _planned(layout: Layout, **changes: Any) -> tuple[Candidate, list[RankMemory], RankVerification]:
    task: Any = CausalLM(config={"model_type": "llama", **GROUPED, **changes}).on_meta()
    profile: ModelProfile = profile_model(task, task.example_batch(_Data()), task.parallel_plan())
    times = TimeModel(profile, replace(load_machine("cpu"), ranks_per_node=64), FULL)
    memory = MemoryModel(times)
    found = Candidate(layout, times.split(layout), times.step(layout), memory.largest(layout), 1.0, 1.0, 1)
    verify = RankVerification(task, _Data(), {}, 1, FULL, found.memory.total * 1.05)
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
