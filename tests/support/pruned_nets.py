"""Nets and runs for tests of pruning: a task whose blocks any strategy can cut, and the state of pruned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dlo_framework.checkpoint import load
from dlo_plugins.prune.callback import Prune
from support.curricula_runs import fit, images, seeded


class Watch(Callback):
    """Counts, after each step, the elements that a mask prunes and that are not zero in weights or optimizer state."""

    def __init__(self, prune: Prune) -> None:
        self.prune, self.wrong, self.losses = prune, 0, []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        shards = self.prune.shards
        assert shards is not None
        for item in shards.items:
            if item.tensor.numel() != item.pruned.numel() and item.tensor.numel() == 0:
                continue  # An optimizer of full tensors frees them between steps.
            self.wrong += int(shards.values(item)[item.pruned].count_nonzero())
            if self.prune.trains_pruned and shards.keeps_dense:
                continue  # What trains aside has momentum.
            for value in trainer.optimizers[0].state.get(item.tensor, {}).values():
                if isinstance(value, Tensor) and value.shape == item.tensor.shape:
                    self.wrong += int(shards.values(item, value)[item.pruned].count_nonzero())


class WithoutPicture(Prune):
    """Prune that draws no report, which takes as long as a short run."""

    def _report(self, trainer: Trainer, layers: dict[str, float]) -> None:
        assert layers


def train(
    folder: Path,
    strategy: str,
    world_size: int,
    settings: dict[str, Any],
    *,
    optimizer: str = "adamw",
    epochs: int = 2,
    limit: int = 4,
    ckpt_path: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    batch: int = 8,
    stop_at: int = -1,
    **options: Any,
) -> tuple[Prune, Watch, Trainer]:
    """Trains a small ViT on digits, and saves `last.ckpt` in the folder."""
    seeded()
    args = {"eps": 1e-4} if optimizer == "adamw" else {}
    made = images(lr=1e-3, optimizer=optimizer, optimizer_args=args, batch_size=batch)
    prune = WithoutPicture(**settings)
    watch = Watch(prune)
    options = {"epochs": epochs, "batches": limit, "max_steps": stop_at, "limit_val_batches": 2} | options
    path = None if ckpt_path is None else Path(ckpt_path)
    _, trainer = fit(folder, made, strategy, world_size, [prune, watch, *callbacks], ckpt_path=path, **options)
    return prune, watch, trainer


def masks_of(path: Path) -> dict[str, Tensor]:
    """Returns the masks of a checkpoint."""
    masks = load(path)["pruning"]["masks"]
    return {name: masks[name].clone() for name in masks}


def weights_of(path: Path, key: str = "state_dict") -> dict[str, Tensor]:
    """Returns the weights of a checkpoint."""
    state = load(path)[key]
    return {name: state[name].clone() for name in state}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> int:
    """Returns the number of elements in which masks differ."""
    assert one.keys() == other.keys()
    return sum(int((one[name] != other[name]).sum()) for name in one)
