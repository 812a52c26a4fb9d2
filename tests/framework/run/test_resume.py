"""A run that is stopped and resumed has the same losses, bit for bit, as one that is not."""

import multiprocessing
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from timm.optim import create_optimizer_v2

from dlo_framework.data import ResumableBatchSampler
from dlo_framework.random_streams import random_state, restore_random_state
from dlo_framework.stop import GracefulStop, RunStopped
from support import noisy_runs
from support.noisy_data import Noisy
from support.noisy_runs import BATCH, SAMPLES, Data, Net
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
def test_a_run_that_is_stopped_right_before_a_validation_has_it_when_it_is_resumed(
    tmp_path, monkeypatch, batch, options
):
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
def test_a_run_killed_between_its_last_step_and_the_validation_has_it_when_it_is_resumed(
    tmp_path, monkeypatch, options, late
):
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
