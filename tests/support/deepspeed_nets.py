"""What the tests of the DeepSpeed bridge train, and how."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.checkpoints import Again


def ds(stage: int, **options: Any) -> partial:
    """Returns what makes a bridge; it travels to ranks."""
    return partial(DeepSpeedBridge, stage, **options)


#: Nothing stays whole in stage 3, and sub-groups are small.
CUT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 1500}}

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "zero3": partial(ZeroStrategy, 3),
    "fsdp": FSDPStrategy,
    "deepspeed0": ds(0),
    "deepspeed1": ds(1),
    "deepspeed2": ds(2),
    "deepspeed3": ds(3),
    "deepspeed2_offload": ds(2, offload_optimizer="cpu", round_robin_gradients=True),
    "deepspeed3_cut": ds(3, config=CUT_ALL),
    "deepspeed3_offload": ds(3, offload_optimizer="cpu", offload_parameters="cpu"),
}
SAVED, STEPS = 5, 10


class Model(LightningModule):
    """Odd sizes, which no number of ranks divides; a frozen part, tied weights, a buffer, two groups, a scheduler."""

    def __init__(self, recompute: bool = False, adapters: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.inward = nn.Linear(64, 27)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(27, 45), nn.GELU(), nn.Linear(45, 27)) for _ in range(3))
        self.tied = nn.Linear(27, 45)
        self.tied.weight = self.blocks[0][0].weight
        self.norm, self.head = nn.LayerNorm(27), nn.Linear(27, 10)
        self.frozen = nn.Linear(27, 27).requires_grad_(False)
        for parameter in self.frozen.parameters():
            # DeepSpeed rounds frozen weights to half precision, and keeps no master weights of them.
            parameter.data = parameter.data.bfloat16().float()
        self.register_buffer("scale", torch.tensor(0.1))
        if adapters:  # Most of the model is frozen, a little beside it is trained.
            self.inward.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.inward(images.mean(1)[:, ::2, ::2].flatten(1))
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(self.norm(x + self.frozen(x) * self.scale + self.tied(x)[:, :27]))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], ignore_index=-1, reduction="sum")
        self.log("val_loss", loss, sync_dist=True, reduce_fx="sum")  # Ranks share the last batch unevenly.

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watch(Callback):
    """Keeps each batch's loss, the mean over the ranks, and saves once so many batches are done."""

    def __init__(self, save: Path | None, after: int) -> None:
        self.save, self.after, self.losses = save, after, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))
        if batch_idx + 1 == self.after and self.save is not None:
            trainer.save_checkpoint(self.save)


def trainer(world_size: int, strategy: Any, callbacks: list[Callback] | None = None, root: Any = None, **options: Any):
    """Returns a trainer for a few steps."""
    defaults: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 0}
    made = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **(defaults | options),
    )
    use_canonical_checkpoints(made)
    return made


def train(
    world_size: int,
    strategy: Any,
    save: Path | None = None,
    resume: Path | None = None,
    after: int = SAVED,
    **options: Any,
) -> list[float]:
    """Returns the losses of the steps after a checkpoint, or of all; saves after a batch, or right after resuming."""
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save if resume is None else None, after)
    again = [Again(save)] if resume is not None and save is not None else []
    made = trainer(world_size, strategy, [watch, ExactResume(), *again], **options)
    made.fit(Model(), datamodule=DigitsData(image_size=16, batch_size=48), ckpt_path=resume)
    return watch.losses


def runs(rank: int, world_size: int, jobs: list[tuple[Any, ...]]) -> list[list[float]]:
    """Trains one job after the other: a strategy's name, where to save, what to resume, and perhaps options."""
    register_data_parallel()
    found = []
    for name, save, resume, *rest in jobs:
        options = rest[0] if rest else {}
        found.append(train(world_size, STRATEGIES[name]() if world_size > 1 else "auto", save, resume, **options))
    return found
