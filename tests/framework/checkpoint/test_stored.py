"""Checkpoints that earlier versions have written, and what a write that fails or a hostile file leaves.

``stored/`` holds one of a single process and one of ZeRO-3 on two ranks, each after step 3, with the losses of the run
that wrote them. They were written in format 2 by torch 2.14.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn

from dlo_framework.checkpoint import SafeCheckpointIO, load, loading, newest_valid, recover, verify
from dlo_framework.checkpoint.loading import refuse_unsafe
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.runs import Watch
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


def train(rank: int, world_size: int, save: Path | None, resume: Path | None) -> list[float]:
    register_data_parallel()
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save, SAVED)
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


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_checkpoint_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "free_bytes", lambda folder: 1000)
    with pytest.raises(DloError, match=r"need 4\.0 kB, 1\.0 kB free in .*; no earlier checkpoint there"):
        SafeCheckpointIO().save_checkpoint({"x": torch.zeros(1000)}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_bomb_is_refused_and_not_executed(tmp_path, legacy):
    path, proof = tmp_path / "bomb.ckpt", tmp_path / "executed"
    torch.save({"state_dict": Bomb(f"touch {proof}")}, path, _use_new_zipfile_serialization=not legacy)
    for read in (refuse_unsafe, SafeCheckpointIO().load_checkpoint):
        message = r"refusing .*bomb\.ckpt: pickle global \w+\.system not allowed; nothing executed"
        with pytest.raises(DloError, match=message):
            read(path)
    assert not proof.exists()


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / "last.ckpt.dlo-partial").write_bytes(b"half")
    (tmp_path / "last.ckpt").write_bytes(b"whole")
    recover(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}])
def test_a_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(DloError, match=r"other\.pt is not a checkpoint of a run"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "other.pt")


def test_noise_and_folders_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "noise.ckpt").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(
        DloError, match=r"noise\.ckpt \(10\.2 kB\): it is damaged, truncated, or not a checkpoint"
    ) as caught:
        refuse_unsafe(tmp_path / "noise.ckpt")
    assert "weights_only" not in str(caught.value)
    with pytest.raises(DloError, match="a checkpoint must be a file, or hold a manifest, got"):
        refuse_unsafe(tmp_path)
