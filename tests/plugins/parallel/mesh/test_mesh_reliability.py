"""A 2x2 mesh with a pipeline: runs that are stopped anywhere and go on, with dropout and mixed batches; a NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.finite import FiniteLoss
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.testing.training import leave_group
from dlo_framework.watch.monitor import batch_loss
from dlo_plugins.images.batch_mix import BatchMix
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "proj_drop_rate": 0.2}
EPOCHS, BATCHES = 2, 5
MESHES: dict[str, dict[str, Any]] = {
    "pp x tp": {"pp": 2, "tp": 2, "dp_shard": 1, "micro_batches": 2},
    "pp x dp": {"pp": 2, "dp_shard": 2, "micro_batches": 2},
    "pp x tp, ZBV": {"pp": 2, "tp": 2, "dp_shard": 1, "micro_batches": 4, "schedule": "ZBV"},
}
#: Batches done when a checkpoint is written: a step's end, in mid-accumulation, and the epoch's last step, which is
#: that of a window that has not filled up.
STOPS, OPEN = (2, 3, 5, 6), (3, 6)


class Classifier(ImageClassifier):
    """Its loss is NaN in one batch, on the ranks that see the second half of the data."""

    def __init__(self, nan_at: int = -1, **options: Any) -> None:
        depth = 4 if options.pop("deep", False) else 2
        super().__init__("vit_tiny_patch16_224", model_args={**VIT, "depth": depth}, num_classes=10, lr=1e-3, **options)
        self.nan_at = nan_at

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        second = self.trainer.strategy.distributed_sampler_kwargs["rank"] == 1
        at = self.trainer.fit_loop.epoch_loop.batch_idx
        return loss * float("nan") if self.training and second and at == self.nan_at else loss


class Notes(Callback):
    """Keeps each batch's loss, and writes checkpoints on the way."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.losses = folder, []  # type: ignore[var-annotated]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = batch_loss(trainer, outputs)
        assert loss is not None
        self.losses.append(loss.detach().clone())
        done = trainer.current_epoch * BATCHES + batch_idx + 1
        if self.folder is not None and done in STOPS:
            trainer.save_checkpoint(self.folder / f"{done}.ckpt")


def _trainer(folder: Path, strategy: Any, *callbacks: Callback) -> Trainer:
    module_callbacks = add_default_callbacks(
        list(callbacks), run_folder=folder, model=Classifier(), progress_bar=False, checkpoints=False
    )
    return quiet_trainer(
        devices=4,
        strategy=strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        limit_train_batches=BATCHES,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        callbacks=module_callbacks,
        default_root_dir=folder,
    )


def _fit(folder: Path, name: str, save: Path | None, resume: Path | None) -> list[Tensor]:
    seed_everything(4, workers=True, verbose=False)
    notes = Notes(save)
    trainer = _trainer(folder, MeshStrategy(**MESHES[name]), notes, BatchMix(mode="batch"))
    task = Classifier(deep="ZBV" in name)
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=8), ckpt_path=resume)
    return notes.losses


def _resumes(rank: int, world_size: int, folder: Path, names: list[str], stops: tuple[int, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        home = folder / name
        whole = _fit(folder, name, home, None)
        found[name] = whole, {stop: _fit(folder, name, None, home / f"{stop}.ckpt") for stop in stops}
    return found


@pytest.mark.parametrize(
    ("names", "stops"),
    [
        (["pp x tp"], (3,)),  # In mid-accumulation.
        pytest.param([*MESHES], STOPS, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_anywhere_goes_on_bit_for_bit(
    tmp_path: Path, names: list[str], stops: tuple[int, ...]
) -> None:
    for found in run_distributed(_resumes, 4, tmp_path, names, stops, timeout=280):
        for name, (whole, resumed) in found.items():
            assert len(whole) == EPOCHS * BATCHES
            for stop, losses in resumed.items():
                assert len(losses) == len(whole) - stop, (name, stop)
                if name == "pp x dp" and stop in OPEN:
                    # A checkpoint holds the mean of the data ranks' gradients, where a run goes on with each one's.
                    torch.testing.assert_close(torch.stack(losses), torch.stack(whole[stop:]), rtol=1e-6, atol=0)
                else:
                    assert all(map(torch.equal, losses, whole[stop:])), (name, stop)


def _nan(rank: int, world_size: int, folder: Path) -> tuple[int, int, bool, float, int]:
    """Returns steps that were skipped and taken, whether weights are finite, a loss, and losses that were looked at."""
    seed_everything(4, workers=True, verbose=False)
    finite, looked = FiniteLoss(on_nan="skip"), []
    look = finite._flag.look
    finite._flag.look = lambda loss: (looked.append(loss), look(loss))[1]  # type: ignore[method-assign]
    trainer = _trainer(folder, MeshStrategy(**MESHES["pp x dp"]), finite)
    task = Classifier(nan_at=3)
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=8))
    weights = gather_full_weights(trainer)
    answer = finite.skipped, trainer.global_step, all(bool(torch.isfinite(w).all()) for w in weights.values())
    loss = float(trainer.callback_metrics["val_loss"])
    leave_group()
    return *answer, loss, len(looked)


def test_all_ranks_leave_out_a_step_that_is_nan_on_one(tmp_path: Path) -> None:
    answers = run_distributed(_nan, 4, tmp_path, timeout=200)
    # The last stage's ranks look at each of two micro-batches' losses, before its backward; others see none.
    assert sorted(looked for *_, looked in answers) == [0, 0, 2 * EPOCHS * BATCHES, 2 * EPOCHS * BATCHES]
    for skipped, steps, finite, loss, _ in answers:
        assert skipped == EPOCHS  # One batch of each epoch.
        assert steps == EPOCHS * 3
        assert finite
        assert loss == pytest.approx(answers[0][3], rel=1e-6)
