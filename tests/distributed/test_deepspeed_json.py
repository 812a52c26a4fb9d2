"""A DeepSpeed JSON in training: its optimizer and its scheduler, beside DeepSpeed's own classes in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.testing import run_distributed
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_tasks.imagenet.digits import DigitsData
from support.deepspeed_nets import Model, trainer

BATCHES, ACCUMULATION = 12, 2
LR, BETAS, DECAY = 4e-3, (0.8, 0.99), 0.1
WARMUP = {"warmup_min_lr": 1e-4, "warmup_max_lr": LR, "warmup_num_steps": 3, "warmup_type": "linear"}

JSON: dict[str, Any] = {
    "train_batch_size": 96,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY}},
    "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
}


class Alone(Model):
    """The same, as the task's own: torch's AdamW under the scheduler of DeepSpeed itself."""

    def configure_optimizers(self) -> Any:
        from deepspeed.runtime.lr_schedules import WarmupDecayLR

        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=DECAY)
        schedule = WarmupDecayLR(optimizer, BATCHES // ACCUMULATION, **WARMUP)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric) -> None:
        """Steps it: DeepSpeed's schedulers are not torch's, and Lightning leaves those to the module."""
        scheduler.step()


class Record(Callback):
    """Keeps each batch's loss, and the rate that it is trained at."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))


def train(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[float]]:
    """Returns losses and rates: under the JSON on several ranks, under the task's own on one."""
    register_data_parallel()
    seed_everything(3, workers=True, verbose=False)
    record, strategy = Record(), "auto" if world_size == 1 else DeepSpeedBridge(config=JSON)
    options = {"limit_train_batches": BATCHES, "accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": 0.5}
    made = trainer(world_size, strategy, [record], folder, limit_val_batches=0, max_epochs=1, **options)
    made.fit(Alone() if world_size == 1 else Model(), datamodule=DigitsData(image_size=16, batch_size=48))
    return record.losses, record.rates


def test_the_jsons_optimizer_and_scheduler_train_as_deepspeeds_own_do(tmp_path):
    (alone,) = run_distributed(train, 1, tmp_path, backend=None)
    ranks = run_distributed(train, 2, tmp_path, backend=None)
    assert ranks[0][1] == ranks[1][1] == alone[1]
    assert alone[1][::ACCUMULATION] == pytest.approx([1e-4, 1e-4, 1.4e-3, 2.7e-3, 4e-3, 2.7e-3])
    assert ranks[0][0] == pytest.approx(alone[0], rel=1e-5)
