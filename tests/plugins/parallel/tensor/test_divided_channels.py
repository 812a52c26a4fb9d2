"""Convolutional networks whose channels are divided train as one process: weights, running statistics, validation."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

TP = partial(MeshStrategy, tp=2, dp_shard=1)


def build(name: str = "test_efficientnet") -> tuple[ImageClassifier, DigitsData]:
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 1e-2, "schedule": "constant", "log_images": 0}
    return ImageClassifier(name, num_classes=10, **options), DigitsData(image_size=32, batch_size=16)


def case(strategy: Any, kind: str, name: str) -> Case:
    return Case(strategy, {"name": kind}, {"gradient_clip_val": 0.5, "limit_val_batches": 2}, name=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, TP), (4, partial(MeshStrategy, tp=4, dp_shard=1))],
)
def test_networks_are_one_process(ranks: int, strategy: Any) -> None:
    """Inverted bottlenecks have batch norms, convolutions of each channel alone, and squeeze-and-excitation.

    Data parallelism is left out: there a batch norm has the statistics of a rank's samples.
    """
    cases = [case(strategy, kind, kind) for kind in ("test_efficientnet", "test_resnet", "test_byobnet")]
    assert_parity(build, cases, world_size=ranks, steps=3, rtol=1e-4)


def fit(world_size: int, strategy: Any, steps: int, save: Path, resume: Path | None) -> dict[str, torch.Tensor]:
    """Returns the full tensors after training."""
    seed_everything(7, workers=True, verbose=False)
    options: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    run = quiet_trainer(devices=world_size, strategy=strategy, callbacks=[ExactResume()], **options)
    use_canonical_checkpoints(run)
    task, data = build()
    run.fit(task, datamodule=data, ckpt_path=resume)
    run.save_checkpoint(save)
    return gather_full_weights(run)


def _fit_on_slices(rank: int, world_size: int, folder: Path) -> None:
    fit(world_size, TP(), 2, folder / "tp.ckpt", folder / "before.ckpt")


def test_checkpoints_have_running_statistics_in_full(tmp_path: Path) -> None:
    expected = fit(1, "auto", 3, tmp_path / "straight.ckpt", None)
    fit(1, "auto", 1, tmp_path / "before.ckpt", None)
    run_distributed(_fit_on_slices, 2, tmp_path, backend=None)
    found = fit(1, "auto", 3, tmp_path / "after.ckpt", tmp_path / "tp.ckpt")
    assert any("running_var" in name for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
