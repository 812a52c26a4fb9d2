"""Measured machines: constants have sources, and plans run with the file."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from dlo_framework.cli.main import main
from dlo_plugins.plan import measurement
from dlo_plugins.plan.machine import parse_machine
from dlo_plugins.plan.measurement import RankMeasurement, machine_content
from dlo_plugins.plan.plan_config import read_device

CONFIG = """
trainer: {accelerator: cpu, devices: 2, max_steps: 2}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 64, vocab_size: 512}
data: {class_path: TextData, init_args: {seq_len: 64, batch_size: 16}}
"""


def test_a_link_has_the_latency_of_a_small_sum_and_the_bandwidth_of_a_large_one() -> None:
    ranks = 4
    sums = {size: 2 * (ranks - 1) * (1e-4 + size / ranks / 1e9) for size in measurement._SUMS}
    machine = parse_machine(
        machine_content([RankMeasurement(1e11, 2e10, 2e-6, sums, 300_000_000)] * ranks, "bfloat16", "cpu", 1), "a"
    )
    assert (machine.rate("bfloat16"), machine.bandwidth, machine.launch) == (1e11, 2e10, 2e-6)
    assert machine.node.rate(1) == pytest.approx(1e9, rel=0.01)
    assert machine.node.latency == pytest.approx(1e-4, rel=0.02)
    for size, seconds in sums.items():
        assert machine.collective_seconds(size, ranks, 1, reduces_and_gathers=True) == pytest.approx(seconds, rel=0.02)
    assert all("measured" in source for source in machine.sources.values())
    alone = parse_machine(
        machine_content([RankMeasurement(1e11, 2e10, 2e-6, {}, 300_000_000)], "float32", "cpu", 1), "b"
    )
    assert alone.sources["links.node.latency"].startswith("not measured")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dlo_plan_measures_this_machine_and_plans_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    words = ["plan", "--config", str(tmp_path / "mine.yaml"), "--gpus", "2", "--measure", "--json", "--top", "2"]
    assert main([*words, "--out", str(tmp_path / "plans")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan["step_seconds"] > 0 for plan in found["plans"]] == [True, True]
    machine = parse_machine(yaml.safe_load((tmp_path / "plans" / "machine.yaml").read_text()), "machine.yaml")
    assert machine.device == "cpu"
    assert 1e7 < machine.bandwidth < 1e12
    assert machine.node.rate(1) < 1e12


def test_a_gpu_reserves_what_is_outside_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    assert measurement.memory_outside_allocator() == 10


def test_a_config_for_the_cpu_is_planned_for_it_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert read_device({"trainer": {"accelerator": "cpu"}}) == "cpu"
    assert read_device({"trainer": {"accelerator": "auto"}}) == read_device({}) == "cuda"
