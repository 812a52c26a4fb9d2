"""A net that reads digits, with and without compressed communication, and whether all ranks hold the same of it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from timm.optim import Lamb
from torch import Tensor, nn

from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.compression.one_bit import OneBitAdam, OneBitLamb
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

FREEZE = 6


class Net(LightningModule):
    """Reads the digits; ``bad_step`` has one rank's loss become NaN there."""

    def __init__(self, optimizer: str = "adamw", bad_step: int | None = None, by_hand: bool = False) -> None:
        super().__init__()
        self.optimizer, self.bad_step = optimizer, bad_step
        self.automatic_optimization = not by_hand
        self.inward, self.norm, self.head = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(2))
        self.losses: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        x = self.inward(images.mean(1)[:, ::2, ::2].flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        if self.global_step == self.bad_step and self.global_rank == 1:
            loss = loss * torch.nan
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        made: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(groups, lr=3e-3),
            "lamb": lambda: Lamb(groups, lr=1e-2),
            "one_bit_adam": lambda: OneBitAdam(groups, lr=3e-3, freeze_step=FREEZE),
            "one_bit_lamb": lambda: OneBitLamb(groups, lr=1e-2, freeze_step=FREEZE),
            # Trust ratios take longer to settle.
            "later_lamb": lambda: OneBitLamb(groups, lr=1e-2, freeze_step=30),
            "later_adam": lambda: OneBitAdam(groups, lr=3e-3, freeze_step=15),
            "refreshed": lambda: OneBitAdam(groups, lr=3e-3, freeze_step=15, refresh_every=8),
            "never_frozen": lambda: OneBitAdam(groups, lr=3e-3, freeze_step=10_000),
            "never_frozen_lamb": lambda: OneBitLamb(groups, lr=1e-2, freeze_step=10_000),
            "two": lambda: [torch.optim.AdamW(matrices), torch.optim.AdamW(vectors)],
        }
        return made[self.optimizer]()


def fit(
    module: Net,
    callbacks: list[Any],
    *,
    steps: int = 2 * FREEZE,
    strategy: Any = "ddp",
    save: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Trainer:
    register_data_parallel()
    trainer = quiet_trainer(
        devices=dist.get_world_size() if dist.is_initialized() else "auto",
        strategy=strategy,
        max_steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, ExactResume()],
        **options,
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(module, datamodule=DigitsData(image_size=16, batch_size=64), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


def train(optimizer: str, method: str | None, *more: Any, seed: int = 3, **options: Any) -> tuple[Net, Any]:
    """Trains from the same start; returns the module and the callback, if there is one."""
    seed_everything(seed, workers=True, verbose=False)
    settings = options.pop("settings", {})
    callback = GradientCompression(method, **settings) if method else None  # type: ignore[arg-type]
    module = Net(optimizer, **options.pop("module", {}))
    fit(module, [*([callback] if callback else []), *more], **options)
    return module, callback


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_on_all_ranks(module: nn.Module) -> bool:
    own = torch.cat([tensor.flatten() for tensor in weights(module)])
    first = own.clone()
    dist.broadcast(first, 0)
    equal = torch.tensor(int(torch.equal(first, own)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    return bool(equal)
