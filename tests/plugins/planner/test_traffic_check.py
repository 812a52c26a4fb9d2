"""Communication of a step by part: what is predicted beside what a simulated rank's step has."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from dlo_framework.distributed.collectives import PAIRWISE_LISTENERS
from dlo_framework.mesh import MeshSpec
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import silence_lightning
from dlo_framework.watch.step_traffic import TrafficReport
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import load_machine
from dlo_plugins.planner.model_profile import profile_model
from dlo_plugins.planner.plan_report import profile_run, state_format
from dlo_plugins.planner.run_check import compare_traffic
from dlo_plugins.planner.step_time import TimeModel
from dlo_plugins.planner.traffic_check import StepTraffic, count_traffic, predict_traffic, recorded_traffic
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from dlo_tasks.llm.causal_lm import CausalLM
from support.causal_types import tiny

SINGLE = StateFormat("float32", 4, 4, 4, 4, 8.0)
SIZES = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}

_HALF = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


class _Data:
    seq_len = 16


def _recompute(mode: str) -> list[dict[str, Any]]:
    return [{"class_path": "ActivationCheckpoint", "init_args": {"mode": mode}}]


@pytest.fixture(scope="module")
def model() -> tuple[CausalLM, TimeModel]:
    task: Any = CausalLM(config=SIZES).on_meta()
    profile = profile_model(task, task.example_batch(_Data()), task.parallel_plan(), dtype=torch.float32)
    return task, TimeModel(profile, replace(load_machine("cpu"), ranks_per_node=64), SINGLE)


@pytest.mark.parametrize(
    ("mesh", "count", "options"),
    [
        (MeshSpec(dp_shard=2), 1, {}),
        (MeshSpec(dp_replicate=2, dp_shard=2), 1, {}),
        (MeshSpec(dp_shard=2, tp=2), 2, {}),
        (MeshSpec(dp_shard=1, tp=2), 1, {"sequence_parallel": True}),
        (MeshSpec(dp_shard=1, tp=2), 1, {"appliers": _recompute("full")}),
        (MeshSpec(dp_shard=1, tp=2), 1, {"sequence_parallel": True, "appliers": _recompute("full")}),
        (MeshSpec(dp_shard=1, pp=2), 4, {"micro_batches": 4}),
        (MeshSpec(dp_shard=2, pp=2), 4, {"micro_batches": 4}),
        (MeshSpec(dp_shard=1, cp=2), 1, {}),
        (MeshSpec(dp_shard=1, cp=2), 1, {"appliers": _recompute("full")}),
        (MeshSpec(dp_shard=1, cp=2), 1, {"appliers": _recompute("selective")}),
    ],
)
def test_predicted_bytes_are_those_of_a_rank(
    model: tuple[CausalLM, TimeModel], mesh: MeshSpec, count: int, options: dict[str, Any]
) -> None:
    task, times = model
    sequence = bool(options.get("sequence_parallel"))
    layout = Layout(mesh, 2, count, zero=3 if mesh.dp_shard * mesh.cp > 1 else 0, sequence_parallel=sequence)
    appliers = options.get("appliers", [])
    layout = replace(layout, recompute=appliers[0]["init_args"]["mode"] if appliers else "none")
    config = {"trainer": {"strategy": {"class_path": "MeshStrategy", "init_args": {**mesh.sizes, **options}}}}
    counted = count_traffic(config, task, _Data(), layout)
    assert counted is not None
    predicted = predict_traffic(times, layout)
    found = compare_traffic(predicted, counted)
    assert {residual.name.removesuffix("_bytes") for residual in found} == {
        *({"gathering", "gradients"} if mesh.dp_shard * mesh.cp > 1 else set()),
        *({"tensor"} if mesh.tp > 1 else set()),
        *({"pipeline"} if mesh.pp > 1 else set()),
        *({"context"} if mesh.cp > 1 else set()),
    }
    for residual in found:
        # The loss's own collectives, and the pipeline's count of tokens, are not predicted.
        assert residual.predicted == pytest.approx(residual.measured, rel=0.02), residual.name


def _loss_bytes(rows: int) -> int:
    """Returns the bytes that a divided head's loss sums over `tp`: three numbers a token, which are not predicted."""
    return 3 * 4 * rows * _Data.seq_len


