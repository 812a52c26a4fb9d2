"""The callback of a trial and its worker: reports, stops, resumes, signals, and processes that end with it."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.lock import start_time
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.sweep import trial_queue
from dlo_plugins.sweep.ray_engine import name_trial, trial_number
from dlo_plugins.sweep.search_space import SweepSettings
from dlo_plugins.sweep.sweep_trial import SweepTrial
from dlo_plugins.sweep.trial_process import CONNECTION, TrialProcess, last_error, trial_environment
from dlo_plugins.sweep.trial_queue import SweepWorkers, TrialQueue, environment_of_job, visible_gpus
from support.launchers import wait_until
from support.trainers import Squares, quiet_trainer


class Task(Squares):
    def __init__(self, lr=0.1, schedule=False) -> None:
        super().__init__(torch.nn.Linear(3, 1), lr=lr)
        self.schedule = schedule
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.5)

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


# A worker: signals, the environment of its trials, the processes that it starts, and how these end with it


@pytest.fixture
def queue(tmp_path):
    settings = SweepSettings({}, {"x": {"uniform": [0, 1]}}, "loss", "minimize", 2, sampler="random")
    (tmp_path / "sweep").mkdir()
    return TrialQueue(tmp_path / "sweep", settings, create=True)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_worker_that_is_asked_to_stop_leaves_its_trial_to_the_next(queue, signum, code):
    values, before = [], signal.getsignal(signum)

    def stopped(claim, answer):
        values.append(claim.values)
        answer({"step": 1, "value": 0.5})
        os.kill(os.getpid(), signum)
        return 128 + 15

    assert SweepWorkers(queue, runner=stopped).run() == code
    assert queue.unfinished() == 2
    again = queue.claim()
    assert (again.number, again.is_continued, again.values) == (0, True, values[0])
    assert signal.getsignal(signum) is before


def test_a_process_that_is_killed_is_started_again(queue):
    codes = iter([-9, 0, 0])

    def run(claim, answer):
        code = next(codes)
        if code == 0:
            answer({"step": 1, "value": 0.5})
        return code

    assert SweepWorkers(queue, runner=run).run() == 0
    trials = queue.study.get_trials(deepcopy=False)
    assert [len(trial.user_attrs["starts"]) for trial in trials] == [2, 1]
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE"]


def test_trials_of_workers_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(trial_queue.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(trial_queue, "_HAS_AFFINITY", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5,7")
    assert visible_gpus() == ["0", "1", "5", "7"]
    assert [environment_of_job(index, 2)["CUDA_VISIBLE_DEVICES"] for index in range(2)] == ["0,1", "5,7"]
    assert [environment_of_job(index, 8)["CUDA_VISIBLE_DEVICES"] for index in range(8)] == list("00115577")
    assert environment_of_job(0, 2)["OMP_NUM_THREADS"] == "4"
    assert environment_of_job(0, 1) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment_of_job(0, 2) == {}


def test_a_trial_is_no_rank_of_another_run(monkeypatch):
    for name in ("MASTER_PORT", "RANK", "SLURM_NTASKS", "DLO_RUN_FOLDER"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    own = trial_environment({"A": "b"})
    assert not {"MASTER_PORT", "RANK", "SLURM_NTASKS", "DLO_RUN_FOLDER"} & own.keys()
    assert (own["SLURM_JOB_ID"], own["A"], own["PATH"]) == ("7", "b", os.environ["PATH"])


#: A `dlo_framework` that reports three values and prints the answers; it is found before the installed one.
FAKE = f"""
import json, os, sys, time
from multiprocessing.connection import Connection
worker = Connection(int(os.environ["{CONNECTION}"]))
for step in range(1, 4):
    worker.send({{"step": step, "value": step / 2}})
    print(json.dumps(worker.recv()), flush=True)
if "sleep" in sys.argv:
    time.sleep(60)
print("an error: it ends")
sys.exit(5)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Python puts the working directory before all others.
    package = tmp_path / "fake" / "dlo_framework"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE)
    return {"PYTHONPATH": str(package.parent)}


def test_a_process_is_answered_until_it_ends(tmp_path, fake):
    reports = []

    def answer(report):
        reports.append(report)
        return {"stop": report["step"] == 2}

    process = TrialProcess(["fit"], tmp_path, trial_environment(fake))
    assert process.wait(answer) == 5
    assert [report["value"] for report in reports] == [0.5, 1.0, 1.5]
    log = (tmp_path / "trial.log").read_text().splitlines()
    assert [json.loads(line)["stop"] for line in log[:3]] == [False, True, False]
    assert last_error(tmp_path) == "an error: it ends"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_ends_with_its_worker(tmp_path, fake):
    code = (
        "import sys; from pathlib import Path; from dlo_plugins.sweep.trial_process import *\n"
        f"process = TrialProcess(['fit', 'sleep'], Path({str(tmp_path)!r}), trial_environment({fake!r}))\n"
        "print(process.process.pid, flush=True)\n"
        "process.wait(lambda report: {'stop': False})\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    wait_until(lambda: len((tmp_path / "trial.log").read_text().splitlines()) >= 3)
    worker.kill()
    worker.communicate()
    wait_until(lambda: not start_time(pid))  # Empty once the process has ended.


# --- parts of the engine on Ray that need no cluster; `tests/e2e/test_sweep_on_ray.py` runs sweeps -------------------


def test_a_member_that_copies_another_keeps_its_number():
    """Population-based training gives a trial the full config of the one that it copies."""
    experiment = pytest.importorskip("ray.tune.experiment")
    config = {"number": 7, "values": {"lr": 0.1}}
    trial = experiment.Trial("stub", stub=True, config=config, trial_name_creator=name_trial)
    trial.set_config({"number": 3, "values": {"lr": 0.2}})
    assert trial_number(trial) == 7
