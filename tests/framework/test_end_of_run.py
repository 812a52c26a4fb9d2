"""A run's last checkpoint is that of its end, however it ends, with its metrics; a longer run resumes from there."""

import json
import random
from datetime import timedelta

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, Timer
from torch.utils.data import TensorDataset

from dlo_framework import runs
from dlo_framework.checkpoint import SafeCheckpointIO, load, step_of
from dlo_framework.data import ResumableDataModule
from dlo_framework.defaults import LastCheckpoint, add_default_callbacks
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.ema import WeightEMA


class Net(LightningModule):
    """10 batches an epoch; dropout draws in each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=2)
        self.samples = TensorDataset(torch.arange(80.0).view(20, 4) / 80)

    def train_dataloader(self):
        return self.train_loader(self.samples)

    def val_dataloader(self):
        return self.eval_loader(self.samples)


class NoValLoss(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_error", self.net(batch[0]).square().mean())


class LogsTraining(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_error", loss, on_step=False, on_epoch=True)
        return loss


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.step


class SlowTimer(Callback):
    """Makes ``max_time`` expire after a step, whatever the machine."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            timer = next(callback for callback in trainer.callbacks if isinstance(callback, Timer))
            timer._offset = 1e9


class Saves(Callback):
    """Counts the saves of complete checkpoints."""

    def __init__(self):
        self.steps = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.steps.append(trainer.global_step)


def fit(folder, callbacks=(), *, resume=False, kind=Net, **options):
    torch.manual_seed(1 + resume)
    random.seed(2 + resume)
    np.random.seed(3 + resume)
    folder.mkdir(exist_ok=True)
    module = kind()
    callbacks = add_default_callbacks(list(callbacks), run_folder=folder, model=module, config="{}", progress_bar=False)
    options = {"max_epochs": 3, "logger": False, "enable_model_summary": False, "enable_progress_bar": False} | options
    trainer = Trainer(accelerator="cpu", plugins=[SafeCheckpointIO()], callbacks=callbacks, **options)
    use_canonical_checkpoints(trainer)
    trainer.fit(module, datamodule=Data(), ckpt_path=last(folder) if resume else None)
    return module.losses


def last(folder):
    return folder / runs.CHECKPOINTS / runs.LAST


