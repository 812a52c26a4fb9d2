"""A run's last checkpoint is that of its end, however it ends, with its metrics; a longer run resumes from there."""

import contextlib
import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.optim import Lion

from dlo_framework.checkpoint import load, step_of
from dlo_framework.defaults import LastCheckpoint, add_default_callbacks
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_framework.watch.summary import RunRecord
from support.noisy_runs import Net, last, run


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


def fit(folder, callbacks=(), **options):
    return run(folder, *callbacks, **options)[0]


def summary(folder):
    return json.loads((folder / runs.SUMMARY).read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole") / "run")


ENDS = {
    "max_steps before any validation": (7, {"max_steps": 7}),
    "max_time": (7, {"max_time": timedelta(days=1), "callbacks": [SlowTimer()]}),
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
    best = summary(tmp_path / "run")["best_checkpoint"] or ""
    assert len(writes) == 1 + (f"step={step}-" in best), "the end is saved once, and a best one"
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
    [
        (Net, {"max_steps": 15, "val_check_interval": 6}),
        (LogsTraining, {"max_epochs": 2}),
        (Net, {"max_epochs": 2}),
        (Net, {"max_epochs": 2, "log_every_n_steps": 2}),
    ],
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
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
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


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.nn.Linear(16, 4)


def test_a_resume_that_fails_before_it_trains_leaves_the_summary(tmp_path):
    fit(tmp_path)
    finished = summary(tmp_path)
    with pytest.raises(DloError, match="of another shape"):
        fit(tmp_path, resume=True, kind=Wider, max_epochs=4)
    assert summary(tmp_path) == finished


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


@pytest.mark.parametrize("options", [{"limit_val_batches": 0}, {"val_check_interval": 6}])
def test_one_that_does_not_keeps_none_and_is_told_once(tmp_path, monkeypatch, options):
    said: list[str] = []
    monkeypatch.setattr("dlo_framework.defaults.rank_zero_info", said.append)
    fit(tmp_path / "run", kind=NoValLoss, max_epochs=2, **options)
    assert [message.partition(";")[0] for message in said if "best checkpoint" in message] == [
        "no best checkpoint is kept: NoValLoss has logged no val_loss"
    ]
    assert summary(tmp_path / "run")["best_checkpoint"] is None


def test_best_metric_none_keeps_no_best(tmp_path):
    class Opted(Net):
        best_metric = None

    callbacks = add_default_callbacks([], run_folder=tmp_path, model=Opted(), progress_bar=False)
    assert [type(c) for c in callbacks if isinstance(c, ModelCheckpoint)] == [LastCheckpoint]


@pytest.mark.parametrize("validates", [True, False])
def test_a_metric_that_the_model_names_must_be_logged_where_there_is_a_validation(tmp_path, validates):
    class Named(NoValLoss):
        best_metric = ("val_loss", "min")

    options = {"kind": Named, "max_epochs": 1, "num_sanity_val_steps": 0}
    if validates:
        with pytest.raises(MisconfigurationException, match="could not find the monitored key"):
            fit(tmp_path / "run", **options)
    else:
        fit(tmp_path / "run", limit_val_batches=0, **options)
        assert summary(tmp_path / "run")["best_checkpoint"] is None


class Fails(Net):
    """Raises once at a place; running statistics, so that a forward pass leaves something behind."""

    place, step, ready = "", 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.BatchNorm1d(3))

    def fail(self, place):
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if (place, self.trainer.global_step) == (self.place, self.step) and self.ready in (0, ready):
            raise ValueError(place)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).sub(batch[0][:, :1]).square().mean()
        self.fail("forward")
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self):
        self.fail("backward")

    def on_before_optimizer_step(self, optimizer):
        self.fail("step")

    def on_train_batch_end(self, *_):
        self.fail("batch end")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.fail("validation")


@pytest.fixture(scope="module")
def failing_wholes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wholes")
    options = {"kind": Fails, "max_epochs": 2, "num_sanity_val_steps": 0}
    return [fit(folder / str(size), accumulate_grad_batches=size, **options) for size in (1, 2)]


#: Accumulated batches; place, step and batch of the error; the batch at which a resumed run begins, None without one.
FAILURES = [
    (1, "forward", 3, 0, 3),
    (1, "backward", 12, 0, 12),
    (1, "step", 3, 0, None),
    (1, "batch end", 4, 0, 4),
    (1, "validation", 10, 0, 10),
    (2, "forward", 3, 8, 7),
    (2, "backward", 3, 8, None),
    (2, "batch end", 7, 0, 14),
]


@pytest.mark.parametrize(("size", "place", "step", "ready", "begins"), FAILURES)
def test_a_run_that_raises_saves_the_state_before_the_batch(
    tmp_path, capsys, monkeypatch, failing_wholes, size, place, step, ready, begins
):
    options = {"kind": Fails, "max_epochs": 2, "accumulate_grad_batches": size, "num_sanity_val_steps": 0}
    with monkeypatch.context() as patch:
        for name, value in {"place": place, "step": step, "ready": ready}.items():
            patch.setattr(Fails, name, value)
        with pytest.raises(ValueError, match=place):
            fit(tmp_path / "run", **options)
    assert ("saved the state before the error" in capsys.readouterr().err) == (begins is not None)
    assert last(tmp_path / "run").exists() == (begins is not None)
    if begins is not None:
        assert fit(tmp_path / "run", resume=True, **options) == failing_wholes[size - 1][begins:]


