"""What the recipe callbacks cost in a step in which they have nothing to do.

    python benchmarks/callbacks.py [--rounds 20]

``dlo`` is a fit with the callbacks that every ``dlo fit`` has. ``dlo, all callbacks`` has OneCycle, ProgressiveResizing
(at its size), DynamicBatchSize (at its batch), BatchMix (with probability 0) and TimeToTarget besides.
callbacks add is then held against a step of a small ViT (64 x 64, batch 32), measured in the same round. Rounds are
interleaved in random order, medians are given, and `dlo again` is the A/A control. CPU time, one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from overhead import silence, vit
from torch import nn
from torch.utils.data import TensorDataset

from dlo_framework.data import ResumableDataModule
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.watch.clock import StepClock
from dlo_plugins.callbacks.batch_mix import BatchMix
from dlo_plugins.callbacks.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.callbacks.one_cycle import OneCycle
from dlo_plugins.callbacks.progressive_resizing import ProgressiveResizing
from dlo_plugins.callbacks.time_to_target import TimeToTarget

SIDE, BATCH, CLASSES, WARM = 8, 8, 10, 50


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


class Stopwatch(Callback):
    """Times the batches after the first few, from one batch's start to the last one's."""

    def __init__(self) -> None:
        self.seen, self.began, self.seconds = 0, 0.0, 0.0

    def on_train_batch_start(self, *_: object) -> None:
        self.seen += 1
        if self.seen == WARM:
            self.began = time.process_time()
        self.seconds = time.process_time() - self.began


def fit(steps: int, callbacks: list[Callback], folder: Path) -> float:
    """Returns the seconds of a step."""
    module, watch = Tiny(), Stopwatch()
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
    return watch.seconds / steps


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
            began = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return (time.process_time() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    variants = {"dlo": list, "dlo again": list, "dlo, all callbacks": everything}
    seconds: dict[str, list[float]] = {name: [] for name in [*variants, "small ViT"]}
    for _ in range(arguments.rounds):
        for name in random.sample(list(variants), len(variants)):
            with tempfile.TemporaryDirectory() as folder, silence():
                seconds[name].append(fit(arguments.steps, variants[name](), Path(folder)))
        seconds["small ViT"].append(vit_step())
    print(f"{'':<22}{'us a step':>12}{'added, of a small ViT step':>30}")
    result = {}
    for name in variants:
        rounds = zip(seconds[name], seconds["dlo"], seconds["small ViT"], strict=True)
        share = statistics.median((one - base) / whole for one, base, whole in rounds)
        result[name] = round(share, 5)
        print(f"{name:<22}{statistics.median(seconds[name]) * 1e6:>12.0f}{share:>30.3%}")
    print(json.dumps({"benchmark": "callbacks", "rounds": arguments.rounds, "added_over_small_vit_step": result}))


if __name__ == "__main__":
    main()
