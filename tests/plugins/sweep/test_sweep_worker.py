"""A worker: signals, the environment of its trials, the processes that it starts, and how these end with it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from dlo_framework.lock import start_time
from dlo_plugins.sweep import trial_queue
from dlo_plugins.sweep.search_space import SweepSettings
from dlo_plugins.sweep.trial_process import CONNECTION, TrialProcess, last_error, trial_environment
from dlo_plugins.sweep.trial_queue import SweepWorkers, TrialQueue, environment_of_job, visible_gpus
from support.launchers import wait_until


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
