"""A second model in a config: `dlo fit` builds it from a run folder, and refuses it before processes start."""

import json
from pathlib import Path

import pytest

from dlo_framework.cli.main import main
from support import frozen_runs as runs

CONFIG = """
trainer:
  max_steps: {steps}
  accelerator: cpu
  devices: {devices}
  strategy: {strategy}
  limit_val_batches: 1
  enable_checkpointing: false
  callbacks: [{{class_path: Distill, init_args: {{teacher: {teacher}}}}}]
model:
  class_path: ImageClassifier
  init_args: {{model: vit_tiny_patch16_224, model_args: {{patch_size: 4, embed_dim: 48, depth: 2, num_heads: 4}}}}
data: {{class_path: DigitsData, init_args: {{image_size: 16, batch_size: 16}}}}
"""
SMALL = "{patch_size: 4, embed_dim: 48, depth: 2, num_heads: 3}"
OWN = f"{{task: {{class_path: ImageClassifier, init_args: {{model: vit_tiny_patch16_224, model_args: {SMALL}}}}}}}"


def fit(folder: Path, teacher: str, devices: int = 1, strategy: str = "auto", steps: int = 1) -> int:
    (folder / "train.yaml").write_text(CONFIG.format(teacher=teacher, devices=devices, strategy=strategy, steps=steps))
    return main(["fit", "--config", str(folder / "train.yaml")])


def test_a_config_names_a_task_whose_memory_is_in_the_summary(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert fit(tmp_path, OWN, steps=2) == 0
    (path,) = tmp_path.rglob("summary.json")
    state = json.loads(path.read_text())["state_bytes"]
    # The same model without its optimizer.
    assert state["second_models"] == pytest.approx(state["parameters"], rel=0.01)
    assert state["optimizer"] == pytest.approx(2 * state["parameters"], rel=0.01)


@pytest.mark.parametrize(
    ("teacher", "devices", "strategy", "message"),
    [
        ("{checkpoint: teachers/version_1}", 1, "auto", "got teachers/version_1; did you mean 'version_0'?"),
        (
            OWN,
            2,
            "{class_path: MeshStrategy, init_args: {tp: 2, dp_shard: 1}}",
            "second model: tp must divide the 3 heads of 'blocks.0.attn', got 2; set tp=1",
        ),
    ],
)
def test_bad_input_is_one_line_before_processes_start(
    tmp_path, monkeypatch, capfd, teacher, devices, strategy, message
):
    monkeypatch.chdir(tmp_path)
    if "version" in teacher:
        runs.make_teacher("images", tmp_path / "teachers" / "version_0")
    assert fit(tmp_path, teacher, devices, strategy) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert message in lines[0]
