"""How long `dlo` takes to start, beside LightningCLI's own.

    python benchmarks/startup.py [--rounds 20]

Each round starts every command once, in a new random order; the table gives medians over the rounds, as a ratio to
`import torch` in the same round, and for the fits to LightningCLI's. `LightningCLI again` is the control.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DLO = str(Path(sys.executable).with_name("dlo"))

MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(32, 8)), batch_size=4)
"""
CLI = """
import toy
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

LightningCLI(LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True)
"""
CONFIG = """
trainer: {max_steps: 1, accelerator: cpu}
model: {class_path: toy.Net}
data: {class_path: toy.Data}
"""
FIT = ["fit", "--config", "toy.yaml"]
COMMANDS: dict[str, list[str]] = {
    "import torch": [sys.executable, "-c", "import torch"],
    "dlo --help": [DLO, "--help"],
    "dlo --version": [DLO, "--version"],
    "dlo plugins": [DLO, "plugins"],
    "dlo plugins show OneCycle": [DLO, "plugins", "show", "OneCycle"],
    "LightningCLI, one step": [sys.executable, "cli.py", *FIT],
    "LightningCLI again": [sys.executable, "cli.py", *FIT],
    "dlo fit, one step": [DLO, *FIT, "--plugins", "./toy.py"],
}


def measure(rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    order = list(COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("toy.py", MODULE), ("cli.py", CLI), ("toy.yaml", CONFIG)):
            (Path(folder) / name).write_text(text)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                began = time.perf_counter()
                # LightningCLI refuses to overwrite the config of an earlier run.
                (Path(folder) / "config.yaml").unlink(missing_ok=True)
                subprocess.run(COMMANDS[name], cwd=folder, check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    seconds = measure(parser.parse_args().rounds)
    result = {}
    print(f"{'':<28}{'over':<26}{'ratio':>8}{'min':>8}{'max':>8}{'s here':>8}")
    for name, times in seconds.items():
        base = "LightningCLI, one step" if "one step" in name or "again" in name else "import torch"
        ratios = [time / other for time, other in zip(times, seconds[base], strict=True)]
        result[f"{name} / {base}"] = round(statistics.median(ratios), 4)
        print(
            f"{name:<28}{base:<26}{statistics.median(ratios):>8.3f}{min(ratios):>8.3f}{max(ratios):>8.3f}"
            f"{statistics.median(times):>8.2f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
