"""Search: nothing faster is missed, and each rejection's number is true; experts; and published tables."""

import functools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
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
from dlo_plugins.plan.machine import Host, Machine, load_machine
from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_plugins.plan.plan_config import read_layout
from dlo_plugins.plan.plan_search import _RECOMPUTE, PlanSearch
from dlo_plugins.plan.rank_memory import MemoryModel
from dlo_plugins.plan.step_time import TimeModel
from dlo_plugins.plan.work import RankFraction
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.planner_models import gpt, llama
from support.simulated_ranks import simulate_ranks


def _search(gpus: int = 8, memory: float = 3.0e9, batch: int = 32, **fix: str) -> PlanSearch:
    profile = llama(1024, 2816, 8, 8, 8, 1024, 8192)
    machine = replace(load_machine("h100"), reserved=1e6, ranks_per_node=4)
    return PlanSearch(profile, machine, StateFormat(), Request(gpus, memory, batch, fix, top=3))


def _fit_rotor(search: PlanSearch, layout: Layout, offload: bool) -> Layout | float:
    return search.rotor.fit(replace(layout, recompute="rotor", offload=offload), search.request.memory)


def _every_time(search: PlanSearch) -> list[tuple[float, Layout]]:
    """Returns the time of each layout and way to recompute that fits in memory, each simulated."""
    found = []
    for layout in search._layouts():
        for mode, every in _RECOMPUTE:
            tried = replace(layout, recompute=mode, every=every)
            if mode != "none" and search.times.recomputed_stages(layout):
                continue  # The schedule recomputes by itself.
            if search.memory.largest(tried).total <= search.request.memory:
                found.append((search.times.step(tried).total, tried))
        if search.times.recomputed_stages(layout):
            continue
        for offload in (False, True):
            fitted = _fit_rotor(search, layout, offload)
            if isinstance(fitted, Layout):
                plan = search.rotor.plan(fitted)
                assert plan is not None
                assert search.memory.largest(fitted, plan).total <= search.request.memory
                seconds = search.times.step(fitted, plan).total
                found.append((seconds, fitted))
    return found


def test_the_first_plan_is_the_fastest_of_all_layouts() -> None:
    search = _search(gpus=4, batch=8, memory=1.2e9)
    first = search.run().candidates[0]
    least, layout = min(_every_time(search), key=lambda item: item[0])
    # Offloading that saves less than 0.5% is not tried.
    assert least * (1 - 1e-9) <= first.time.total <= least * 1.005, layout
    assert first.memory.total <= 1.2e9
    assert (first.layout.recompute, first.layout.offload) == ("rotor", True)


def test_plans_offload_where_that_is_faster_than_to_recompute() -> None:
    plans = {}
    for offload in ("true", "false"):
        plans[offload] = _search(memory=1.2e9, gpus=4, batch=8, offload=offload).run().candidates[0]
        assert plans[offload].layout.offload == (offload == "true")
        assert plans[offload].memory.total <= 1.2e9
    assert plans["false"].host_bytes == 0
    assert plans["true"].host_bytes > 0
    assert plans["true"].time.total < plans["false"].time.total
    assert plans["false"].time.copies == 0
    free = _search(memory=1.2e9, gpus=4, batch=8).run().candidates[0]
    assert free.time.total == plans["true"].time.total
    assert "and offloading" in str(free.layout)


def test_a_slow_link_offloads_nothing_and_a_machine_without_one_refuses() -> None:
    search = _search(memory=1.2e9, gpus=4, batch=8)
    found = []
    for host in (None, Host(1e3, 1e12), Host(50e9, 1e7)):
        machine = replace(search.machine, host=host)
        found.append(PlanSearch(search.profile, machine, StateFormat(), search.request).run().candidates)
    assert found[0][0].time.total == found[1][0].time.total
    assert found[1][0].host_bytes == 0
    assert all(candidate.host_bytes <= 1e7 for candidate in found[2])
    fixed = replace(search.request, fix={"offload": "true"})
    with pytest.raises(
        DloError, match=r"--fix offload=true must be for accelerators with links.host, got h100 without"
    ):
        PlanSearch(search.profile, replace(search.machine, host=None), StateFormat(), fixed)
    with pytest.raises(DloError, match=r"must be for accelerators with links.host, got h100 of CPUs"):
        PlanSearch(search.profile, replace(search.machine, device="cpu"), StateFormat(), fixed)
    with pytest.raises(DloError, match="--fix offload must be one of false, true, got yes"):
        _search(offload="yes")
    with pytest.raises(DloError, match="must come with Rotor, which offloads, got recompute=full"):
        _search(offload="true", recompute="full")