@pytest.mark.parametrize("mesh", [MeshSpec(dp_shard=1, tp=2), MeshSpec(dp_shard=2, tp=2)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_weights_that_ranks_of_tp_share_are_summed_once_a_step(
    kind: str, mesh: MeshSpec, sequence: bool
) -> None:
    """With a sharded sequence those of norms between regions; without it, those of norms of queries and keys alone."""
    task: Any = CausalLM(config={**SIZES, "model_type": kind}).on_meta()
    profile = profile_model(task, task.example_batch(_Data()), task.parallel_plan(), dtype=torch.float32)
    times = TimeModel(profile, replace(load_machine("cpu"), ranks_per_node=64), SINGLE)
    layout = Layout(mesh, 2, 1, zero=3 if mesh.dp_shard > 1 else 0, sequence_parallel=sequence)
    options = {**mesh.sizes, "sequence_parallel": sequence}
    config = {"trainer": {"strategy": {"class_path": "MeshStrategy", "init_args": options}}}
    counted = count_traffic(config, task, _Data(), layout)
    assert counted is not None
    assert counted.tensor - predict_traffic(times, layout).tensor == pytest.approx(_loss_bytes(2), abs=8)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshSpec(dp_shard=1, tp=2), {}),
        (MeshSpec(dp_shard=1, tp=2), {"sequence_parallel": True}),
        (MeshSpec(dp_shard=2, tp=2), {"appliers": [{"class_path": "FullyShard", "init_args": _HALF}]}),
    ],
)
def test_autocast_sums_outputs_in_the_products_dtype_and_gradients_in_that_of_inputs(
    mesh: MeshSpec, options: dict[str, Any]
) -> None:
    task: Any = CausalLM(config=SIZES).on_meta()
    state = state_format("bf16-mixed", fused=False, gather=None, reduce=None)
    times = TimeModel(profile_run(task, _Data(), state, "cpu"), load_machine("cpu"), state)
    sequence = bool(options.get("sequence_parallel"))
    layout = Layout(mesh, 2, 1, zero=3 if mesh.dp_shard > 1 else 0, sequence_parallel=sequence)
    strategy = {"class_path": "MeshStrategy", "init_args": {**mesh.sizes, **options}}
    counted = count_traffic({"trainer": {"precision": "bf16-mixed", "strategy": strategy}}, task, _Data(), layout)
    assert counted is not None
    # The loss's own collectives, of one number a token, are not predicted.
    assert predict_traffic(times, layout).tensor == pytest.approx(counted.tensor, rel=0.02)
    block = times.profile_of(layout).blocks[0]
    hidden = 16 * 64  # Elements of a row.
    is_gathered_in_half = mesh.dp_shard > 1
    assert (block.entered, block.left) == (2 * hidden * (2 if is_gathered_in_half else 4), 2 * hidden * 2)


def test_projections_that_are_no_linear_layers_keep_the_gathered_input_and_a_tied_head_sums() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 16}
    task: Any = CausalLM(config={**config, "bos_token_id": 0, "eos_token_id": 0}).on_meta()
    profile = profile_model(task, task.example_batch(_Data()), task.parallel_plan(), dtype=torch.float32)
    times = TimeModel(profile, load_machine("cpu"), SINGLE)
    layout = Layout(MeshSpec(dp_shard=1, tp=2), 2, 1, zero=0, sequence_parallel=True)
    strategy = {"class_path": "MeshStrategy", "init_args": {"dp_shard": 1, "tp": 2, "sequence_parallel": True}}
    counted = count_traffic({"trainer": {"strategy": strategy}}, task, _Data(), layout)
    assert counted is not None
    assert predict_traffic(times, layout).tensor == pytest.approx(counted.tensor, rel=0.05)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_bigcode", "falcon"])
def test_repeated_forwards_end_where_backward_needs_no_more_and_one_key_and_value_are_gathered(kind: str) -> None:
    """GPT-2's last operation is a dropout, whose mask needs the last sum; Falcon has none. Rules are inferred."""
    task: Any = CausalLM(config=tiny(kind)).on_meta()
    profile = profile_run(task, _Data(), SINGLE, "cpu")
    assert profile.sequence_parallel == (kind == "gpt2")
    assert (profile.blocks[0].key_value > 0) == (kind != "gpt2")
    assert profile.blocks[0].repeats_last == (kind != "falcon")
    times = TimeModel(profile, load_machine("cpu"), SINGLE)
    seconds = []
    for mode in ("none", "full"):
        layout = Layout(MeshSpec(dp_shard=1, tp=2), 2, 1, zero=0, sequence_parallel=False, recompute=mode)
        options = {"dp_shard": 1, "tp": 2, "appliers": _recompute(mode) if mode == "full" else []}
        strategy = {"class_path": "MeshStrategy", "init_args": options}
        counted = count_traffic({"trainer": {"strategy": strategy}}, task, _Data(), layout)
        assert counted is not None
        assert predict_traffic(times, layout).tensor == pytest.approx(counted.tensor, rel=0.01)
        seconds.append(times.step(layout).tensor)
    assert seconds[1] > seconds[0]


