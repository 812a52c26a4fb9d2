"""Checkpoints that earlier versions have written are verified, loaded and resumed.

``stored/`` holds one of a single process and one of ZeRO-3 on two ranks, each after step 3, with the losses of the run
that wrote them. They were written in format 2 by torch 2.14.
"""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn

from dlo_framework.checkpoint import load, newest_valid, verify
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

STORED = Path(__file__).parent / "stored"
SAVED, STEPS = 3, 8
NAMES = ("one-process", "zero3-two-ranks")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 10))
        self.net[1].eval()

    def training_step(self, batch, batch_idx):
        self.net[1].eval()  # Its statistics would be each rank's own.
        return nn.functional.cross_entropy(self.net(batch[0].mean(1)[:, ::2, ::2].flatten(1)), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Watch(Callback):
    def __init__(self, save: Path | None) -> None:
        self.save, self.losses = save, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))
        if trainer.global_step == SAVED and self.save is not None:
            trainer.save_checkpoint(self.save)


def train(rank: int, world_size: int, save: Path | None, resume: Path | None) -> list[float]:
    register_data_parallel()
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save)
    trainer = quiet_trainer(
        devices=world_size,
        strategy=ZeroStrategy(3) if world_size > 1 else "auto",
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[watch, ExactResume()],
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(Model(), datamodule=DigitsData(image_size=16, batch_size=32), ckpt_path=resume)
    if world_size > 1:
        leave_group()
    return watch.losses


def sums_of(path: Path) -> dict[str, float]:
    """Sum of each tensor of a checkpoint."""
    content = load(path)
    sums = {f"model/{name}": float(value.double().sum()) for name, value in content["state_dict"].items()}
    for name, state in content["optimizer_states"][0]["state"].items():
        sums |= {f"{name}/{key}": float(value.double().sum()) for key, value in state.items()}
    return sums


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_checkpoint_is_whole_and_holds_what_was_saved(name: str) -> None:
    expected = json.loads((STORED / "expected.json").read_text())[name]
    verify(STORED / f"{name}.ckpt")
    content = load(STORED / f"{name}.ckpt")
    assert content["global_step"] == SAVED
    assert content["lr_schedulers"][0]["step_size"] == 1
    found = sums_of(STORED / f"{name}.ckpt")
    assert found == pytest.approx(expected["sums"], rel=1e-12)
    assert len(found) == 9 + 6 * 3


def test_the_newest_of_the_stored_ones_is_found() -> None:
    assert newest_valid(STORED) == STORED / "zero3-two-ranks.ckpt"


@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_resume_from_both_with_the_losses_of_the_run_that_wrote_them(world_size: int) -> None:
    expected = json.loads((STORED / "expected.json").read_text())
    for name in NAMES:
        losses = run_distributed(train, world_size, None, STORED / f"{name}.ckpt", backend=None)[0]
        assert losses == pytest.approx(expected[name]["losses"][SAVED:], rel=1e-4), name