def test_fifty_rejections_are_true() -> None:
    search = _search(memory=0.7e9)
    result = search.run()
    assert len(result.rejections) + len(result.candidates) == result.count
    limit = max(candidate.time.total for candidate in result.candidates)
    of_kind = [[r for r in result.rejections if r.kind == kind] for kind in ("memory", "time")]
    for rejection in [rejection for found in of_kind for rejection in random.Random(0).sample(found, 25)]:
        assert rejection.value >= rejection.limit
        recomputes = search.times.recomputed_stages(rejection.layout)  # The schedule does so by itself.
        modes = _RECOMPUTE[:1] if recomputes else _RECOMPUTE
        ways = [replace(rejection.layout, recompute=mode, every=every) for mode, every in modes]
        if rejection.kind == "memory":
            assert min(search.memory.largest(way).total for way in ways) >= rejection.value * (1 - 1e-9)
            assert "needs" in str(rejection)
            if recomputes:
                continue
            for offload in (False, True):
                fitted = _fit_rotor(search, rejection.layout, offload)
                assert not isinstance(fitted, Layout)
                assert fitted >= search.request.memory
        else:
            fits = [way for way in ways if search.memory.largest(way).total <= search.request.memory]
            times = [search.times.step(way).total for way in fits]
            for offload in (False, True):
                fitted = _fit_rotor(search, rejection.layout, offload)
                if isinstance(fitted, Layout) and not recomputes:
                    times.append(search._candidate(fitted, exact=True).time.total)
            exact = min(times, default=math.inf)
            assert exact >= rejection.value * (1 - 1e-9)
            assert exact >= min(limit, rejection.limit) * (1 - 1e-9)


def test_fixed_values_are_kept_and_refused_with_the_fix() -> None:
    for candidate in _search(tp="2", pp="2").run().candidates:
        assert (candidate.layout.mesh.tp, candidate.layout.mesh.pp) == (2, 2)
        assert sum(candidate.split) == 8
        assert candidate.layout.global_batch == 32
    with pytest.raises(DloError, match="did you mean 'micro_batch'"):
        _search(micro_batches="2")
    with pytest.raises(DloError, match="--fix tp must be a number"):
        _search(tp="two")
    with pytest.raises(DloError, match="--fix recompute must be one of none, selective, full, rotor, got rotors"):
        _search(recompute="rotors")
    with pytest.raises(DloError, match="tp must divide the 8 heads"):
        _search(gpus=3, batch=3, tp="3").run()
    with pytest.raises(DloError, match=r"axes must divide 8 ranks, a batch of 7"):
        _search(batch=7, dp_shard="8").run()


def test_memory_that_nothing_fits_names_the_nearest() -> None:
    with pytest.raises(DloError, match=r"--memory must hold a plan, got 10.* needs .*; set --memory \d+GB"):
        _search(memory=1.0e7).run()


def test_zero_1_keeps_full_parameters_and_takes_the_time_of_zero_2() -> None:
    first = _search(zero="1").run().candidates[0]
    second = _search(zero="2").run().candidates[0]
    assert (first.layout.zero, first.layout.mesh.dp_shard) == (1, 8)
    assert first.time.total == pytest.approx(second.time.total, rel=0.01)
    plain = Layout(MeshSpec(dp_shard=8), 1, 4, zero=1)
    search = PlanSearch(_search().profile, _search().machine, StateFormat(gathered=4), Request(8, 3e9, 32))
    memory = search.memory.largest(plain)
    assert memory.parameters == search.profile.parameters * 4
    assert memory.optimizer == search.profile.parameters * 8 / 8


def test_varuna_keeps_inputs_and_recomputes_before_each_backward() -> None:
    found = _search(pp="4", schedule="varuna").run().candidates
    assert {candidate.layout.schedule for candidate in found} == {"Varuna"}
    assert {candidate.layout.recompute for candidate in found} == {"none"}
    search = _search()
    plain = Layout(MeshSpec(pp=4, dp_shard=1, dp_replicate=2), 1, 16, "1F1B", 1, (2, 2, 2, 2), 0)
    varuna = replace(plain, schedule="Varuna")
    ranks, block, hidden = search.memory.ranks(varuna), search.profile.blocks[0], search.times.hidden(varuna)
    kept = block.modes["none"].saved.total + block.output.total
    # In flight by the replay of the schedule: 8, 5 and 2 inputs beside one micro-batch's activations of two blocks.
    for rank, inputs in zip(ranks[1:3], (5, 2), strict=True):
        assert rank.activations == pytest.approx(2 * kept + (inputs + 1) * hidden, rel=0.02)
    assert ranks[0].total < search.memory.ranks(plain)[0].total
    time, full = search.times.step(varuna), search.times.step(replace(plain, recompute="full"))
    assert search.times.step(plain).total < time.total < full.total
    forward = search.times._costs(search.times.stages(varuna)[0], varuna)[0]  # Of the slowest rank, with the stem.
    assert time.recompute == pytest.approx(16 * forward)
    assert search.times.step(varuna, exact=False).total <= time.total


