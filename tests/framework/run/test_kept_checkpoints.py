"""The paths of a run's checkpoints, its best one, and what remains of a run that cannot write any more."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.checkpoint import load, resumptions
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import SingleProcessStrategy, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.run import runs


class Net(LightningModule):
    """Its metric is best in the second epoch."""

    best_metric = ("val", "max")

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", -float((self.current_epoch - 1) ** 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, callbacks=(), resume: Path | None = None, **options) -> Trainer:
    """Trains four steps an epoch."""
    module = Net()
    trainer = Trainer(
        **{"logger": False, "max_epochs": 3, "accelerator": "cpu", "num_sanity_val_steps": 0, **options},
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=add_default_callbacks(list(callbacks), run_folder=folder, model=module, progress_bar=False),
    )
    use_canonical_checkpoints(trainer)
    folder.mkdir(parents=True, exist_ok=True)
    data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    trainer.fit(module, data, data, ckpt_path=resume)
    return trainer


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- one's own ModelCheckpoint ------------------------------------------------------------------------------


def test_ones_own_checkpoints_are_the_runs_whatever_the_logger(tmp_path):
    own = ModelCheckpoint(every_n_train_steps=6, save_top_k=-1, save_last=True)
    fit(tmp_path / "x" / "version_0", [own], logger=CSVLogger(tmp_path / "curves"))
    best = "epoch=1-step=8-val=0.0000.ckpt"
    assert names(tmp_path / "x" / "version_0") == ["epoch=1-step=6.ckpt", best, "epoch=2-step=12.ckpt", "last.ckpt"]
    assert runs.find_checkpoint(tmp_path / "x", "last").name == "last.ckpt"


@pytest.mark.parametrize("save_last", [None, True])
def test_ones_own_elsewhere_leave_the_run_its_last(tmp_path, save_last):
    """Also one that saves at the same times as dlo's own, which Lightning would not distinguish by its state."""
    fit(tmp_path / "x" / "version_0", [ModelCheckpoint(tmp_path / "elsewhere", save_top_k=-1, save_last=save_last)])
    assert load(tmp_path / "x" / "version_0" / "checkpoints" / "last.ckpt")["global_step"] == 12
    assert len(list((tmp_path / "elsewhere").iterdir())) == (4 if save_last else 3)
    assert runs.unfinished(tmp_path / "x") is None


# --- the best -----------------------------------------------------------------------------------------------


def test_the_best_one_is_found_by_a_relative_path_where_the_runs_lie_behind_a_link(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er" / "disk").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "deep" / "er" / "disk", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    fit(Path("runs/x/version_0"))
    assert summary(Path("runs/x/version_0"))["best_checkpoint"].startswith("checkpoints/epoch=1")
    assert runs.find_checkpoint(Path("runs/x"), "best").name.startswith("epoch=1")


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_run_that_was_moved_knows_its_best_still(tmp_path, move):
    fit(tmp_path / "old")
    best = summary(tmp_path / "old")["best_checkpoint"]
    move(tmp_path / "old", tmp_path / "new")
    fit(tmp_path / "new", resume=tmp_path / "new" / "checkpoints" / "last.ckpt", max_epochs=5)
    assert summary(tmp_path / "new")["best_metric"] == {"val": 0.0}
    assert summary(tmp_path / "new")["best_checkpoint"] == best
    assert names(tmp_path / "new") == [Path(best).name, "last.ckpt", "resumed.jsonl"]


def test_a_new_run_from_anothers_checkpoint_does_not_take_its_best_over(tmp_path):
    fit(tmp_path / "old")
    fit(tmp_path / "new", resume=tmp_path / "old" / "checkpoints" / "last.ckpt", max_epochs=5)
    assert summary(tmp_path / "new")["best_metric"] == {"val": -4.0}
    assert resumptions(tmp_path / "old" / "checkpoints") == resumptions(tmp_path / "new" / "checkpoints") == 0


def test_a_run_notes_what_it_goes_on_from_and_what_it_leaves(tmp_path):
    every = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}"}
    fit(tmp_path / "x" / "version_0", [ModelCheckpoint(**every)])
    folder = tmp_path / "x" / "version_0"
    fit(folder, [ModelCheckpoint(**every)], resume=folder / "checkpoints" / "step=4.ckpt", max_epochs=2)
    (line,) = map(json.loads, (folder / "checkpoints" / "resumed.jsonl").read_text().splitlines())
    assert (line["from"], line["step"]) == ("step=4.ckpt", 4)
    best = "epoch=1-step=8-val=0.0000.ckpt"
    assert sorted(line["left_behind"]) == [best, "last.ckpt", "step=12.ckpt", "step=8.ckpt"]
    assert summary(folder)["resumptions"] == 1
    assert load(runs.find_checkpoint(tmp_path / "x", "last"))["global_step"] == 8
    assert runs.unfinished(tmp_path / "x") is None


# --- no more room -------------------------------------------------------------------------------------------


def full(self, *args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", str(self))


class Fails(Callback):
    def on_train_batch_end(self, trainer, *_):
        raise DloError("no space for the checkpoint")


def test_a_summary_that_cannot_be_written_does_not_hide_what_went_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DloError, match="no space for the checkpoint"):
        fit(tmp_path, [Fails()])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "summary.json" in line]
    why = f"cannot write {tmp_path / 'summary.json'}: No space left on device"
    assert line == f"dlo: the summary of this run could not be written: {why}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.yaml"]


def test_the_best_is_the_one_before_where_the_new_one_found_no_room(tmp_path, monkeypatch):
    save = SingleProcessStrategy.save_checkpoint

    def refuse_second_best(self, checkpoint, filepath, storage_options=None):
        if Path(filepath).name.startswith("epoch=1"):
            raise DloError("no space for the checkpoint")
        save(self, checkpoint, filepath, storage_options)

    monkeypatch.setattr(SingleProcessStrategy, "save_checkpoint", refuse_second_best)
    with pytest.raises(DloError, match="no space for the checkpoint"):
        fit(tmp_path / "x" / "version_0")
    record = summary(tmp_path / "x" / "version_0")
    assert (record["status"], record["best_metric"]) == ("interrupted: DloError", {"val": -1.0})
    best = runs.find_checkpoint(tmp_path / "x", "best")
    assert best == tmp_path / "x" / "version_0" / record["best_checkpoint"]
    assert load(best)["global_step"] == 4


def test_one_that_cannot_be_written_at_the_end_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DloError, match=r"cannot write .*summary\.json: No space left on device"):
        fit(tmp_path)
