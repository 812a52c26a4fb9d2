"""Trials of MicroBatchFinder in processes of their own, which may die on one rank of two, however ranks are started."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework import runs
from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.run_setup import find_start_checkpoint
from dlo_framework.testing import run_distributed
from dlo_plugins.callbacks.micro_batch_finder import MicroBatchFinder, trial_child, trial_ranks
from dlo_plugins.callbacks.micro_batch_finder.batch_search import find_largest, is_out_of_memory
from dlo_plugins.callbacks.micro_batch_finder.trial_events import TrialOrder, read_events, write_event
from dlo_plugins.strategies.zero import ZeroStrategy
from support.launchers import free_port, slurm_task

#: A trial process that tries 4, 8 and 16 samples, the last only where it is not known; it ends as its argument says.
PROCESS = """
import json, os, signal, subprocess, sys, time
order = json.loads(os.environ["DLO_MICRO_BATCH_TRIAL"])
def tell(kind, **values):
    with open(order["events"], "a") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\\n")
if sys.argv[1] == "unbuilt":
    sys.exit("ValueError: no such model")
tell("begin", present=4, limit=100)
known = order["known"]
for size in (4, 8, 16):
    if str(size) in known:
        continue
    tell("try", size=size)
    if size == 16 and sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if size == 16 and sys.argv[1] == "memory":
        tell("out_of_memory", error="out of memory: 5 GiB")
        time.sleep(60)
    if size == 16 and sys.argv[1] == "silent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid} {os.environ['DLO_SCRATCH_RUN']}")
        time.sleep(60)
    tell("fits", size=size, peak_bytes=size)
tell("done", found=8 if known.get("16") is False else 16)
"""

ALONE = SimpleNamespace(world_size=1)
AMPLE = 10**12


def search(how, *more, timeout=30.0):
    return trial_ranks.search_in_processes(ALONE, command=[sys.executable, "-c", PROCESS, how, *more], timeout=timeout)


@pytest.mark.parametrize(("how", "ended"), [("signal", "signal 9 (SIGKILL)"), ("memory", "out of memory: 5 GiB")])
def test_a_process_that_dies_is_a_result(how, ended):
    found = search(how)
    assert (found.present, found.limit, found.largest) == (4, 100, 8)
    assert found.outcomes == {4: True, 8: True, 16: False}
    assert found.details == {4: {"peak_bytes": 4}, 8: {"peak_bytes": 8}, 16: {"ended": ended}}


def test_a_process_that_fails_otherwise_is_an_error():
    with pytest.raises(DloError, match=r"process of rank 0: exit code 1: ValueError: no such model; run without"):
        search("unbuilt")


def test_a_silent_process_is_ended_with_all_that_it_started(tmp_path):
    with pytest.raises(DloError, match=r"no sign of progress in 1 s \(timeout\)"):
        search("silent", str(tmp_path / "pids"), timeout=1.0)
    *pids, folder = (tmp_path / "pids").read_text().split()
    until = time.monotonic() + 10  # The kernel ends killed processes when it comes to them.
    while any(is_alive(int(pid)) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(int(pid)) for pid in pids)
    assert not Path(folder).exists()


def is_alive(pid):
    """Returns whether a process runs: one that nobody has waited for has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_trial_ends_with_the_rank_that_has_started_it(tmp_path):
    process = tmp_path / "process.py"
    process.write_text(PROCESS)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from dlo_plugins.callbacks.micro_batch_finder.trial_ranks import TrialProcess