def test_delayed_gradients_are_planned_only_if_they_are_asked_for() -> None:
    for layout in _search(gpus=4, batch=8)._layouts():
        assert layout.schedule != "PipeDream2BW"
    found = _search(gpus=4, batch=16, memory=2e10, schedule="PipeDream2BW").run().candidates
    assert {candidate.layout.schedule for candidate in found} == {"PipeDream2BW"}
    assert {candidate.layout.mesh.dp_shard for candidate in found} >= {1, 2}
    assert {candidate.layout.mesh.dp_replicate for candidate in found} == {1}
    assert {candidate.layout.state_sharers for candidate in found if candidate.layout.mesh.cp == 2} == {2}
    search = _search()
    shared, alone = (
        search.memory.ranks(Layout(MeshSpec(pp=2, dp_shard=n), 1, 8, "PipeDream2BW", zero=int(n > 1))) for n in (2, 1)
    )
    # Two full versions in single precision; those in half precision, of which copies gather, have master weights.
    assert [b.parameters / a.parameters for a, b in zip(alone, shared, strict=True)] == [6 / 8, 1]
    assert [2 * rank.optimizer for rank in shared] == [rank.optimizer for rank in alone]
    plain = Layout(MeshSpec(pp=4, dp_shard=1), 1, 8, "1F1B", 1, (2, 2, 2, 2), 0)
    late = replace(plain, schedule="PipeDream2BW")
    time = search.times.step(late)
    assert time.bubble < 0.2 * search.times.step(plain).bubble
    assert search.times.step(late, exact=False).total <= time.total
    for rank, (one, two) in enumerate(zip(search.memory.ranks(plain), search.memory.ranks(late), strict=True)):
        assert two.parameters == pytest.approx(one.parameters * (2 if rank < 3 else 1))
        assert two.gradients - one.gradients == pytest.approx(one.parameters)
        assert two.activations == one.activations


def test_steps_in_backward_have_sharded_data_parallelism_and_one_micro_batch() -> None:
    search = _search(gpus=4, batch=8)
    early = StateFormat(steps_in_backward=True)
    layouts = list(PlanSearch(search.profile, search.machine, early, search.request)._layouts())
    assert layouts
    for layout in layouts:
        assert (layout.mesh.pp, layout.micro_batches) == (1, 1)
        assert layout.mesh.dp_shard * layout.mesh.cp * layout.mesh.tp > 1
    assert {axis for layout in layouts for axis, size in layout.mesh.sizes.items() if size > 1} >= {"dp_shard", "tp"}
    alone = replace(search.request, gpus=1)
    with pytest.raises(DloError, match=r"OptimizerInBackward unless dp_shard, cp or tp is at least 2.* got 1 ranks"):
        PlanSearch(search.profile, search.machine, early, alone).run()


# --- plans of mixtures: `ep` is searched, and its bytes are those that simulated ranks have and send -----------------


SINGLE = StateFormat("float32", 4, 4, 4, 4, 8.0)
LENGTH, WIDTH, LAYERS, TOP_K = 16, 32, 3, 2
H100 = replace(load_machine("h100"), reserved=1e6, ranks_per_node=4)
QWEN3_235B = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536},
    **{"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False},
}


def _task(**changes: Any) -> Any:
    return CausalLM(config=tiny("qwen3_moe", num_hidden_layers=LAYERS, vocab_size=96, **changes)).on_meta()


