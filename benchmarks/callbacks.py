"""What the recipe callbacks cost in a step in which they have nothing to do.

    python benchmarks/callbacks.py [--rounds 20]

``dlo`` is a fit with the callbacks that every ``dlo fit`` has. ``dlo, all callbacks`` has OneCycle, ProgressiveResizing
(at its size), DynamicBatchSize (at its batch), BatchMix (with probability 0) and TimeToTarget besides. What these
callbacks add is then held against a step of a small ViT (64 x 64, batch 32), measured in the same round; `dlo again` is
the A/A control. CPU time, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, take_turns
from measuring.stopwatch import Stopwatch
from overhead import silence, vit
from torch import nn
from torch.utils.data import TensorDataset

from dlo_framework.data import ResumableDataModule
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.watch.monitor import StepClock
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.images.batch_mix import BatchMix
from dlo_plugins.images.progressive_resizing import ProgressiveResizing
from dlo_plugins.profile.time_to_target import TimeToTarget
from dlo_plugins.schedules.lr_curves import OneCycle

SIDE, BATCH, CLASSES, WARM = 8, 8, 10, 50
BAR = 0.01  # of what all callbacks add, to a small ViT's step


class Images(ResumableDataModule):
    """Random images of one size; loading a batch of them costs the same in all variants."""

    sizes_images = True
    num_classes, image_size = CLASSES, SIDE

    def __init__(self, batches: int) -> None:
        super().__init__(batch_size=BATCH, num_workers=0)
        self.samples = batches * BATCH

    def train_dataloader(self) -> object:
        return self.train_loader(self.some(self.samples))

    def val_dataloader(self) -> object:
        """TimeToTarget refuses a run that does not validate; this comes after the steps that are timed."""
        return self.eval_loader(self.some(BATCH))

    @staticmethod
    def some(samples: int) -> TensorDataset:
        return TensorDataset(torch.randn(samples, 3, SIDE, SIDE), torch.randint(CLASSES, (samples,)))


class Tiny(LightningModule):
    """The least that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(steps: int, make: Callable[[], list[Callback]]) -> float:
    """Returns the seconds of a step."""
    with tempfile.TemporaryDirectory() as folder, silence():
        return _fit(steps, make(), Path(folder))


def _fit(steps: int, callbacks: list[Callback], folder: Path) -> float:
    module, watch = Tiny(), Stopwatch(PROCESS, WARM, steps)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_model_summary=False,
        profiler=StepClock(),
        default_root_dir=folder,
        callbacks=[watch, *add_default_callbacks(callbacks, run_folder=folder, model=module, config="{}")],
    )
    trainer.fit(module, datamodule=Images(WARM + steps))
    return watch.seconds_of_a_step


def everything() -> list[Callback]:
    return [
        OneCycle(1e-3),
        ProgressiveResizing({0: SIDE}),
        DynamicBatchSize({0: BATCH}),
        BatchMix(prob=0.0),
        TimeToTarget("val_loss", 0.0, mode="min"),
    ]


def vit_step(steps: int = 4) -> float:
    net, (x, y) = vit()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(steps + 1):
        if step == 1:
            began = PROCESS.now()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return (PROCESS.now() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    record = Record.of(__file__, __doc__, options)
    variants: dict[str, Callable[[], list[Callback]]] = {"dlo": list, "dlo again": list}
    variants["dlo, all callbacks"] = everything
    runs = {name: (lambda make=make: fit(options.steps, make)) for name, make in variants.items()}
    # Each fit warms up by itself.
    seconds = take_turns(runs | {"small ViT": vit_step}, options.rounds, warm_up=0)
    table = Table("callbacks with nothing to do", "a small ViT's step; a row is what it adds to it", PROCESS)
    for name in variants:
        rounds = zip(seconds[name], seconds["dlo"], seconds["small ViT"], strict=True)
        table.add(
            name,
            [(one - base) / whole for one, base, whole in rounds],
            bar=BAR if name == "dlo, all callbacks" else None,
            ours=True,
            control=name == "dlo again",
            us_a_step=statistics.median(seconds[name]) * 1e6,
        )
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