import time
TrialProcess([sys.executable, {str(process)!r}, "silent", {str(tmp_path / "pids")!r}], {{}}, 1, 60.0)
time.sleep(60)
"""
    rank = subprocess.Popen([sys.executable, "-c", code])
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    trial = int(pids.read_text().split()[0])
    rank.kill()
    rank.wait()
    try:
        wait_until(lambda: not is_alive(trial))
    finally:
        os.kill(int(pids.read_text().split()[1]), signal.SIGKILL)


def wait_until(happened, seconds=60.0):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_ranks_agree_on_the_smallest_size_that_was_lost():
    found = trial_ranks.Found()

    def events(*fits, tried):
        sizes = [{"kind": "fits", "size": size, "peak_bytes": tried} for size in fits]
        return [{"kind": "begin", "present": 4, "limit": 9}, *sizes, {"kind": "try", "size": tried}]

    fast, slow = events(4, 8, tried=16), events(4, tried=8)
    trial_ranks._merge(found, [fast, slow])
    assert found.outcomes == {4: True}
    assert found.details[4] == {"peak_bytes": 16}
    reports = [(own, "", trial_ranks.State.LOST) for own in (fast, slow)]
    assert trial_ranks._lost_size(found, reports) == 8
    assert trial_ranks._lost_size(found, [([], "", trial_ranks.State.LOST)]) is None


def test_events_of_a_process_that_was_killed_while_it_wrote(tmp_path):
    path = tmp_path / "events"
    assert read_events(path) == []
    write_event(path, "try", size=3)
    with open(path, "a") as file:
        file.write('{"kind": "fi')
    assert read_events(path) == [{"kind": "try", "size": 3}]
    order = TrialOrder("here", {3: True, 6: False}, 17)
    assert TrialOrder.from_text(order.to_text()) == order


@pytest.mark.parametrize("bound", [1, 7, 99, 100, 1000])
def test_the_search_ends_within_the_tolerance(bound):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= bound

    found = find_largest(fits, 8, 500, tolerance=0.1)
    assert found <= min(bound, 500) <= found * 1.1 + 1
    exact = len(tried)
    tried.clear()
    assert find_largest(fits, 8, 500) == min(bound, 500)
    assert exact <= len(tried)
    assert bound != 100 or exact < len(tried)


def test_the_files_of_a_trial_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv(runs.SCRATCH, str(tmp_path / "scratch"))
    assert runs.new_run(tmp_path / "runs") == tmp_path / "scratch" / "version_0"
    assert not (tmp_path / "runs").exists()
    assert find_start_checkpoint("auto", lambda: tmp_path / "runs", trains=True) == (None, False)


def count_allocations(rank, world_size, limit):
    """Returns how many megabytes a process can allocate after a limit."""
    trial_child.limit_memory(torch.device("cpu"), limit)
    held = []
    try:
        while len(held) < 100:
            held.append(torch.ones(250_000))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return len(held)


def test_a_limit_on_what_a_process_allocates():
    (megabytes,) = run_distributed(count_allocations, 1, 50_000_000, backend=None)
    assert 25 < megabytes <= 50


def test_an_error_that_memory_has_caused_counts():
    error = RuntimeError("the compiler failed")
    error.__cause__ = ValueError("shapes")
    assert not is_out_of_memory(error)
    error.__cause__.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_a_cpu_without_any_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dlo_plugins.callbacks.micro_batch_finder.micro_batch_finder_callback.has_memory_limit", bool)
    with pytest.raises(DloError, match=r"neither the shell \(ulimit -v\)\s+nor a container limits"):
        fit(tmp_path, MicroBatchFinder(command=["true"]), strategy=ZeroStrategy(2), devices=1)
    with pytest.raises(DloError, match=r"own_processes must be true where .* got false under ZeroStrategy"):
        fit(tmp_path, MicroBatchFinder(own_processes=False), strategy=ZeroStrategy(2), devices=1)


def test_a_limit_of_the_shell_is_seen(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (10**9, resource.RLIM_INFINITY))
    assert trial_ranks.has_memory_limit()


def test_a_program_that_cannot_be_repeated_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trial_ranks, "_IS_INTERACTIVE", True)
    with pytest.raises(DloError, match=r"a program that can be repeated.* got a notebook; run it as a script"):
        fit(tmp_path, MicroBatchFinder(memory_limit_bytes=AMPLE, own_processes=True))


def test_a_process_counts_what_it_needs():
    assert trial_child.peak_bytes(torch.device("cpu")) > 10**7


class Data(ResumableDataModule):
    def __init__(self):
        super().__init__(batch_size=40, num_workers=0)

    def train_dataloader(self):
        return self.train_loader(Numbers())


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((6,), index / 28), index % 3


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def fit(folder, *callbacks, **options):
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=folder, callbacks=list(callbacks), **options)
    trainer.fit(Net(), datamodule=Data())


class Dies(Net):
    """Ends one rank's trial process by a signal above 70 samples, or raises on the other above 50."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        rank, size = self.global_rank, len(batch[0])
        if self.how == "signal" and rank == 1 and size > 70:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "error" and rank == 0 and size > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)


SCRIPT = """
import json, os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
import torch
import dlo_framework as dlo
from lightning.pytorch import seed_everything
from test_micro_batch_trials import AMPLE, Data, Dies, Losses, MicroBatchFinder
from dlo_plugins.callbacks.dynamic_batch_size import DynamicBatchSize

how, by_hand = sys.argv[1], sys.argv[2] == "by hand"
seed_everything(1)
losses = Losses()
finder = MicroBatchFinder(memory_limit_bytes=AMPLE, margin=0.0, steps_per_trial=1, timeout=120.0)
size = DynamicBatchSize({{0: 40, "50%": 200}}, max_micro_batch={{"signal": 70, "error": 50}}[how] if by_hand else None)
trainer = dlo.Trainer(
    accelerator="cpu", devices=2, strategy="zero2", max_epochs=2, enable_progress_bar=False, logger=False,
    callbacks=[losses, size] + ([] if by_hand else [finder]), run_name=how + sys.argv[2].replace(" ", "-"),
    num_sanity_val_steps=0,
)
trainer.fit(Dies(how), datamodule=Data())
if trainer.global_rank == 0:
    Path(how + sys.argv[2] + ".json").write_text(json.dumps([losses.seen, finder.per_rank]))
"""


def start(launcher, script, *arguments):
    """Runs a script on two ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script.name, *arguments]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        command += [script.name, *arguments]
    settings = [environment]
    if launcher == "slurm":
        port = free_port()
        settings = [environment | slurm_task(rank, 2, port) for rank in range(2)]
    started = [
        subprocess.Popen(command, cwd=script.parent, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for own in settings
    ]
    for process in started:
        output, _ = process.communicate(timeout=250)
        assert process.returncode == 0, output.decode()[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "how"), [("own", "signal"), ("torchrun", "error"), ("slurm", "signal")])
def test_two_ranks_find_it_and_train_as_with_that_size(tmp_path, launcher, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])]))
    for what in ("search", "by hand"):
        start(launcher, script, how, what)
    (found, size), (expected, _) = (
        json.loads((tmp_path / f"{how}{what}.json").read_text()) for what in ("search", "by hand")
    )
    assert size == {"signal": 70, "error": 50}[how]
    assert found == expected
    (run,) = (tmp_path / "runs" / f"{how}search").iterdir()
    (other,) = (tmp_path / "runs" / f"{how}by-hand").iterdir()
    # Nothing else is written: no lock, log or second run.
    assert {path.name for path in run.iterdir()} == {"batch_size.json"} | {path.name for path in other.iterdir()}
    report = json.loads((run / "batch_size.json").read_text())
    assert any(trial["fits"] and trial["peak_bytes"] > 10**7 for trial in report["trials"])
    assert any(
        "SIGKILL" in trial.get("ended", "") or "out of memory" in trial.get("ended", "") for trial in report["trials"]
    )