def _profile(task: Any, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> ModelProfile:
    return profile_model(task, task.example_batch(SimpleNamespace(seq_len=length)), task.parallel_plan(), dtype=dtype)


@functools.cache
def _small() -> ModelProfile:
    """Returns the profile of a mixture whose experts are most of its parameters."""
    return _profile(_task(hidden_size=256, moe_intermediate_size=512), 256)


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


def _search_experts(**fix: str) -> PlanSearch:
    return PlanSearch(_small(), H100, StateFormat(), Request(4, 0.9e9, 8, fix, top=3))


def test_nothing_faster_is_missed_and_bounds_hold() -> None:
    search = _search_experts()
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
    assert {candidate.layout.mesh.ep for candidate in _search_experts(ep="2").run().candidates} == {2}
    with pytest.raises(DloError, match=r"--fix ep must divide the 4 experts of Qwen3.*, got 3; use --fix ep=2"):
        _search_experts(ep="3").run()
    with pytest.raises(DloError, match=r"--fix ep must be a number, got 'two'"):
        _search_experts(ep="two")
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
    profile, machine = _profile(CausalLM(config=config).on_meta(), 4096, torch.bfloat16), load_machine("h100")
    result = PlanSearch(profile, machine, StateFormat(autocasts=True), Request(gpus, machine.memory, batch)).run()
    assert result.candidates[0].layout.mesh.ep > 1
    assert result.candidates[0].memory.total <= machine.memory
    assert result.count > 50_000


# --- predicted times and memory of published tables -----------------------------------------------------------------


# The models are profiled as a user's, and nothing is fitted to a row. Narayanan et al., SC 2021, arXiv 2104.04473,
# table 1 (with IDRIS' TFLOPS); Korthikanti et al. 2022, arXiv 2205.05198, table 5 and figure 1; Liang et al. 2024,
# arXiv 2410.06511 (torchtitan), tables 2 to 4.
GIB = 2**30
#: Megatron's kernels are fused by hand, and gradients are reduced after backward.
MEGATRON_2021 = StateFormat("float16", 2, 2, 2, 2, 16.0, fused=True, overlaps=False)
MEGATRON_2022 = replace(MEGATRON_2021, gradient=4, state=12.0, accumulates_in_products=True, frees_sent=True)
TORCHTITAN = StateFormat()

#: TP, PP, stages of a rank, micro-batch, global batch, layers, width, heads, GPUs, seconds.
SC21 = {
    "1.7B": (1, 1, 1, 16, 512, 24, 2304, 24, 32, 3.53),
    "3.6B": (2, 1, 1, 16, 512, 30, 3072, 32, 64, 3.70),
    "7.5B": (4, 1, 1, 16, 512, 36, 4096, 32, 128, 3.70),
    "18B": (8, 1, 1, 8, 1024, 40, 6144, 48, 256, 9.40),
    "39B": (8, 2, 1, 4, 1536, 48, 8192, 64, 512, 14.45),
    "76B": (8, 4, 3, 2, 1792, 60, 10240, 80, 1024, 16.06),
    "145B": (8, 8, 2, 2, 2304, 80, 12288, 96, 1536, 24.82),
    "310B": (8, 16, 2, 1, 2160, 96, 16384, 128, 1920, 37.61),
    "530B": (8, 35, 3, 1, 2520, 105, 20480, 128, 2520, 54.08),
    "1T": (8, 64, 1, 1, 3072, 128, 25600, 160, 3072, 102.63),
}
#: PP, stages of a rank, micro-batch, global batch, layers, width, heads, seconds with full recomputation, and with
#: selective and sequence parallelism; GiB of weights and optimizer, of activations without either, and with both.
KORTHIKANTI = {
    "22B": (1, 1, 4, 4, 48, 6144, 64, 1.42, 1.10, 45.6, 59.3, 9.6),
    "175B": (8, 3, 1, 64, 96, 12288, 96, 18.13, 13.75, 45.6, 66.8, 12.4),
    "530B": (35, 3, 1, 280, 105, 20480, 128, 49.05, 37.83, 31.6, 114.0, 23.1),
    "1T": (64, 1, 1, 512, 128, 25600, 160, 94.42, 71.49, 33.0, 131.3, 26.6),
}


def _schedule(pp: int, chunks: int) -> str:
    return "Interleaved1F1B" if chunks > 1 else "1F1B"


def _sc21_error(name: str, machine: Machine) -> float:
    tp, pp, chunks, rows, batch, layers, width, heads, gpus, measured = SC21[name]
    data = gpus // tp // pp
    mesh = MeshSpec(pp=pp, dp_replicate=data, dp_shard=1, tp=tp)
    layout = Layout(mesh, rows, batch // data // rows, _schedule(pp, chunks), chunks, None, 0, False, False, "full")
    return TimeModel(gpt(width, layers, heads), machine, MEGATRON_2021).step(layout).total / measured - 1


def _korthikanti_layout(name: str, sequence_parallel: bool, recompute: str) -> Layout:
    pp, chunks, rows, batch, *_ = KORTHIKANTI[name]
    mesh = MeshSpec(pp=pp, dp_shard=1, tp=8)
    return Layout(
        mesh, rows, batch // rows, _schedule(pp, chunks), chunks, None, 0, False, sequence_parallel, recompute
    )


def _korthikanti_times(name: str) -> list[float]:
    layers, width, heads, full, selective = KORTHIKANTI[name][4:9]
    model = TimeModel(gpt(int(width), int(layers), int(heads)), load_machine("a100"), MEGATRON_2022)
    layouts = (_korthikanti_layout(name, False, "full"), _korthikanti_layout(name, True, "attention"))
    return [model.step(layout).total / seconds - 1 for layout, seconds in zip(layouts, (full, selective), strict=True)]


def _korthikanti_memory(name: str) -> list[float]:
    layers, width, heads, _, _, weights, without, with_both = KORTHIKANTI[name][4:]
    memory = MemoryModel(TimeModel(gpt(int(width), int(layers), int(heads)), load_machine("a100"), MEGATRON_2022))
    plain = memory.ranks(_korthikanti_layout(name, False, "none"))
    both = memory.ranks(_korthikanti_layout(name, True, "attention"))
    found = [plain[len(plain) // 2].state, max(r.activations for r in plain), max(r.activations for r in both)]
    return [value / GIB / gib - 1 for value, gib in zip(found, (weights, without, with_both), strict=True)]


@pytest.mark.slow
def test_megatron_from_data_sheets() -> None:
    machine = load_machine("a100")
    errors = {name: _sc21_error(name, machine) for name in SC21}
    assert mean(map(abs, errors.values())) < 0.06
    assert max(map(abs, errors.values())) < 0.1


def test_a_row_of_korthikanti_from_data_sheets() -> None:
    assert max(map(abs, _korthikanti_times("22B"))) < 0.07
    state, without, with_both = _korthikanti_memory("22B")
    assert abs(state) < 0.02
    assert max(abs(without), abs(with_both)) < 0.05


@pytest.mark.slow
def test_all_of_korthikanti_from_data_sheets() -> None:
    times = [abs(error) for name in KORTHIKANTI for error in _korthikanti_times(name)]
    assert mean(times) < 0.04
    assert max(times) < 0.07
    memory = [_korthikanti_memory(name) for name in KORTHIKANTI]
    assert max(abs(row[0]) for row in memory) < 0.02
    activations = [abs(error) for row in memory for error in row[1:]]
    assert mean(activations) < 0.015
    assert max(activations) < 0.05


#: GPUs, whether compiled, tokens a second and GPU, GiB: Llama 3.1 8B, FSDP, batch 2 of 8,192 tokens.
TITAN_8B = ((8, False, 5762, 82.4), (8, True, 6667, 77.0), (128, False, 5605, 67.0), (128, True, 6514, 62.0))


def test_torchtitan_calibrated_on_one_row() -> None:
    """Their H100 have 96 GB of slower memory and 500 W, without a data sheet: one row gives the efficiency."""
    profile = llama(4096, 14336, 32, 32, 8)
    profile = replace(profile, max_logits=None)
    machine = replace(load_machine("h100"), bandwidth=2.4e12)

    def predict(machine: Machine, gpus: int, compiled: bool, recompute: str = "alternate") -> tuple[float, float]:
        times = TimeModel(profile, machine, replace(TORCHTITAN, fused=compiled, compiled=compiled))
        layout = Layout(MeshSpec(dp_shard=gpus), 2, 1, recompute=recompute)
        memory = MemoryModel(times).largest(layout)
        return 2 * 8192 / times.step(layout).total, (memory.total - memory.overhead) / GIB

    wanted = TITAN_8B[0][2]
    low, high = 0.3, 0.8
    for _ in range(30):
        middle = (low + high) / 2
        is_fast = predict(replace(machine, efficiency=middle), 8, False)[0] > wanted
        low, high = (low, middle) if is_fast else (middle, high)
    machine = replace(machine, efficiency=high)
    found = [predict(machine, gpus, compiled) for gpus, compiled, *_ in TITAN_8B]
    speeds = [abs(tokens / row[2] - 1) for (tokens, _), row in zip(found, TITAN_8B, strict=True)]
    sizes = [abs(gib / row[3] - 1) for (_, gib), row in zip(found, TITAN_8B, strict=True)]
    assert max(speeds) < 0.10
    assert mean(sizes) < 0.03
    assert max(sizes) < 0.05
    modes = [predict(machine, 8, False, mode)[0] for mode in ("none", "selective", "full")]
    assert modes == sorted(modes, reverse=True)
