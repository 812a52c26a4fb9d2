"""How long `dlo` takes to start, beside LightningCLI's own.

    python benchmarks/startup.py [--rounds 20]

Commands that do not train are held against `import torch` in the same round, the fits against LightningCLI's.
`LightningCLI again` is the control.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, ratios, take_turns

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
TORCH, CLI_FIT = "import torch", "LightningCLI, one step"
BARS = {"dlo fit, one step": 1.0}  # no slower than LightningCLI's
COMMANDS: dict[str, list[str]] = {
    TORCH: [sys.executable, "-c", "import torch"],
    "dlo --help": [DLO, "--help"],
    "dlo --version": [DLO, "--version"],
    "dlo plugins": [DLO, "plugins"],
    "dlo plugins show OneCycle": [DLO, "plugins", "show", "OneCycle"],
    CLI_FIT: [sys.executable, "cli.py", *FIT],
    "LightningCLI again": [sys.executable, "cli.py", *FIT],
    "dlo fit, one step": [DLO, *FIT, "--plugins", "./toy.py"],
}


def start(name: str, folder: Path) -> float:
    """Returns the seconds that a command takes, from its start to its end."""
    # LightningCLI refuses to overwrite the config of an earlier run.
    (folder / "config.yaml").unlink(missing_ok=True)
    return ELAPSED.seconds(lambda: subprocess.run(COMMANDS[name], cwd=folder, check=True, capture_output=True))


def measure(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("toy.py", MODULE), ("cli.py", CLI), ("toy.yaml", CONFIG)):
            (folder / file).write_text(text)
        # The first round brings the files into the page cache, and compiles what Python keeps.
        return take_turns({name: (lambda name=name: start(name, folder)) for name in COMMANDS}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    seconds = measure(options.rounds)
    fits = [name for name in COMMANDS if "LightningCLI" in name or "fit" in name]
    for title, base, names in (
        ("commands that do not train", TORCH, [name for name in COMMANDS if name not in fits]),
        ("a fit of one step", CLI_FIT, fits),
    ):
        table = Table(title, base, ELAPSED)
        for name in names:
            table.add(
                name,
                ratios(seconds[name], seconds[base]),
                bar=BARS.get(name),
                ours=name.startswith("dlo"),
                control=name.endswith("again"),
                s=statistics.median(seconds[name]),
            )
        record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
