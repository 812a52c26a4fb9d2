"""Plug-ins through the command: the user's own file, and a third party's distribution."""

import json
import os
import subprocess
import sys

import pytest

from support.digits_config import WIDE, digits_config


def small(plugins: str, callback: str) -> str:
    trainer = f"max_epochs: 1, limit_train_batches: 4, accelerator: cpu, log_every_n_steps: 1, callbacks: [{callback}]"
    return f"plugins: {plugins}" + digits_config(trainer, WIDE)


def test_a_file_of_the_users_own(dlo):
    dlo("plugins", "new", "callback", "my_thing")
    (dlo.folder / "mine.yaml").write_text(small("[./my_thing.py]", "{class_path: MyThing}"))
    dlo("fit", "--config", "mine.yaml")
    config = (dlo.folder / "runs" / "mine" / "version_0" / "config.yaml").read_text()
    assert "my_thing.MyThing" in config


def test_a_third_partys_pack(dlo, example_pack, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.fspath(example_pack))
    shown = json.loads(dlo("plugins", "show", "WeightNormLogger", "--json").stdout)
    assert (shown["kind"], shown["distribution"], shown["version"]) == ("callback", "dlo-example-pack", "1.0.0")
    assert [(p["name"], p["default"]) for p in shown["parameters"]] == [("every_n_steps", "50"), ("depth", "2")]
    assert shown["defined_in"].startswith(str(example_pack))
    (dlo.folder / "pack.yaml").write_text(small("[]", "{class_path: WeightNormLogger, init_args: {every_n_steps: 1}}"))
    dlo("fit", "--config", "pack.yaml")
    events = (dlo.folder / "runs" / "pack" / "version_0").glob("events.*")
    assert any(b"weight_norm" in file.read_bytes() for file in events)


TOY = """
import torch
from lightning.pytorch import LightningModule


class Toy(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.slow
def test_any_lightning_module_runs_and_nothing_is_imported_that_it_does_not_need(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("plugins: [./toy.py]\nmodel: Toy\ntrainer: {max_epochs: 2, accelerator: cpu}\n")
    code = (
        "import sys\n"
        "import lightning.pytorch\n"  # What torchmetrics looks for it imports: transformers, where it is there.
        "before = set(sys.modules)\n"
        "from dlo_framework.cli.main import main\n"
        "assert main(['fit', '--config', 'toy.yaml']) == 0\n"
        "heavy = {'timm', 'deepspeed', 'transformers', 'sklearn', 'cv2', 'simplejpeg', 'dlo_tasks', 'dlo_plugins'}\n"
        "print('imported:', heavy & (set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: set()"
    summary = json.loads((tmp_path / "runs" / "toy" / "version_0" / "summary.json").read_text())
    assert summary["steps"] == 32
