"""A run that is stopped and resumed has the losses, bit for bit, of one that is not; and the last checkpoint."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
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
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.optim import Lion, create_optimizer_v2

from dlo_framework.checkpoint import load, step_of
from dlo_framework.data import ResumableBatchSampler
from dlo_framework.defaults import LastCheckpoint, add_default_callbacks
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.random_streams import random_state, restore_random_state
from dlo_framework.run import runs
from dlo_framework.stop import GracefulStop, RunStopped
from dlo_framework.watch.summary import RunRecord
from support import noisy_runs
from support.noisy_data import Noisy
from support.noisy_runs import BATCH, SAMPLES, Data, Net, last
from support.trainers import quiet_trainer


class Signal(Callback):
    """Sends this process a signal, as Ctrl-C or a batch system would, at one batch of training."""

    def __init__(self, batch: int, signum: int = signal.SIGINT) -> None:
        self.batch, self.signum, self.seen = batch, signum, 0

    def on_train_batch_start(self, *_):
        self.seen += 1
        if self.seen == self.batch:
            signal.raise_signal(self.signum)


def run(folder, *, stop=None, **options):
    callbacks = [stop] if isinstance(stop, Callback) else []
    return noisy_runs.run(folder, *callbacks, **{"accumulate_grad_batches": 4, "log_every_n_steps": 2, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    losses, _ = run(tmp_path_factory.mktemp("whole") / "run")
    assert len(losses) == 30
    assert len(set(losses)) == 30
    return losses


@pytest.mark.parametrize(
    ("batch", "at"),
    [
        (3, 4),  # in the middle of an accumulation window: the window is finished first
        (8, 8),  # at the end of one
        (10, 10),  # at the epoch's last batch, where a window of two closes early
        (11, 14),  # at the first batch of the second epoch
    ],
)
def test_stopped_and_resumed(whole, tmp_path, batch, at):
    before, stopped = run(tmp_path / "run", stop=Signal(batch))
    assert stopped.exit_code == 130
    assert before == whole[:at]
    after, _ = run(tmp_path / "run", resume=True)
    assert after == whole[at:]


@pytest.mark.parametrize(
    ("fault", "target", "name", "change"),
    [
        ("Accelerate #3938, samples again", ResumableBatchSampler, "batches_from", lambda was, self, _: was(self, 0)),
        ("Accelerate #4195, epoch 0 again", ResumableBatchSampler, "set_epoch", lambda was, self, _: was(self, 0)),
        ("NeMo-RL #3842, bf16 for fp32", Net, "on_train_start", lambda was, self: was(self.bfloat16().float())),
    ],
)
def test_faults_of_others_would_be_other_losses(whole, tmp_path, monkeypatch, fault, target, name, change):
    before, _ = run(tmp_path / "run", stop=Signal(14))
    was = getattr(target, name)
    monkeypatch.setattr(target, name, lambda *args: change(was, *args))
    after, _ = run(tmp_path / "run", resume=True)
    assert after[0] != whole[len(before)], fault


def test_stopped_by_sigterm_with_workers(whole, tmp_path):
    before, stopped = run(tmp_path / "run", stop=Signal(13, signal.SIGTERM), data=Data(2))
    assert stopped.exit_code == 143
    assert multiprocessing.active_children() == [], "loading processes that outlive the run, in a notebook say"
    after, _ = run(tmp_path / "run", resume=True, data=Data(2))
    assert before + after == whole


class SaveInTheEnd(Callback):
    """Saves after training, as users do by hand."""

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")


def test_a_run_of_steps_that_ended_with_an_epoch_goes_on_with_the_next(whole, tmp_path):
    """10 batches an epoch, 3 steps: it ends with the first epoch, and saves after its end."""
    folder = tmp_path / "run"
    counted = {"max_epochs": -1, "limit_val_batches": 0, "default_root_dir": folder}
    before, _ = run(folder, stop=SaveInTheEnd(), max_steps=3, **counted)
    after, _ = run(folder, resume=True, max_steps=9, **counted)
    assert before + after == whole


@pytest.mark.parametrize("first", [{"max_epochs": 1}, {"max_steps": 3, "max_epochs": -1}])
def test_a_run_of_steps_goes_on_from_an_epochs_end(whole, tmp_path, first):
    """As after a kill: ``last.ckpt`` is of the epoch's end, when ``ModelCheckpoint`` saves by itself."""
    before, _ = run(tmp_path / "run", **first)
    after, _ = run(tmp_path / "run", resume=True, max_steps=100)
    assert before == whole[:10]
    assert after == whole[10:]