def summary(folder):
    return json.loads((folder / runs.SUMMARY).read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole") / "run")


ENDS = {
    "max_steps": (15, {"max_steps": 15}),
    "max_steps before any validation": (7, {"max_steps": 7}),
    "no validation": (15, {"max_steps": 15, "limit_val_batches": 0}),
    "max_epochs": (10, {"max_epochs": 1}),
    "max_time": (7, {"max_time": timedelta(days=1), "callbacks": [SlowTimer()]}),
    "should_stop": (13, {"callbacks": [StopAt(13)]}),
    "EarlyStopping": (6, {"callbacks": [EarlyStopping("val_loss", stopping_threshold=1e9)]}),
    "save_last": (15, {"max_steps": 15, "callbacks": [ModelCheckpoint(every_n_train_steps=4, save_last=True)]}),
    "save_last: link": (15, {"max_steps": 15, "callbacks": [ModelCheckpoint(every_n_train_steps=4, save_last="link")]}),
    "WeightEMA": (15, {"max_steps": 15, "callbacks": [WeightEMA(0.9)]}),
    "Lightning's average": (15, {"max_steps": 15, "callbacks": [EMAWeightAveraging(decay=0.9)]}),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_last_checkpoint_is_of_the_end_and_a_longer_run_goes_on_from_it(tmp_path, whole, end):
    step, options = ENDS[end]
    count = Saves()
    options = {"val_check_interval": 6, **options}
    before = fit(tmp_path / "run", [*options.pop("callbacks", []), count], **options)
    assert before == whole[:step]
    assert step_of(last(tmp_path / "run")) == step
    assert summary(tmp_path / "run")["steps"] == step
    writes = [at for at in count.steps if at == step]
    best = 1 if step % 6 == 0 and "limit_val_batches" not in options else 0
    assert len(writes) == 1 + best, "the end is saved once"
    assert not list(last(tmp_path / "run").parent.glob("last-v*"))
    after = [WeightEMA(0.9)] if end == "WeightEMA" else [EMAWeightAveraging(decay=0.9)] if "average" in end else []
    assert fit(tmp_path / "run", after, resume=True, val_check_interval=6) == whole[step:]


def test_an_end_that_is_saved_is_not_saved_again(tmp_path):
    count = Saves()
    fit(tmp_path / "run", [count], max_epochs=1, limit_val_batches=0)
    assert count.steps == [10]
    fit(tmp_path / "run", [count], max_epochs=3, limit_val_batches=0, resume=True)
    assert count.steps == [10, 20, 30]


def test_nothing_is_saved_of_a_run_without_steps_or_without_checkpoints(tmp_path):
    fit(tmp_path / "none", limit_train_batches=0)
    fit(tmp_path / "quick", fast_dev_run=True)
    assert not last(tmp_path / "none").exists()
    assert not last(tmp_path / "quick").exists()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Net, {"max_steps": 15, "val_check_interval": 6}), (LogsTraining, {"max_epochs": 2}), (Net, {"max_epochs": 2})],
)
def test_a_complete_run_that_was_killed_before_its_summary_has_its_metrics(tmp_path, kind, options):
    fit(tmp_path / "run", kind=kind, **options)
    told = summary(tmp_path / "run")
    assert set(told["metrics"]) == ({"val_loss", "train_error"} if kind is LogsTraining else {"val_loss"})
    (tmp_path / "run" / runs.SUMMARY).unlink()
    assert fit(tmp_path / "run", kind=kind, resume=True, **options) == []
    again = summary(tmp_path / "run")
    for name in ("status", "metrics", "steps", "best_checkpoint", "best_metric", "train_loss"):
        assert again[name] == told[name], name


class Plateau(Net):
    """Its scheduler reads, at a step, a metric of an earlier validation."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        setting = {"scheduler": scheduler, "monitor": "val_loss", "interval": "step", "frequency": 4}
        return {"optimizer": optimizer, "lr_scheduler": setting}


def test_metrics_that_were_logged_before_are_there_after_a_resume(tmp_path):
    options = {"val_check_interval": 3, "kind": Plateau}
    whole = fit(tmp_path / "whole", **options)
    before = fit(tmp_path / "run", [StopAt(7)], **options)
    assert "val_loss" in load(last(tmp_path / "run"))["dlo"]["metrics"]
    after = fit(tmp_path / "run", resume=True, **options)
    assert before + after == whole


def test_a_plain_module_that_logs_val_loss_keeps_its_best_by_it_and_says_so_once(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("dlo_framework.defaults.rank_zero_info", said.append)
    fit(tmp_path / "run", max_epochs=2)
    assert [message for message in said if "best checkpoint" in message] == [
        "the best checkpoint is that of the lowest val_loss; set best_metric = (name, 'min' or 'max') on Net to take"
        " another metric"
    ]
    told = summary(tmp_path / "run")
    assert (tmp_path / "run" / told["best_checkpoint"]).exists()
    assert list(told["best_metric"]) == ["val_loss"]


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 0}, {"val_check_interval": 6}])
def test_one_that_does_not_keeps_none_and_is_told_once(tmp_path, monkeypatch, options):
    said: list[str] = []
    monkeypatch.setattr("dlo_framework.defaults.rank_zero_info", said.append)
    fit(tmp_path / "run", kind=NoValLoss, max_epochs=2, **options)
    assert [message.partition(";")[0] for message in said if "best checkpoint" in message] == [
        "no best checkpoint is kept: NoValLoss logs no val_loss"
    ]
    assert summary(tmp_path / "run")["best_checkpoint"] is None


def test_best_metric_none_keeps_no_best(tmp_path):
    class Opted(Net):
        best_metric = None

    callbacks = add_default_callbacks([], run_folder=tmp_path, model=Opted(), progress_bar=False)
    assert [type(c) for c in callbacks if isinstance(c, ModelCheckpoint)] == [LastCheckpoint]
