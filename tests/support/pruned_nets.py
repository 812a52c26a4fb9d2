"""Nets and runs for tests of pruning: a task whose blocks any strategy can cut, and the state of pruned weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_plugins.callbacks.prune import Prune
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "auto": lambda: "auto",
    "ddp": lambda: "ddp",
    "zero1": lambda: ZeroStrategy(1),
    "zero2": lambda: ZeroStrategy(2),
    "zero3": lambda: ZeroStrategy(3),
    "zero3_offload": lambda: ZeroStrategy(3, offload="both"),
    "fsdp": FSDPStrategy,
    "tp": lambda: MeshStrategy(tp=2),
    "pp": lambda: MeshStrategy(pp=2, micro_batches=2),
    "deepspeed_1": lambda: DeepSpeedBridge(stage=1),
    "deepspeed_2": lambda: DeepSpeedBridge(stage=2),
    "deepspeed_3": lambda: DeepSpeedBridge(stage=3),
}


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
    precision: str = "32-true",
    batch: int = 8,
    stop_at: int = -1,
) -> tuple[Prune, Watch, Trainer]:
    """Trains a small ViT on digits, and saves `last.ckpt` in the folder."""
    register_data_parallel()
    seed_everything(3, workers=True, verbose=False)
    args = {"eps": 1e-4} if optimizer == "adamw" else {}
    module = ImageClassifier(
        "vit_tiny_patch16_224",
        model_args=dict(VIT),
        num_classes=10,
        lr=1e-3,
        optimizer=optimizer,
        optimizer_args=args,
        schedule="constant",
        log_images=0,
    )
    data = DigitsData(image_size=16, batch_size=batch)
    prune = WithoutPicture(**settings)
    watch = Watch(prune)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=STRATEGIES[strategy](),
        max_epochs=epochs,
        max_steps=stop_at,
        limit_train_batches=limit,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        precision=precision,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[prune, watch, *callbacks],
    )
    use_canonical_checkpoints(trainer)
    module.check(data)
    contract: Any = trainer.strategy
    contract.check_model(module, data)
    prune.check_run(trainer, module, data)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "last.ckpt")
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