def test_a_run_saves_by_time_and_an_interrupt_leaves_that_state(tmp_path, whole):
    class Ends(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                trainer.strategy.finish_checkpoints()
                raise SystemExit  # The state before is not saved: the run was ended.

    with pytest.raises(SystemExit):
        fit(tmp_path / "run", [Ends()], save_minutes=1e-9)
    assert step_of(last(tmp_path / "run")) == 5
    assert fit(tmp_path / "run", resume=True, save_minutes=0) == whole[5:]
    with pytest.raises(DloError, match="save_minutes must be at least 0"):
        fit(tmp_path / "run", save_minutes=-1)


class Grouped(Net):
    kind, decays = torch.optim.AdamW, (0.1,)

    def configure_optimizers(self):
        parameters = list(self.parameters())
        parts = [parameters] if len(self.decays) == 1 else [parameters[::2], parameters[1::2]]
        groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, self.decays, strict=True)]
        return self.kind(groups, lr=0.01)

    def on_save_checkpoint(self, checkpoint):
        if self.kind.__name__ == "Unnamed":  # As one of an earlier version, or of Lightning.
            del checkpoint["optimizer_states"][0]["kinds"]


_ADAM, _ADAMW = torch.optim.Adam, torch.optim.AdamW
#: Optimizer and weight decay of each parameter group, in the run and as it is resumed; the error.
REGROUPED = {
    "divided": ((_ADAMW, (0.1,)), (_ADAMW, (0.1, 0.0)), "group 0: 2 .*; group 1: 2 .* for the"),
    "divided, with equal settings": ((_ADAMW, (0.1,)), (_ADAMW, (0.1, 0.1)), ""),
    "joined, with equal settings": ((_ADAMW, (0.1, 0.1)), (_ADAMW, (0.2,)), ""),
    "adam to adamw": ((_ADAM, (0.1,)), (_ADAMW, (0.1,)), "decoupled_weight_decay=False, got True"),
    "sgd to adam": ((torch.optim.SGD, (0.1,)), (_ADAM, (0.1,)), "optimizer must be the checkpoint's.*betas"),
    "settings that torch adds to an optimizer of others": ((Lion, (0.1,)), (Lion, (0.1,)), ""),
    "adam to adamax": ((_ADAM, (0.1,)), (torch.optim.Adamax, (0.1,)), "the settings and state of Adam for Adamax;"),
    "adamw to lion, which has a part of it": ((_ADAMW, (0.1,)), (Lion, (0.1,)), "state of AdamW for Lion; choose"),
    "adam of a class of one's own": ((_ADAM, (0.1,)), (type("OwnAdam", (_ADAM,), {}), (0.1,)), ""),
    "adam of another implementation": ((_ADAM, (0.1,)), (type("FusedAdam", (torch.optim.RAdam,), {}), (0.1,)), ""),
    "adam to adamax, of a checkpoint without names": (
        (type("Unnamed", (_ADAM,), {}), (0.1,)),
        (torch.optim.Adamax, (0.1,)),
        "with 'exp_inf' in its state, got exp_avg, exp_avg_sq, step for Adamax",
    ),
}


@pytest.mark.parametrize("case", REGROUPED)
def test_settings_of_parameter_groups_reach_no_other_group_and_no_other_optimizer(tmp_path, case):
    before, after, message = REGROUPED[case]
    kinds = [type("Made", (Grouped,), {"kind": kind, "decays": decays}) for kind, decays in (before, after)]
    fit(tmp_path / "run", kind=kinds[0], max_steps=3)
    with pytest.raises(DloError, match=message) if message else contextlib.nullcontext():
        fit(tmp_path / "run", kind=kinds[1], resume=True, max_steps=5)


def test_a_script_that_changes_directory_keeps_its_run_folder_and_nan_is_null(tmp_path, monkeypatch):
    class Moves(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", torch.tensor(float("nan")))

        def on_train_start(self):
            (tmp_path / "elsewhere").mkdir()
            os.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    fit(Path("run"), kind=Moves, max_epochs=1)
    assert last(tmp_path / "run").exists()
    assert not (tmp_path / "elsewhere" / "run").exists()
    assert summary(tmp_path / "run")["metrics"]["val_loss"] is None
    assert "NaN" not in (tmp_path / "run" / runs.SUMMARY).read_text()


def test_averaged_weights_get_their_running_statistics_in_a_last_pass(tmp_path):
    """Lightning's callback runs it as one window without gradients."""
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    fit(tmp_path / "run", [averaging], kind=Fails, max_epochs=2)
    assert summary(tmp_path / "run")["status"] == "finished"


def test_a_signal_handler_that_raises_in_the_summary_leaves_a_summary(tmp_path, monkeypatch):
    """torch's raises in the main thread, wherever that is, when a loading process was killed."""
    facts, killed = RunRecord.summary, []

    def interrupted(self, *args):
        killed.append(1)
        if len(killed) == 1:
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        return facts(self, *args)

    monkeypatch.setattr(RunRecord, "summary", interrupted)
    monkeypatch.setattr(Fails, "place", "forward")
    monkeypatch.setattr(Fails, "step", 2)
    with pytest.raises(ValueError, match="forward"):
        fit(tmp_path / "run", kind=Fails)
    assert summary(tmp_path / "run")["status"] == "interrupted: ValueError"
