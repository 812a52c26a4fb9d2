"""``dlo parity`` as a user runs it: what it finds, what it says, its exit codes, and that it leaves nothing behind."""

import json

import pytest

from dlo_framework.cli.main import main

MIXED = """
trainer:
  max_epochs: 3
  accelerator: cpu
  strategy: ddp
  devices: 2
  accumulate_grad_batches: 2
  gradient_clip_val: 0.5
  limit_val_batches: 2
  callbacks:
    - class_path: OneCycle
      init_args: {max_lr: 1.0e-3}
    - class_path: BatchMix
      init_args: {mode: elem}
    - class_path: ProgressiveResizing
      init_args: {sizes: {0: 8, "4%": 16}}  # of three epochs of 21 steps
    - class_path: LRFinder
    - class_path: PipelineTimeline
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val_loss}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2, drop_path_rate: 0.3, drop_rate: 0.1}
    schedule: constant
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 32}}
"""

NET = """
import torch
from torch import nn
from dlo_framework import Task


class Net(Task):
    def configure_model(self) -> None:
        if not self.has_model:
            pool = nn.AdaptiveAvgPool2d(1)
            self.model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(8, 10))

    def loss(self, outputs, batch):
        print("a print that is not part of the report")
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""
NET_CONFIG = """
plugins: [./net.py]
seed_everything: true
trainer: {accelerator: cpu, strategy: ddp, devices: 2, max_epochs: 2}
model: {class_path: Net}
data: {class_path: DigitsData, init_args: {batch_size: 32}}
"""


def written(folder) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return {name for name in names if "__pycache__" not in name}


def test_a_recipe_with_mixing_and_dropout_is_the_same_on_two_ranks(dlo):
    (dlo.folder / "mixed.yaml").write_text(MIXED)
    out = dlo("parity", "--config", "mixed.yaml", "--steps", "5").stdout
    assert "PARITY: ddp on 2 ranks: 5 steps within 1e-05" in out
    assert "BatchMix: each rank's batch is mixed separately, in one process too: equal" in out
    assert "model: no dropout (2 DropPath, 1 Dropout)" in out
    assert "ProgressiveResizing: a percentage is of the run's 3 epochs, not of these steps" in out
    assert "LRFinder: left out; it acts before training" in out
    assert "PipelineTimeline: left out; it draws a run and changes nothing in it" in out
    assert "DigitsData draws each sample's random numbers from seed, epoch and index: equal" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert len({row[1] for row in rows}) == 5
    for row in rows:
        assert float(row[1]) == pytest.approx(float(row[2]), rel=1e-5)
        assert float(row[4]) == pytest.approx(float(row[5]), rel=1e-5)
    assert "weights at the end: difference" in out
    assert written(dlo.folder) == {"mixed.yaml"}


@pytest.mark.slow
def test_a_summed_loss_is_reported_as_json(dlo):
    (dlo.folder / "net.py").write_text(NET)
    (dlo.folder / "net.yaml").write_text(NET_CONFIG)
    done = dlo("parity", "--config", "net.yaml", "--steps", "2", "--json", code=1)
    assert "not part of the report" in done.stderr
    assert written(dlo.folder) == {"net.py", "net.yaml"}
    told = json.loads(done.stdout)
    assert told["parity"] is False
    assert (told["strategy"], told["ranks"], len(told["steps"])) == ("ddp", 2, 2)
    assert told["steps"][0]["loss"]["difference"] == pytest.approx(0.5)
    assert told["steps"][0]["grad_norm"]["difference"] == pytest.approx(0.5)
    assert "a sum over the batch" in " ".join(told["hints"])
    assert set(told["tensors"]) >= {"model.0.weight", "model.4.bias"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nope.yaml"], "nope.yaml"),
        (["--config", "net.yaml", "--steps", "0"], "--steps must be more than 0, got 0"),
        (["--config", "net.yaml", "--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--config", "net.yaml", "--trainer.strategy", "dpp"], "unknown strategy 'dpp'; did you mean 'ddp'?"),
        (["--config", "net.yaml", "--ckpt_path", "last"], "ckpt_path"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "net.yaml").write_text(NET_CONFIG)
    assert main(["parity", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    assert "parity: training" not in said.err, "no rank has started"
