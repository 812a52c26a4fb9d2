"""Plans of mixtures: `ep` is searched, and its bytes are those that simulated ranks have and send."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.parallel.mesh.mesh_description import describe_mesh
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import Layout, Request, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_plugins.plan.plan_config import read_layout
from dlo_plugins.plan.plan_search import _RECOMPUTE, PlanSearch
from dlo_plugins.plan.rank_memory import MemoryModel
from dlo_plugins.plan.step_time import TimeModel
from dlo_plugins.plan.work import RankFraction
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.planner_models import llama
from support.simulated_ranks import simulate_ranks

SINGLE = StateFormat("float32", 4, 4, 4, 4, 8.0)
LENGTH, WIDTH, LAYERS, TOP_K = 16, 32, 3, 2
H100 = replace(load_machine("h100"), reserved=1e6, ranks_per_node=4)
QWEN3_235B = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536},
    **{"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False},
}


class _Data:
    def __init__(self, seq_len: int = LENGTH) -> None:
        self.seq_len = seq_len


def _task(**changes: Any) -> Any:
    return CausalLM(config=tiny("qwen3_moe", num_hidden_layers=LAYERS, vocab_size=96, **changes)).on_meta()


def _profile(task: Any, length: int = LENGTH) -> ModelProfile:
    return profile_model(task, task.example_batch(_Data(length)), task.parallel_plan(), dtype=torch.float32)


@functools.cache
def _small() -> ModelProfile:
    """Returns the profile of a mixture whose experts are most of its parameters."""
    return _profile(
        _task(hidden_size=256, moe_intermediate_size=512), 256
    )  # fmt: skip


def test_a_profile_has_the_experts_and_what_they_exchange() -> None:
    task = _task()
    profile, block = _profile(task), _profile(task).blocks[0]
    assert profile.ep == (1, 2, 4)
    stacked = sum(p.numel() for name, p in task.model.named_parameters() if ".experts." in name)
    assert LAYERS * block.experts.total == LAYERS * block.trained_experts.total == stacked
    # To the experts and back, 4 bytes an element.
    assert block.exchanged == 2 * TOP_K * LENGTH * WIDTH * 4
    grouped = [product for product, _ in block.forward.products if product.is_grouped]
    # Only the chosen experts of a token compute it; tp divides their hidden features.
    assert sum(product.m * product.batch for product in grouped) == 2 * TOP_K * LENGTH
    assert [product.divided for product in grouped] == ["n", "k"]


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(dp_shard=4, ep=2), MeshSpec(dp_replicate=2, dp_shard=4, ep=4), MeshSpec(dp_shard=2, cp=2, ep=4),
        MeshSpec(pp=3, dp_shard=4, ep=2), MeshSpec(dp_shard=4, tp=2, ep=2),
    ],
    ids=str,
)  # fmt: skip
def test_predicted_state_is_what_dlo_mesh_counts(spec: MeshSpec) -> None:
    """To the byte: every dim of this model is a multiple of the ranks."""
    task = _task()
    layout = Layout(spec, 1, 3, zero=3, split=(1, 1, 1) if spec.pp > 1 else None)
    predicted = MemoryModel(TimeModel(_profile(task), H100, SINGLE)).ranks(layout)
    split = {"split": (1, 1, 1), "schedule": "1F1B"} if spec.pp > 1 else {}
    counted = describe_mesh(task, task.parallel_plan(), spec, **split)
    firsts = [next(rank for rank in counted.ranks if rank.place.pp == stage) for stage in range(spec.pp)]
    for rank, memory in zip(firsts, predicted, strict=True):
        assert (memory.parameters, memory.optimizer) == (rank.state_bytes.parameters, rank.state_bytes.optimizer)


def test_predicted_traffic_is_what_simulated_ranks_send() -> None:
    task, spec, rows = _task(), MeshSpec(dp_shard=4, cp=2, ep=4), 2
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    (found,) = simulate_ranks(task, MeshStrategy(), spec, [0], {"input_ids": tokens, "labels": tokens})
    sent = sum(row.elements for row in found.traffic if row.kind == "all_to_all" and row.axis == "ep")
    # Both count a rank's own share.
    assert 4 * sent == sum(2 * block.exchanged for block in _profile(task).blocks) * rows / spec.cp


def test_the_exchange_is_part_of_a_step_and_experts_have_more_rows() -> None:
    times = TimeModel(_small(), H100, StateFormat())
    alone, divided = (times.step(Layout(MeshSpec(dp_shard=4, ep=ep), 4, 2, zero=3)) for ep in (1, 4))
    block = _small().blocks[0]
    once = H100.exchange_seconds(4 * block.exchanged / 2, 4, 1)
    assert alone.experts == 0
    assert divided.experts == pytest.approx(2 * LAYERS * 4 * once)
    again = times.step(Layout(MeshSpec(dp_shard=4, ep=4), 4, 2, zero=3, recompute="full"))
    assert again.experts == pytest.approx(2 * LAYERS * 6 * once)
    own, (product, _) = RankFraction(ep=4), next(item for item in block.forward.products if item[0].is_grouped)
    assert (product.on(own).m, product.on(own).batch) == (4 * product.m, product.batch / 4)
    right = product.gradients()[1]  # Of the weights: the sum is over the tokens.
    assert (right.on(own).k, right.on(own).batch) == (4 * right.k, right.batch / 4)
    assert divided.compute < alone.compute
    assert divided.gathering + divided.gradients < alone.gathering + alone.gradients


def _search(**fix: str) -> PlanSearch:
    return PlanSearch(_small(), H100, StateFormat(), Request(4, 0.9e9, 8, fix, top=3))


def test_nothing_faster_is_missed_and_bounds_hold() -> None:
    search = _search()
    result = search.run()
    found = []
    for layout in search._layouts():
        for mode, every in _RECOMPUTE:
            way = replace(layout, recompute=mode, every=every)
            if search.memory.largest(way).total <= search.request.memory:
                seconds = search.times.step(way).total
                assert search.least_time(layout) <= seconds * (1 + 1e-9)
                found.append(seconds)
    assert result.candidates[0].time.total <= min(found) * 1.005
    assert {layout.mesh.ep for layout in search._layouts()} == {1, 2, 4}
    assert any(r.layout.mesh.ep > 1 for r in result.rejections)
    assert all(r.value >= r.limit for r in result.rejections)


def test_ep_is_chosen_where_gathering_is_dear() -> None:
    """One row a rank on a network that is 100 times slower: its tokens are fewer than the experts."""
    slow = replace(H100, ranks_per_node=2, network=replace(H100.network, bandwidth={2: 5e8}))  # type: ignore[type-var]
    request = Request(4, 4e9, 4, {"pp": "1", "tp": "1", "cp": "1", "dp_shard": "4"}, top=3)
    first = PlanSearch(_small(), slow, StateFormat(), request).run().candidates[0]
    assert first.layout.mesh.ep > 1
    assert "ep" in str(first.layout)


def test_fixed_values_of_ep_are_kept_and_refused_with_the_fix() -> None:
    assert {candidate.layout.mesh.ep for candidate in _search(ep="2").run().candidates} == {2}
    with pytest.raises(DloError, match=r"--fix ep must divide the 4 experts of Qwen3.*, got 3; use --fix ep=2"):
        _search(ep="3").run()
    with pytest.raises(DloError, match=r"--fix ep must be a number, got 'two'"):
        _search(ep="two")
    dense = llama(1024, 2816, 8, 8, 8, 1024, 8192)
    with pytest.raises(DloError, match=r"--fix ep must come with a mixture of experts, got 2 for Llama"):
        PlanSearch(dense, H100, StateFormat(), Request(4, 4e9, 8, {"ep": "2"})).run()


@pytest.mark.slow
def test_a_plan_with_ep_is_written_and_passes_dlo_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "trainer": {"accelerator": "cpu", "devices": 1},
        "model": {"class_path": "CausalLM", "init_args": {"config": tiny("qwen3_moe", vocab_size=512)}},
        "data": {"class_path": "TextData", "init_args": {"seq_len": LENGTH, "batch_size": 16}},
    }
    path, out = tmp_path / "mixture.yaml", tmp_path / "plans"
    path.write_text(yaml.safe_dump(config))
    words = ["plan", "--config", str(path), "--gpus", "4", "--machine", "cpu", "--json", "--top", "1"]
    assert main([*words, "--fix", "ep=2", "--fix", "tp=1", "--fix", "pp=1", "--out", str(out)]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["verified"]
    assert plan["layout"]["mesh"]["ep"] == 2
    assert plan["seconds"]["experts"] > 0
    written = yaml.safe_load((out / "plan_1.yaml").read_text())
    options = written["trainer"]["strategy"]["init_args"]
    assert options["ep"] == 2
    assert main(["mesh", "--config", str(out / "plan_1.yaml")]) == 0
    assert "each rank has 2" in capsys.readouterr().out
    layout = read_layout(written, 4)
    assert layout.mesh == MeshSpec(**plan["layout"]["mesh"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "gpus", "batch"), [(QWEN3_235B, 256, 256), ({"model_type": "deepseek_v3"}, 2048, 8192)]
)
def test_large_mixtures_are_planned(config: dict[str, Any], gpus: int, batch: int) -> None:
    task: Any = CausalLM(config=config).on_meta()
    profile = profile_model(task, task.example_batch(_Data(4096)), task.parallel_plan(), dtype=torch.bfloat16)
    machine = load_machine("h100")
    result = PlanSearch(profile, machine, StateFormat(autocasts=True), Request(gpus, machine.memory, batch)).run()
    assert result.candidates[0].layout.mesh.ep > 1
    assert result.candidates[0].memory.total <= machine.memory
    assert result.count > 50_000
