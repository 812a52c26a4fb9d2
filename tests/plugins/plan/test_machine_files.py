"""Machine files: those of dlo have sources, what is missing is named, and a machine is measured and planned for."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_plugins.plan import measurement
from dlo_plugins.plan.machine import _FOLDER, load_machine, machine_names, parse_machine
from dlo_plugins.plan.measurement import RankMeasurement, machine_content
from dlo_plugins.plan.plan_config import read_device


def test_each_shipped_machine_has_a_source_for_every_constant() -> None:
    assert {"a100", "cpu", "h100", "h200", "jean-zay-h100", "v100"} <= set(machine_names())
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert len(machine.sources) >= 13
        assert all(len(source) > 5 for source in machine.sources.values()), name


def test_what_a_file_lacks_or_has_too_much_is_named() -> None:
    text = _FOLDER.joinpath("h100.yaml").read_text()
    for key, value, message in (
        (("kinds",), {}, r"must have keys of name, .* got kinds; remove it: since 0.2"),
        (("links", "all_reduce"), {}, r"must have keys of name, .* got links.all_reduce; remove it: since 0.2"),
        (("links", "node"), None, "must have links.node"),
        (("attention", "forward"), None, "must have attention.forward"),
        (("accelerator",), None, "must have peak"),
        (("links", "network", "latency"), None, "must have links.network.latency"),
        (("bandwidth",), {"value": "fast", "source": "guess"}, "bandwidth must be a positive number, got 'fast'"),
    ):
        content = yaml.safe_load(text)
        at = content
        for word in key[:-1]:
            at = at[word]
        at[key[-1]] = value
        if value is None:
            del at[key[-1]]
        with pytest.raises(DloError, match=message):
            parse_machine(content, "mine.yaml")


def test_a_machine_that_extends_another_has_its_constants_but_those_it_sets(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: jean-zay-a100\nlinks: {network: {bandwidth: {2: 5.0e+9}}}\npeak: {bfloat16: 3e+14}"
    )
    mine, base = load_machine(str(tmp_path / "mine.yaml")), load_machine("a100")
    assert (mine.network.rate(2), mine.network.latency) == (5e9, base.network.latency)
    assert (mine.peak, mine.host.memory, mine.node) == ({"bfloat16": 3e14}, 51e9, base.node)


# --- measured machines: constants have sources, and plans run with the file ------------------------------------------


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