def test_half_precision_halves_what_is_counted(model: tuple[CausalLM, TimeModel]) -> None:
    layout = Layout(MeshSpec(dp_shard=2), 2, 1)
    trainer: dict[str, Any] = {"strategy": {"class_path": "MeshStrategy", "init_args": {"dp_shard": 2}}}
    full = count_traffic({"trainer": trainer}, model[0], _Data(), layout)
    half = count_traffic({"trainer": trainer | {"precision": "bf16-true"}}, model[0], _Data(), layout)
    assert full is not None
    assert half is not None
    assert 2 * half.gathering == full.gathering


def test_a_strategy_without_a_mesh_is_predicted_and_not_counted(model: tuple[CausalLM, TimeModel]) -> None:
    task, times = model
    layout = Layout(MeshSpec(dp_replicate=2, dp_shard=1), 2, 1, zero=0)
    assert count_traffic({"trainer": {"strategy": "ddp"}}, task, _Data(), layout) is None
    (residual,) = compare_traffic(predict_traffic(times, layout), None)
    assert residual.name == "gradients_bytes"
    assert residual.predicted == 4 * sum(parameter.numel() for parameter in task.model.parameters())
    assert residual.measured is None
    assert residual.error is None
    assert compare_traffic(StepTraffic(), None) == ()


def _train(rank: int, world_size: int, runs: list[tuple[Any, int]]) -> list[Any]:
    """Returns what the first rank has counted in each run."""
    silence_lightning()
    found = []
    for strategy, accumulate in runs:
        report = TrafficReport()
        data = DataLoader([_batch(4)] * 5 * accumulate, batch_size=None)
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=copy.deepcopy(strategy), max_steps=5, callbacks=[report],
            accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(CausalLM(config=SIZES, lr=1e-3, schedule="constant"), data)
        assert not PAIRWISE_LISTENERS
        found.append(report.summary())
    return found


def _batch(rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(rows * 16).reshape(rows, 16) % 128
    return {"input_ids": tokens, "labels": tokens.clone()}


def test_a_run_records_the_communication_of_a_step(model: tuple[CausalLM, TimeModel]) -> None:
    """On gloo pairs of ranks exchange messages for FSDP's collectives, which are counted as these."""
    cases: list[tuple[MeshSpec, int, dict[str, Any]]] = [
        (MeshSpec(dp_shard=2), 1, {}),
        (MeshSpec(dp_shard=2), 2, {}),
        (MeshSpec(dp_shard=1, tp=2), 2, {"sequence_parallel": True}),
        (MeshSpec(dp_shard=1, pp=2), 4, {"micro_batches": 4}),
        (MeshSpec(dp_shard=1, cp=2), 1, {}),
    ]
    runs: list[tuple[Any, int]] = []
    for mesh, count, options in cases:
        runs.append((MeshStrategy(**mesh.sizes, **options), 1 if mesh.pp > 1 else count))
    recorded, other = run_distributed(
        _train, 2, [*runs, ("ddp", 2), (ZeroStrategy(stage=2), 1)], backend=None, timeout=300
    )
    assert set(other) == {None}  # Only the first rank counts.
    task, times = model
    for (mesh, count, options), rows in zip(cases, recorded, strict=False):
        one = 1 if mesh.pp > 1 else 4
        layout = Layout(mesh, one, count, zero=3 if mesh.dp_shard * mesh.cp > 1 else 0)
        layout = replace(layout, sequence_parallel=bool(options.get("sequence_parallel")))
        found = recorded_traffic({"traffic": rows}, layout)
        assert found is not None
        config = {"trainer": {"strategy": {"class_path": "MeshStrategy", "init_args": {**mesh.sizes, **options}}}}
        counted = count_traffic(config, task, _Data(), layout)
        assert counted is not None
        for name, size in counted.parts.items():
            # A run also logs, and clips no gradients.
            assert found.parts[name] == pytest.approx(size, rel=0.02, abs=200), (str(layout), name)
        if mesh.tp > 1:
            beside = found.tensor - predict_traffic(times, layout).tensor
            assert beside == pytest.approx(_loss_bytes(one * count), abs=200)
    parameters = sum(p.numel() for p in task.parameters())
    for rows, kind in ((recorded[-2], "all_reduce"), (recorded[-1], "reduce_scatter")):
        assert {row["axis"] for row in rows} == {"data"}
        sent = sum(row["bytes"] for row in rows if row["kind"] == kind)
        assert sent == pytest.approx(4 * parameters, rel=0.02)
    assert recorded_traffic({}, Layout()) is None
