"""`dlo plan --check`: the prediction of a finished run beside its measurement; runs that cannot be compared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.planner.run_layout import read_layout, rotor_budget

CONFIG = {
    "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 8, "enable_progress_bar": False},
    "model": {
        "class_path": "CausalLM",
        "init_args": {
            "config": {
                **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
                **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
            }
        },
    },
    "data": {"class_path": "SyntheticText", "init_args": {"batch_size": 4}},
}
PLUGIN = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

class SyntheticText(LightningDataModule):
    def __init__(self, batch_size: int = 4, seq_len: int = 32):
        super().__init__()
        self.batch_size, self.seq_len = batch_size, seq_len
    def train_dataloader(self):
        ids = torch.randint(512, (64, self.seq_len), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], self.batch_size)
"""


def _finished_run(folder: Path, callbacks: Sequence[object] = ()) -> Path:
    (folder / "synthetic_text.py").write_text(PLUGIN)
    content = CONFIG | {"plugins": [str(folder / "synthetic_text.py")], "run": {"dir": str(folder / "runs")}}
    content["trainer"] = {**content["trainer"], "callbacks": list(callbacks)}
    content["data"] = {"class_path": "synthetic_text.SyntheticText", "init_args": {"batch_size": 4}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    assert main(["fit", "--config", str(folder / "mine.yaml")]) == 0
    (summary,) = (folder / "runs").rglob("summary.json")
    return summary.parent


def test_a_run_is_compared_and_residuals_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _finished_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["step_seconds"] > 0
    capsys.readouterr()
    assert main(["plan", "--check", str(run), "--machine", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "one rank, micro-batch 4 x 1, on cpu" in text
    found = json.loads((run / "plan_check.json").read_text())["residuals"]
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert abs(found[name]["error"]) < 0.001
    assert found["step_seconds"]["measured"] == summary["step_seconds"]
    assert found["step_seconds"]["error"] == pytest.approx(
        found["step_seconds"]["predicted"] / summary["step_seconds"] - 1
    )
    assert main(["plan", "--check", str(run), "--machine", "h100"]) == 2
    assert "--machine must be the one that the run was on, a cpu machine, got h100" in capsys.readouterr().err
    for words in (["--measure"], ["--fix", "tp=2"], ["--gpus", "16"]):
        assert main(["plan", "--check", str(run), *words]) == 2
        assert f"--check must come without {words[0]}, since" in capsys.readouterr().err
    (run / "summary.json").write_text(json.dumps(summary | {"status": "interrupted: KeyboardInterrupt"}))
    assert main(["plan", "--check", str(run), "--machine", "cpu"]) == 2
    assert "must be a run that has finished" in capsys.readouterr().err


def _rotor_of(config: dict[str, Any]) -> dict[str, Any]:
    callbacks = config["trainer"]["callbacks"]
    return next(entry["init_args"] for entry in callbacks if entry["class_path"].endswith("Rotor"))


def test_a_run_with_rotor_is_predicted_with_its_recomputation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, object] = {"budget": "60%", "offload": True, "link": "1TB/s"}
    run = _finished_run(tmp_path, callbacks=[{"class_path": "Rotor", "init_args": options}])
    assert main(["plan", "--check", str(run), "--machine", "cpu"]) == 0
    offloaded = json.loads((run / "plan_check.json").read_text())
    assert "and offloading" in offloaded["layout"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    _rotor_of(config).update(offload=False, link="auto")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["plan", "--check", str(run), "--machine", "cpu"]) == 0
    found = json.loads((run / "plan_check.json").read_text())
    assert "offloading" not in found["layout"]
    assert found["predicted_seconds"]["recompute"] > 3 * offloaded["predicted_seconds"]["recompute"]
    _rotor_of(config).update(offload=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["plan", "--check", str(run), "--machine", "cpu"]) == 2
    assert "--machine must have links.host for a run that offloads, got cpu" in capsys.readouterr().err
    config["trainer"]["callbacks"] = []
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["plan", "--check", str(run), "--machine", "cpu"]) == 0
    plain = json.loads((run / "plan_check.json").read_text())
    assert plain["predicted_seconds"]["recompute"] == 0
    assert sum(plain["predicted_bytes"].values()) > sum(found["predicted_bytes"].values())


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--check", str(tmp_path / "version_3")]) == 2
    assert "--check must be the folder of a run, got" in capsys.readouterr().err
    run = tmp_path / "mine" / "version_3"
    run.mkdir(parents=True)
    assert main(["plan", "--check", str(tmp_path)]) == 2
    assert f"without config.yaml; set one of {run}" in capsys.readouterr().err


def _config(strategy: object, accumulate: int = 1) -> dict[str, object]:
    trainer = {"strategy": strategy, "accumulate_grad_batches": accumulate}
    return {"trainer": trainer, "data": {"class_path": "Data", "init_args": {"batch_size": 16}}}


@pytest.mark.parametrize(
    ("strategy", "ranks", "text"),
    [
        ("auto", 1, "one rank, micro-batch 16 x 1"),
        ("zero3", 4, "dp_shard 4, micro-batch 4 x 1, ZeRO 3"),
        ({"class_path": "dlo_plugins.strategies.zero.ZeroStrategy", "init_args": {"stage": 1}}, 2, "ZeRO 1"),
        ({"class_path": "MeshStrategy", "init_args": {"pp": 2, "micro_batches": 4}}, 2, "1F1B, micro-batch 4 x 4"),
        ({"class_path": "MeshStrategy", "init_args": {"tp": 2, "appliers": ["ActivationCheckpoint"]}}, 4, "full"),
        ("ddp", 2, "dp_replicate 2, micro-batch 8 x 1"),
    ],
)
def test_the_layout_is_read_from_the_config(strategy: object, ranks: int, text: str) -> None:
    layout = read_layout(_config(strategy), ranks)
    assert text in str(layout)
    assert layout.global_batch == 16


def test_accumulation_counts_as_micro_batches() -> None:
    layout = read_layout(_config("zero3", 4), 2)
    assert (layout.micro_batch, layout.micro_batches, layout.global_batch) == (8, 4, 64)


@pytest.mark.parametrize("options", [{}, {"budget": "auto"}])
def test_a_rotor_that_is_not_predicted_is_refused(options: dict[str, object]) -> None:
    config = _config("auto")
    config["trainer"] |= {"callbacks": [{"class_path": "Rotor", "init_args": options}]}  # type: ignore[operator]
    with pytest.raises(DloError, match="with a budget in bytes or per cent, got"):
        rotor_budget(config)


def test_other_strategies_are_refused() -> None:
    with pytest.raises(DloError, match="predictions are for auto, ddp, "):
        read_layout(_config("deepspeed_3"), 2)


def test_experts_on_other_ranks_are_read() -> None:
    layout = read_layout(_config({"class_path": "MeshStrategy", "init_args": {"dp_shard": 2, "ep": 2}}), 2)
    assert (layout.mesh, layout.zero) == (MeshSpec(dp_shard=2, ep=2), 3)


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBV", 2), ("Interleaved1F1B", 2), ("Varuna", 1)])
def test_a_layout_has_the_stages_of_its_schedule(schedule: str, chunks: int) -> None:
    options = {"pp": 2, "schedule": schedule, "micro_batches": 4}
    assert read_layout(_config({"class_path": "MeshStrategy", "init_args": options}), 2).stages == 2 * chunks


def test_delayed_gradients_have_full_weights() -> None:
    for axis in ("dp_shard", "cp"):  # Both shard the optimizer's state.
        options = {"pp": 2, axis: 2, "schedule": "PipeDream2BW", "micro_batches": 4}
        layout = read_layout(_config({"class_path": "MeshStrategy", "init_args": options}), 4)
        assert (layout.zero, layout.delays, layout.uses_zero_strategy) == (1, True, False)
