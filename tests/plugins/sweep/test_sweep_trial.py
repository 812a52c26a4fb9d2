"""The callback of a trial: what it reports, where it stops, on one rank and on two, and after a resume."""

import contextlib
import multiprocessing
import os
import threading
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.sweep.sweep_trial import SweepTrial
from dlo_plugins.sweep.trial_process import CONNECTION
from support.trainers import quiet_trainer


class Task(LightningModule):
    def __init__(self, lr=0.1, schedule=False) -> None:
        super().__init__()
        self.lr, self.schedule = lr, schedule
        self.net = torch.nn.Linear(3, 1)
        with torch.no_grad():
            self.net.weight.fill_(0.5)
            self.net.bias.fill_(0.1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=self.lr)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Rates(Callback):
    """Records the learning rate and the weight decay of each epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer, pl_module):
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["weight_decay"]))


class FakeWorker:
    """Other end of the connection: it answers `stop` at one validation, and dies before another."""

    def __init__(self, stop_at: int = 0, dies_at: int = 0) -> None:
        self.reports: list[dict] = []
        self._connection, theirs = multiprocessing.Pipe()
        os.environ[CONNECTION] = str(os.dup(theirs.fileno()))
        self._stop_at, self._dies_at = stop_at, dies_at
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with self._connection as worker, contextlib.suppress(EOFError):
            while True:
                self.reports.append(worker.recv())
                if len(self.reports) == self._dies_at:
                    return
                worker.send({"stop": len(self.reports) == self._stop_at})


def fit(folder, *callbacks, task=None, strategy="auto", devices=1, epochs=5, ckpt_path=None, batch_size=4, **options):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 3))
    task = task or Task()
    options = {"devices": devices, "strategy": strategy, "max_epochs": epochs, **options}
    trainer = quiet_trainer(callbacks=list(callbacks), default_root_dir=folder, **options)
    use_canonical_checkpoints(trainer)
    loaders = DataLoader(data, batch_size=batch_size), DataLoader(data, batch_size=batch_size)
    trainer.fit(task, *loaders, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def test_each_validation_is_reported_and_the_run_stops_where_it_is_told(tmp_path):
    worker = FakeWorker(stop_at=3)
    trainer = fit(tmp_path, SweepTrial("val_loss", number=7), num_sanity_val_steps=2)
    assert [one["step"] for one in worker.reports] == [1, 2, 3], "without the sanity check"
    assert [one["global_step"] for one in worker.reports] == [4, 8, 12]
    values = [one["value"] for one in worker.reports]
    assert values == sorted(values, reverse=True)
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    assert CONNECTION not in os.environ


def test_a_resumed_trial_counts_on(tmp_path):
    FakeWorker()
    fit(tmp_path, SweepTrial("val_loss"), epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    worker = FakeWorker()
    fit(tmp_path, SweepTrial("val_loss"), epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert [one["step"] for one in worker.reports] == [3, 4]


def test_a_run_whose_worker_has_died_ends_at_its_validation(tmp_path):
    worker = FakeWorker(dies_at=2)
    with pytest.raises(Exception, match="the sweep's worker has died"):
        fit(tmp_path, SweepTrial("val_loss"))
    assert len(worker.reports) == 2


def test_an_unknown_metric_and_a_run_without_validation_are_errors(tmp_path):
    with pytest.raises(DloError, match=r"SweepTrial: unknown metric 'val_los'; did you mean 'val_loss'\?"):
        fit(tmp_path, SweepTrial("val_los"))
    with pytest.raises(DloError, match="SweepTrial: the run must validate to log val_loss"):
        fit(tmp_path, SweepTrial("val_loss"), limit_val_batches=0)


STRATEGIES = {"ddp": lambda: "ddp", "zero2": lambda: ZeroStrategy(2), "fsdp": FSDPStrategy}


def train_on_ranks(rank, world_size, folder):
    """Returns, for each strategy, the steps of this rank, the reports, and the weights at the end."""
    register_data_parallel()
    found = {}
    for name, make in STRATEGIES.items():
        worker = FakeWorker(stop_at=2) if rank == 0 else None
        task = Task()
        trainer = fit(folder, SweepTrial("val_loss"), task=task, strategy=make(), devices=world_size, batch_size=8)
        content = trainer.strategy.lightning_module_state_dict()
        full = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in content.items()}
        weights = {key: value.tolist() for key, value in full.items()}
        found[name] = trainer.global_step, worker.reports if worker is not None else [], weights
    return found


def test_two_ranks_stop_together_with_the_weights_of_one_process(tmp_path):
    one = train_on_one(tmp_path)
    for rank, found in enumerate(run_distributed(train_on_ranks, 2, tmp_path, backend=None, timeout=200)):
        for name, (steps, reports, weights) in found.items():
            assert steps == 2, (name, rank)  # Two epochs of one step.
            for key, value in weights.items():
                assert torch.allclose(torch.tensor(value), one[key], rtol=1e-5), (name, key)
            if rank == 0:
                assert [report["step"] for report in reports] == [1, 2], name
                assert reports[1]["value"] < reports[0]["value"], name


def train_on_one(folder):
    """One process, all samples in a step, as on two ranks: Lightning shuffles what it divides among ranks."""
    worker, task = FakeWorker(stop_at=2), Task()
    fit(folder, SweepTrial("val_loss"), task=task, batch_size=16)
    assert len(worker.reports) == 2
    return {key: value.clone() for key, value in task.state_dict().items()}


@pytest.mark.parametrize("schedule", [False, True])
def test_a_copied_trial_trains_with_the_configs_options_and_its_schedules_progress(tmp_path, schedule):
    path = tmp_path / "member.ckpt"
    make = partial(Task, schedule=schedule)
    fit(tmp_path, SweepTrial("val_loss", checkpoint=str(path)), task=make(0.1), epochs=2)
    kept, changed = Rates(), Rates()
    fit(tmp_path, SweepTrial("val_loss"), kept, task=make(0.4), epochs=4, ckpt_path=path)
    fit(tmp_path, SweepTrial("val_loss", restarts_optimizer=True), changed, task=make(0.4), epochs=4, ckpt_path=path)
    factors = [0.5**epoch if schedule else 1.0 for epoch in (1, 2, 3)]
    assert len(changed.seen) == len(kept.seen)
    first = len(factors) - len(changed.seen)
    expected = factors[first:]
    assert [rate for rate, _ in changed.seen] == pytest.approx([0.4 * factor for factor in expected])
    assert [rate for rate, _ in kept.seen] == pytest.approx([0.1 * factor for factor in expected])
    assert {decay for _, decay in changed.seen} == {0.4}
    assert {decay for _, decay in kept.seen} == {0.1}
