"""Draws docs/images/compile.svg from a run of the plug-in: ``python docs/pictures/compile.py``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.patches import Patch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.costs import is_compiled
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.compile.callback import Compile

FILE = Path(__file__).parents[1] / "images" / "compile.svg"
SIZES = (16, 16, 24)  # of the images in each epoch
TRAIN, EVAL, BATCH = 22, 11, 5
VALIDATION = 5.2  # x of its first batch
COLOURS = {"uncompiled": "#b0b0b0", "compiles, then runs": "#d9822b", "compiled": "#3f6ad8"}


class Net(LightningModule):
    """Network for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns a loss."""
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Runs the network."""
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        """Returns images of the epoch's size; the last batch is smaller."""
        return _loader(TRAIN, SIZES[self.trainer.current_epoch])

    def val_dataloader(self) -> DataLoader:
        """Returns larger images than in training."""
        return _loader(EVAL, 32)


def _loader(count: int, size: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(count, 1, size, size)), batch_size=BATCH)


class Watch(Callback):
    """Records each batch: (epoch, training, height, samples, compiled or not)."""

    def __init__(self, compile_callback: Compile) -> None:
        self.compile, self.graphs = compile_callback, 0
        self.seen: list[tuple[int, bool, int, int, str]] = []

    def _record(self, trainer: Trainer, module: LightningModule, batch: Any, training: bool) -> None:
        self.compile.tally.drain()
        how = "compiled" if is_compiled(module) else "uncompiled"
        if self.compile.tally.graphs > self.graphs:
            self.graphs, how = self.compile.tally.graphs, "compiles, then runs"
        self.seen.append((trainer.current_epoch, training, batch[0].shape[-1], len(batch[0]), how))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Records a training batch."""
        self._record(trainer, pl_module, batch, True)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Records a validation batch."""
        self._record(trainer, pl_module, batch, False)


def batches() -> list[tuple[int, bool, int, int, str]]:
    """Returns the records of a short run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = Compile(backend="aot_eager")
    watch = Watch(callback)
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=len(SIZES),
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[callback, watch, RunMonitor()],
        **off,
    )
    trainer.fit(Net())
    return watch.seen


def main() -> None:
    """Draws one row per epoch, one bar per batch: its height is the image size, its width the number of samples."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    place: dict[int, float] = {}
    for epoch, training, height, samples, how in batches():
        left = place.get(epoch, 0.0) if training else max(place[epoch], VALIDATION)
        width = 0.9 * samples / BATCH
        axes.bar(left, height / 48, width, -epoch, align="edge", color=COLOURS[how])
        axes.text(left + width / 2, -epoch - 0.06, f"{samples} x {height}²", fontsize=6, ha="center", va="top")
        place[epoch] = left + width + 0.1
    for epoch in place:
        axes.text(-0.1, -epoch + 0.1, f"epoch {epoch + 1}", ha="right")
    for left, text in ((0.0, "training"), (VALIDATION, "validation")):
        axes.text(left, 0.78, text)
    axes.set(xlim=(-0.9, 8.2), ylim=(-len(SIZES) + 0.75, 1))
    axes.axis("off")
    legend = [Patch(color=colour, label=how) for how, colour in COLOURS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
