"""Predicted memory: a step's peak follows from what is alive at each moment, and agrees with what runs here need."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import Layout, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.plan_config import read_dtypes
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import profile_run, state_format
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