class OneRateAnEpoch(Net):
    """Its scheduler is stepped at each epoch's end, Lightning's default."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)]


def test_a_schedule_of_epochs_goes_on(tmp_path):
    options = {"kind": OneRateAnEpoch, "max_steps": 100}
    whole, _ = run(tmp_path / "whole", **options)
    assert len(whole) == 30
    for number, first in enumerate(({"stop": Signal(13)}, {"stop": Signal(10)}, {"max_epochs": 1})):
        before, _ = run(tmp_path / str(number), **options, **first)
        after, _ = run(tmp_path / str(number), resume=True, **options)
        assert before + after == whole, first


class PlainValidation(Data):
    def val_dataloader(self):
        return torch.utils.data.DataLoader(Noisy(SAMPLES), batch_size=BATCH, shuffle=True)


@pytest.mark.parametrize("kind", [Data, PlainValidation])
def test_how_often_a_run_validates_does_not_change_its_training(whole, tmp_path, kind):
    for name, options in {"often": {"val_check_interval": 2}, "none": {"limit_val_batches": 0}}.items():
        assert run(tmp_path / name, data=kind(), **options)[0] == whole, name


def test_the_random_state_comes_back_on_all_three():
    def draw():
        return random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1), np.random.normal()

    draw()  # A Gaussian is drawn in pairs; the second half is part of the state.
    state = random_state()
    drawn = draw()
    restore_random_state(state)
    assert draw() == drawn


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    class Twice(Signal):
        def on_train_batch_start(self, *_):
            super().on_train_batch_start()
            if self.seen == self.batch:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended:  # Lightning's own way to end on KeyboardInterrupt
        run(tmp_path / "run", stop=Twice(3))
    assert isinstance(ended.value.__context__, KeyboardInterrupt), "by this the command knows it"
    assert signal.getsignal(signal.SIGINT) is not None
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Wrapped(Net):
    """Stepped by an optimizer that keeps its state in the one it wraps, at the third step after every fourth."""

    def configure_optimizers(self):
        return create_optimizer_v2(self, "lookahead_adamw", lr=0.01)


class Beside(torch.optim.SGD):
    """Has state that belongs to no parameter: the number of steps, by which its rate falls."""

    def step(self, closure=None):
        shared = self.state.setdefault("shared", {"steps": 0, "factor": torch.ones(())})
        shared["steps"] += 1
        shared["factor"] *= 0.9
        for group in self.param_groups:
            group["lr"] = 0.1 * float(shared["factor"]) / shared["steps"]
        return super().step(closure)


class WithBeside(Net):
    def configure_optimizers(self):
        return Beside(self.parameters(), lr=0.1, momentum=0.9)


class Counter(torch.nn.Module):
    """Counts its inputs, in a number and a tensor that are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.sums = 0, [torch.zeros(())]

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.sums[0] = self.sums[0] + x.detach().sum()
        return x * (1 + 1e-3 * self.seen + 1e-3 * self.sums[0].tanh())

    def get_extra_state(self):
        return {"seen": self.seen, "sums": self.sums}

    def set_extra_state(self, state):
        self.seen, self.sums = state["seen"], state["sums"]


class WithExtraState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(Counter(), *self.net)


@pytest.mark.parametrize("kind", [Wrapped, WithBeside, WithExtraState])
def test_what_is_kept_elsewhere_than_in_parameters_and_their_state_goes_on(tmp_path, kind):
    whole, _ = run(tmp_path / "whole", kind=kind, accumulate_grad_batches=1)
    before, _ = run(tmp_path / "run", kind=kind, accumulate_grad_batches=1, stop=Signal(13))
    after, _ = run(tmp_path / "run", kind=kind, accumulate_grad_batches=1, resume=True)
    assert before + after == whole


def test_after_a_run_that_failed_signals_are_the_processs_own_and_the_next_is_not_stopped(tmp_path):
    class Failing(Signal):
        def on_train_batch_start(self, *_):
            super().on_train_batch_start()
            if self.seen == self.batch:
                raise OSError("no such sample")

    taken = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(OSError, match="no such sample"):
        run(tmp_path / "failed", stop=Failing(2, signal.SIGTERM))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == taken

    stop = GracefulStop(tmp_path)
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 1}
    trainer = quiet_trainer(callbacks=[Signal(3), stop], **options)
    with pytest.raises(RunStopped):
        trainer.fit(Net(), datamodule=Data())
    assert not any(thread.name.startswith("stop-signals") for thread in threading.enumerate())
    second = Net()
    trainer.fit(second, datamodule=Data())
    assert len(second.losses) == 10, "the first run was asked to stop, not this one"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == taken


class Validations(Net):
    """Records the epoch and step of each validation, and of each end of an epoch."""

    seen: ClassVar[list[tuple[str, int, int]]] = []

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.seen.append(("validation", self.trainer.current_epoch, self.trainer.global_step))

    def on_train_epoch_end(self):
        self.seen.append(("epoch", self.trainer.current_epoch, self.trainer.global_step))


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (30, {}),  # The last epoch ends with it.
        (13, {"max_steps": 13, "val_check_interval": 3}),  # The run ends with it, and is not stopped.
        (18, {"max_steps": 25, "check_val_every_n_epoch": None, "val_check_interval": 6}),
    ],
)
def test_a_run_stopped_right_before_a_validation_has_it_when_it_is_resumed(tmp_path, monkeypatch, batch, options):
    found, options = [], {"kind": Validations, "accumulate_grad_batches": 1, **options}
    for stop in (None, Signal(batch)):
        monkeypatch.setattr(Validations, "seen", [])
        losses, stopped = run(tmp_path / str(stop), stop=stop, **options)
        assert (stopped is None) == (stop is None or batch == options.get("max_steps"))
        if stopped is not None:
            losses += run(tmp_path / str(stop), resume=True, **options)[0]
        best = [path.name for path in (tmp_path / str(stop) / "checkpoints").glob("epoch=*")]
        found.append((Validations.seen, losses, best))
    assert found[0] == found[1]


