"""``dlo plan``: plans of a config are ranked, written, and pass ``dlo mesh``; bad input has a fix; machine files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_plugins.plan import measurement
from dlo_plugins.plan.machine import _FOLDER, load_machine, machine_names, parse_machine
from dlo_plugins.plan.measurement import RankMeasurement, machine_content
from dlo_plugins.plan.plan_config import read_device

Printed = pytest.CaptureFixture[str]
CONFIG = """
trainer: {accelerator: cpu, devices: 2, max_steps: 2, strategy: {class_path: MeshStrategy, init_args: {tp: 2}}}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 64, vocab_size: 512}
    recompute: true
data: {class_path: TextData, init_args: {seq_len: 64, batch_size: 16}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_plans_are_ranked_written_and_pass_dlo_mesh(config: str, tmp_path: Path, capsys: Printed) -> None:
    out = tmp_path / "plans"
    words = ["plan", "--config", config, "--gpus", "4", "--machine", "cpu", "--json", "--top", "2", "--out", str(out)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    times = [plan["step_seconds"] for plan in found["plans"]]
    assert len(times) == 2
    assert times == sorted(times)
    assert found["global_batch"] == 16
    for plan in found["plans"]:
        assert sum(plan["seconds"].values()) == pytest.approx(plan["step_seconds"])
        assert plan["verified"]
        parts = [size for name, size in plan["memory_bytes"].items() if name != "total"]
        assert sum(parts) == pytest.approx(plan["memory_bytes"]["total"])
        assert plan["reason"]
    assert all(row["value"] >= row["limit"] for row in found["rejected"])
    for number in (1, 2):
        file = out / f"plan_{number}.yaml"
        content = yaml.safe_load(file.read_text())
        trainer, rows = content["trainer"], content["data"]["init_args"]["batch_size"]
        assert rows * trainer["accumulate_grad_batches"] == 16
        assert (trainer["devices"], trainer["num_nodes"]) == (4, 1)
        assert content["model"]["init_args"]["recompute"] is False
    assert main(["mesh", "--config", str(file)]) == 0


@pytest.mark.slow
def test_simulated_ranks_have_the_runs_precision(config: str, tmp_path: Path, capsys: Printed) -> None:
    """With float16 as if it were bf16, each plan that gathers float16 was refused, on a GPU without bf16 too."""
    words = ["plan", "--config", config, "--gpus", "4", "--machine", "v100", "--fix", "pp=1", "--fix", "tp=1", "--json"]
    precision = ["--trainer.precision", "16"]  # It is `16-mixed`.
    assert main([*words, *precision, "--top", "1", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(plan["verified"] for plan in found["plans"])
    assert not [row["text"] for row in found["rejected"] if row["kind"] == "refused"]
    assert main(["mesh", "--config", str(tmp_path / "plan_1.yaml"), *precision]) == 0


def test_bad_options_are_refused_before_torch_is_imported(config: str) -> None:
    code = f"""
import sys
from dlo_framework.cli.main import main
assert main(["plan", "--config", {config!r}, "--machine", "h1000"]) == 2
sys.exit("torch" if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "h1000" in done.stderr


@pytest.mark.slow
def test_rotor_zero_1_and_dtypes_of_gathers_are_written(config: str, tmp_path: Path, capsys: Printed) -> None:
    def plan(*words: str) -> dict[str, Any]:
        out = ["--gpus", "4", "--machine", "cpu", "--top", "1", "--out", str(tmp_path / "plans")]
        assert main(["plan", "--config", config, *out, *words]) == 0
        trainer: dict[str, Any] = yaml.safe_load((tmp_path / "plans" / "plan_1.yaml").read_text())["trainer"]
        return trainer

    mixed = ["--trainer.precision", "bf16-mixed", "--trainer.callbacks", "[{class_path: OneCycle}]"]
    trainer = plan("--fix", "recompute=rotor", "--fix", "dp_shard=4", "--fix", "gather=float32", *mixed)
    names = [entry["class_path"].rpartition(".")[2] for entry in trainer["callbacks"]]
    assert names == ["OneCycle", "Rotor"]
    assert trainer["callbacks"][1]["init_args"]["budget"].endswith("kB")
    sharding = trainer["strategy"]["init_args"]["appliers"][0]
    assert sharding["class_path"] == "FullyShard"
    assert (sharding["init_args"]["param_dtype"], sharding["init_args"]["reduce_dtype"]) == ("float32", "float32")
    assert main(["mesh", "--config", str(tmp_path / "plans" / "plan_1.yaml")]) == 0
    capsys.readouterr()
    strategy = plan("--fix", "zero=1", "--fix", "reduce=bfloat16", *mixed)["strategy"]
    assert strategy["init_args"] == {"stage": 1, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


@pytest.mark.slow
def test_parts_of_a_run_are_in_the_figures_or_named(config: str, tmp_path: Path, capsys: Printed) -> None:
    def plan(*words: str) -> dict[str, Any]:
        fixed = ["--gpus", "2", "--machine", "h100", "--top", "1", "--json", "--fix", "dp_shard=2", "--fix", "zero=3"]
        fixed += ["--trainer.precision", "bf16-mixed"]
        assert main(["plan", "--config", config, *fixed, "--out", str(tmp_path / "plans"), *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def memory(found: dict[str, Any]) -> dict[str, float]:
        held: dict[str, float] = found["plans"][0]["memory_bytes"]
        return held

    callbacks = ["--trainer.callbacks+=WeightEMA", "--trainer.callbacks+=OptimizerInBackward"]
    before, found = plan(), plan("--model.init_args.optimizer", "adamw8bit", *callbacks)
    assert before["not_in_figures"] == []
    assert [sentence.partition(":")[0] for sentence in found["not_in_figures"]] == ["WeightEMA", "AdamW8bit"]
    assert memory(found)["optimizer"] < 0.6 * memory(before)["optimizer"]
    assert memory(found)["gradients"] < memory(before)["gradients"]
    rounded = plan("--trainer.strategy.init_args.bf16_weights", "stochastic")
    assert memory(rounded)["parameters"] == 0.5 * memory(before)["parameters"]
    written = yaml.safe_load((tmp_path / "plans" / "plan_1.yaml").read_text())["trainer"]["strategy"]
    assert written["init_args"]["bf16_weights"] == "stochastic"


def test_a_plain_module_gets_data_parallel_plans_alone(tmp_path: Path, capsys: Printed) -> None:
    config = {
        "plugins": ["support.plain_nets"],
        "trainer": {"accelerator": "cpu", "devices": 2},
        "model": {"class_path": "support.plain_nets.Plain"},
        "data": {"class_path": "DigitsData", "init_args": {"image_size": 16, "batch_size": 16}},
    }
    path, out = tmp_path / "plain.yaml", tmp_path / "plans"
    path.write_text(yaml.safe_dump(config))
    words = ["plan", "--config", str(path), "--gpus", "4", "--machine", "cpu", "--json"]
    assert main([*words, "--top", "2", "--out", str(out)]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    for plan in plans:
        sizes = plan["layout"]["mesh"]
        assert (sizes["pp"], sizes["cp"], sizes["tp"], sizes["dp_replicate"] * sizes["dp_shard"]) == (1, 1, 1, 4)
    assert main(["mesh", "--config", str(out / "plan_1.yaml")]) == 0
    capsys.readouterr()
    assert main([*words, "--fix", "pp=2"]) == 2
    assert "--fix pp must be at most 1 for Plain, got 2; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4", "--machine", "h10"], "did you mean 'h100'"),
        (["--gpus", "4", "--machine", "absent.yaml"], "must be a file that exists"),
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--gpus", "4", "--nodes", "3"], "--gpus must be divisible by --nodes, got 4 and 3; set --gpus 3"),
        (["--gpus", "4", "--memory", "lots"], "--memory must be a size of at least one byte, got lots"),
        (["--gpus", "4", "--fix", "tp"], "--fix must be KEY=VALUE, got tp"),
        (["--gpus", "4", "--measure", "60s"], "--measure must come without a value, got 60s"),
        (["--measure", "--machine", "cpu"], "--measure must come without --machine, got --machine cpu"),
        (["--gpus", "3", "--machine", "cpu", "--fix", "tp=3"], "tp must divide the 4 heads"),
        (["--gpus", "4", "--machine", "cpu", "--fix", "gather=bfloat16"], "--fix gather must be float32"),
        (["--gpus", "4", "--fix", "recompute=rotor", "--trainer.callbacks", "Compile"], "set its scope: blocks"),
    ],
)
def test_bad_input_is_one_line_with_the_fix(words: list[str], message: str, config: str, capsys: Printed) -> None:
    assert main(["plan", "--config", config, *words]) == 2
    assert message in capsys.readouterr().err


SYNTHETIC = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

class SyntheticText(LightningDataModule):
    def __init__(self, batch_size: int = 16, seq_len: int = 32):
        super().__init__()
        self.batch_size, self.seq_len = batch_size, seq_len
    def train_dataloader(self):
        ids = torch.randint(512, (128, self.seq_len), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], self.batch_size)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_best_five_plans_train_as_one_process(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "five_plans_text.py").write_text(SYNTHETIC)
    content = yaml.safe_load(CONFIG)
    content["plugins"] = [str(tmp_path / "five_plans_text.py")]
    content["data"] = {"class_path": "five_plans_text.SyntheticText", "init_args": {"batch_size": 16}}
    content["model"]["init_args"]["recompute"] = False
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    words = ["plan", "--config", str(tmp_path / "mine.yaml"), "--gpus", "4", "--machine", "cpu", "--top", "5"]
    assert main([*words, "--json", "--out", str(tmp_path / "plans")]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert len({json.dumps(plan["layout"]) for plan in found}) == 5
    for number in range(1, 6):
        file = str(tmp_path / "plans" / f"plan_{number}.yaml")
        assert main(["mesh", "--config", file]) == 0
        assert main(["parity", "--config", file, "--steps", "3"]) == 0, capsys.readouterr().out


# --- machine files: those of dlo have sources, what is missing is named, and a machine is measured ------------------


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
def test_dlo_plan_measures_this_machine_and_plans_for_it(config: str, tmp_path: Path, capsys: Printed) -> None:
    words = ["plan", "--config", config, "--gpus", "2", "--measure", "--json", "--top", "2"]
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