class Killed(Callback):
    """Saves a checkpoint at the end of the last step, as ModelCheckpoint does, and ends the run in the validation."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.path)

    def on_validation_start(self, trainer, *_):
        if trainer.global_step == trainer.max_steps:
            raise OSError("killed")


@pytest.mark.parametrize(
    ("options", "late"),
    [
        ({"max_steps": 13, "val_check_interval": 3}, False),
        ({"max_steps": 20}, True),
        ({"max_steps": 20, "max_epochs": 2}, False),
    ],
    ids=["in mid-epoch", "at an epoch's end, loaded after setup", "at the last epoch's end"],
)
def test_a_run_killed_between_its_last_step_and_validation_has_it_when_resumed(tmp_path, monkeypatch, options, late):
    if late:
        monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", True)
    found, options = [], {"kind": Validations, "accumulate_grad_batches": 1, **options}
    for name in ("whole", "killed"):
        monkeypatch.setattr(Validations, "seen", [])
        folder = tmp_path / name
        if name == "killed":
            saved = tmp_path / "saved.ckpt"
            with pytest.raises(OSError, match="killed"):
                run(folder, stop=Killed(saved), **options)
            shutil.rmtree(folder / "checkpoints" / "last.ckpt", ignore_errors=True)
            saved.rename(folder / "checkpoints" / "last.ckpt")
            assert run(folder, resume=True, **options) == ([], None)
        else:
            run(folder, **options)
        assert run(folder, resume=True, **options) == ([], None), "nothing is left to do"
        best = [path.name for path in (folder / "checkpoints").glob("epoch=*")]
        found.append((Validations.seen, best))
    assert found[0] == found[1]
    assert found[0][0]
    assert found[0][1]


# --- a run's last checkpoint is that of its end, however it ends, with its metrics; a longer run resumes from there ---


class NoValLoss(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_error", self.net(batch[0]).square().mean())


class LogsTraining(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_error", loss, on_step=False, on_epoch=True)
        return loss


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
    return noisy_runs.run(folder, *callbacks, **options)[0]


def summary(folder):
    return json.loads((folder / runs.SUMMARY).read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
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
def test_the_last_checkpoint_is_of_the_end_and_a_longer_run_goes_on_from_it(tmp_path, plain, end):
    step, options = ENDS[end]
    count = Saves()
    options = {"val_check_interval": 6, **options}
    before = fit(tmp_path / "run", [*options.pop("callbacks", []), count], **options)
    assert before == plain[:step]
    assert step_of(last(tmp_path / "run")) == step
    assert summary(tmp_path / "run")["steps"] == step
    writes = [at for at in count.steps if at == step]
    best = summary(tmp_path / "run")["best_checkpoint"] or ""
    assert len(writes) == 1 + (f"step={step}-" in best), "the end is saved once, and a best one"
    assert not list(last(tmp_path / "run").parent.glob("last-v*"))
    after = [WeightEMA(0.9)] if end == "WeightEMA" else [EMAWeightAveraging(decay=0.9)] if "average" in end else []
    assert fit(tmp_path / "run", after, resume=True, val_check_interval=6) == plain[step:]


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
    before = fit(tmp_path / "run", max_steps=7, **options)
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
def wholes(tmp_path_factory):
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
def test_what_raises_saves_the_state_before_it(tmp_path, capsys, monkeypatch, wholes, size, place, step, ready, begins):
    options = {"kind": Fails, "max_epochs": 2, "accumulate_grad_batches": size, "num_sanity_val_steps": 0}
    with monkeypatch.context() as patch:
        for name, value in {"place": place, "step": step, "ready": ready}.items():
            patch.setattr(Fails, name, value)
        with pytest.raises(ValueError, match=place):
            fit(tmp_path / "run", **options)
    assert ("saved the state before the error" in capsys.readouterr().err) == (begins is not None)
    assert last(tmp_path / "run").exists() == (begins is not None)
    if begins is not None:
        assert fit(tmp_path / "run", resume=True, **options) == wholes[size - 1][begins:]


def test_a_run_saves_by_time_and_an_interrupt_leaves_that_state(tmp_path, plain):
    class Ends(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                trainer.strategy.finish_checkpoints()
                raise SystemExit  # The state before is not saved: the run was ended.

    with pytest.raises(SystemExit):
        fit(tmp_path / "run", [Ends()], save_minutes=1e-9)
    assert step_of(last(tmp_path / "run")) == 5
    assert fit(tmp_path / "run", resume=True, save_minutes=0) == plain[5:]
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
#: Optimizer and weight decay of each parameter group, in the first run and in the resumed one; the expected error.
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
