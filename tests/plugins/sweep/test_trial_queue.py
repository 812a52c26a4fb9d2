"""The queue and its journal: each trial runs once, one of a dead worker is continued, kills lose and double none."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.storages.journal import JournalFileBackend

from dlo_framework.errors import DloError
from dlo_framework.lock import RunLock
from dlo_plugins.sweep import trial_queue
from dlo_plugins.sweep.search_space import SweepSettings, check_methods, read_settings, trial_seed
from dlo_plugins.sweep.trial_queue import JournalLock, SweepWorkers, TrialQueue, trial_config

SPACE = {"x": {"uniform": [-1, 1]}, "y": {"log": [1e-3, 1e1]}}


def settings(**options):
    own = {"config": {}, "space": SPACE, "metric": "loss", "direction": "minimize", "trials": 5, "sampler": "random"}
    return SweepSettings(**{**own, **options})


@pytest.fixture
def make(tmp_path):
    """Makes queues of one sweep; each is another process's as far as the storage is concerned."""

    def make_queue(create=True, folder="sweep", **options):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        return TrialQueue(tmp_path / folder, settings(**options), create=create)

    return make_queue


def forget(queue, number):
    """Leaves a trial as the kill of its worker does: its lock names a process that does not exist."""
    lock = queue._locks.pop(number)
    lock._ended.set()
    path = lock._own
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 2**22 + 1}))
    lock._own = None


def states(queue):
    return [trial.state.name for trial in queue.study.get_trials(deepcopy=False)]


@pytest.mark.parametrize("storage", ["", "sqlite"])
def test_two_processes_share_the_trials_and_each_runs_once(make, tmp_path, storage):
    url = f"sqlite:///{tmp_path}/s.db" if storage else ""
    one, other = make(storage=url), make(create=False, storage=url)
    claims = [queue.claim() for queue in (one, other, one, other, one)]
    assert [claim.number for claim in claims] == [0, 1, 2, 3, 4]
    assert one.claim() is None
    assert other.claim() is None
    assert len({tuple(claim.values.items()) for claim in claims}) == 5
    for queue, claim in zip((one, other, one, other, one), claims, strict=True):
        queue.report(claim.number, 1, 0.5)
        assert queue.finish(claim.number) == "COMPLETE"
        queue.release(claim.number)
    assert one.unfinished() == 0
    assert states(other) == ["COMPLETE"] * 5


def test_values_depend_on_seed_and_number_and_not_on_the_worker(make):
    first = [make(folder="a").claim().values for _ in range(1)]
    queues = [make(folder="b"), make(folder="b", create=False)]
    assert [queues[1].claim().values] == first
    second = queues[0].claim().values
    queue = make(folder="c")
    queue.claim()
    assert queue.claim().values == second
    assert make(folder="d", seed=1).claim().values != first[0]
    assert len({trial_seed(seed, number) for seed in range(20) for number in range(50)}) == 1000


def test_a_dead_workers_trial_is_continued_with_its_values_before_others_start(make):
    one, other = make(), make(create=False)
    dead = one.claim()
    one.report(dead.number, 1, 0.7)
    assert other.claim().number == 1, "its worker lives"
    forget(one, dead.number)
    again = other.claim()
    assert (again.number, again.is_continued, again.values) == (0, True, dead.values)
    assert other.report(0, 1, 0.1) is False, "a validation that is repeated"
    other.report(0, 2, 0.6)
    other.finish(0)
    trial = other.study.get_trials(deepcopy=False)[0]
    assert trial.intermediate_values == {1: 0.7, 2: 0.6}
    assert trial.value == 0.6


def test_a_trial_whose_run_is_still_ending_is_left_alone(make):
    one, other = make(trials=1), make(create=False, trials=1)
    dead = one.claim()
    forget(one, dead.number)
    run = dead.folder / "version_0"
    run.mkdir()
    lock = RunLock(run.resolve())
    lock.acquire()
    assert other.claim() is None
    lock.release()
    assert other.claim().number == 0


def test_a_finished_run_of_a_dead_worker_does_not_run_again(make):
    one, other = make(trials=2), make(create=False, trials=2)
    for number in range(2):
        one.claim()
        one.report(number, 1, 0.5)
    run = one.trial_folder(0) / "version_0"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"status": "finished"}))
    one.storage.set_trial_user_attr(one._id(1), trial_queue.PRUNED, 1)
    forget(one, 0)
    forget(one, 1)
    assert other.claim() is None
    assert states(other) == ["COMPLETE", "PRUNED"]
    assert other.study.get_trials()[0].user_attrs["run"] == "trials/0000/version_0"


def test_a_trial_that_kills_its_process_again_and_again_has_failed(make):
    queue = make(trials=1)
    for _ in range(trial_queue.STARTS):
        claim = queue.claim()
        queue.note_start(claim.number)
        forget(queue, claim.number)
    assert queue.claim() is None
    assert states(queue) == ["FAIL"]
    assert "its process died 3 times without progress" in queue.describe(0)


def test_more_trials_are_added_and_fewer_are_refused(make, tmp_path):
    make(trials=2)
    assert len(states(make(trials=5))) == 5
    settings(trials=5).write(tmp_path)
    with pytest.raises(DloError, match="sweep: --trials must be at least the 5 of the sweep"):
        read_settings(tmp_path).check_same(tmp_path, settings(trials=4))
    with pytest.raises(DloError, match=r'sweep: sampler must be that of the sweep in .*, got "tpe" after "random"'):
        read_settings(tmp_path).check_same(tmp_path, settings(sampler="tpe"))


def test_settings_are_read_as_they_were_written(tmp_path):
    own = settings(config={"a": {"sizes": {0: 12, "30%": 16}}}, space={"a.b": [{0: 1}, {0: 2}]}, words=["--x", "1"])
    own.write(tmp_path)
    assert read_settings(tmp_path) == own
    read_settings(tmp_path).check_same(tmp_path, own)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(DloError, match=r"sweep\.json must be the settings of a sweep"):
        read_settings(tmp_path)


def test_a_storage_with_another_sweep_of_that_name_is_refused(make, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    make(folder="one/sweep", storage=url)
    with pytest.raises(DloError, match="must have no sweep 'sweep' of another folder"):
        make(folder="two/sweep", storage=url)


def test_a_storage_that_does_not_open_is_one_sentence(make, tmp_path):
    with pytest.raises(DloError, match="sweep: --storage must be a database that opens"):
        make(storage="nosuchdb://host/x")
    with pytest.raises(DloError, match="sweep: --storage must be in a folder that exists"):
        make(storage=f"journal:///{tmp_path}/no/journal.log")


def test_a_grid_is_run_once_each(make):
    space = {"a": [1, 2, 3], "b": {"int": [0, 2], "step": 2, "when": {"a": [1, 3]}}}
    queue = make(space=space, sampler="grid", trials=5)
    found = [claim.values for claim in iter(queue.claim, None)]
    expected = [{"a": 1, "b": 0}, {"a": 1, "b": 2}, {"a": 2}, {"a": 3, "b": 0}, {"a": 3, "b": 2}]
    assert sorted(found, key=str) == sorted(expected, key=str)


def objective(claim, answer):
    """A parabola around x = 0.3, y = 1 that is approached over 9 validations."""
    goal = (claim.values["x"] - 0.3) ** 2 + math.log10(claim.values["y"]) ** 2
    for step in range(1, 10):
        if answer({"step": step, "value": goal + 1 / step})["stop"]:
            return 0
    return 0


@pytest.mark.parametrize(
    "sampler", ["tpe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gp", "cmaes", "random"))]
)
def test_samplers_run_and_the_model_based_ones_come_nearer(make, sampler):
    queue = make(sampler=sampler, trials=30)
    assert SweepWorkers(queue, runner=objective).run() == 0
    values = [trial.value for trial in queue.study.get_trials(deepcopy=False)]
    assert states(queue) == ["COMPLETE"] * 30
    if sampler != "random":
        late, early = sorted(values[15:])[:5], sorted(values[:10])[:5]
        assert sum(late) < sum(early), (sampler, values)


@pytest.mark.parametrize(("pruner", "sampler"), [
    ("median", "random"), ("bohb", "tpe"),
    *(pytest.param(name, "random", marks=pytest.mark.slow) for name in ("asha", "hyperband")),
])  # fmt: skip
def test_pruners_stop_the_worse_and_keep_the_best(make, pruner, sampler):
    queue = make(pruner=pruner, sampler=sampler, trials=40, validations=9)
    assert SweepWorkers(queue, runner=objective).run() == 0
    trials = queue.study.get_trials(deepcopy=False)
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    done = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(pruned) + len(done) == 40
    assert len(pruned) >= 10
    assert all(len(trial.intermediate_values) == 9 for trial in done)
    assert all(len(trial.intermediate_values) < 9 or trial in pruned for trial in pruned)
    goals = {t.number: (t.params["x"] - 0.3) ** 2 + math.log10(t.params["y"]) ** 2 for t in trials}
    mean = {name: sum(goals[t.number] for t in some) / len(some) for name, some in (("p", pruned), ("d", done))}
    assert mean["d"] < mean["p"]


def test_a_run_without_values_or_with_nan_alone_has_failed(make):
    queue = make(trials=2)
    queue.claim()
    assert queue.finish(0) == "FAIL"
    queue.claim()
    queue.report(1, 1, math.nan)
    assert queue.finish(1) == "FAIL"
    assert queue.describe(1) == ": no finite value of loss was logged"


def test_a_sweep_whose_first_trials_all_fail_ends(make):
    queue = make(trials=9)
    worker = SweepWorkers(queue, runner=lambda claim, answer: 1)
    with pytest.raises(DloError, match="sweep: the first three trials have failed: no log"):
        worker.run()
    assert states(queue).count("FAIL") == 3


def test_a_trials_config_has_the_values_and_the_callback_last():
    own = settings(config={"trainer": {"callbacks": [{"class_path": "A"}]}, "m": {"x": 1}}, space={"m.x": [1, 2]})
    config = trial_config(own, 3, {"m.x": 2})
    assert config["m"]["x"] == 2
    assert [one["class_path"] for one in config["trainer"]["callbacks"]] == ["A", "SweepTrial"]
    assert config["trainer"]["callbacks"][-1]["init_args"] == {"metric": "loss", "number": 3, "values": {"m.x": 2}}


def test_a_worker_imports_neither_torch_nor_lightning():
    code = (
        "import sys, dlo_plugins.sweep.trial_queue, dlo_plugins.sweep.command;"
        "print({'torch', 'lightning', 'ray', 'matplotlib', 'plotly'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("sampler", "pruner", "message"),
    [("tpe", "ashes", "did you mean 'asha'?"),
     ("random", "bohb", "--sampler must be tpe with --pruner bohb, got random")],
)  # fmt: skip
def test_unknown_methods_are_named(sampler, pruner, message):
    with pytest.raises(DloError) as refused:
        check_methods(sampler, pruner)
    assert message in str(refused.value)


# --- the journal: what several processes append is there once, also after the death of one in mid-line ---------------


APPEND = """
import sys
from pathlib import Path
from optuna.storages.journal import JournalFileBackend
from dlo_plugins.sweep.trial_queue import JournalLock
journal = JournalFileBackend(sys.argv[1], JournalLock(Path(sys.argv[1])))
for number in range(50):
    journal.append_logs([{"writer": sys.argv[2], "number": number}, {"writer": sys.argv[2], "again": number}])
"""


def open_journal(path):
    return JournalFileBackend(str(path), JournalLock(path))


def test_operations_of_several_processes_are_there_once_and_in_each_ones_order(tmp_path):
    path = tmp_path / "journal.log"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, str(path), str(number)]) for number in range(3)]
    seen, reader = [], open_journal(path)
    while any(writer.poll() is None for writer in writers):
        seen += list(reader.read_logs(len(seen)))
        time.sleep(0.01)
    seen += list(reader.read_logs(len(seen)))
    assert all(writer.returncode == 0 for writer in writers)
    assert seen == [json.loads(line) for line in path.read_text().splitlines()]
    for number in "012":
        own = [log for log in seen if log["writer"] == number]
        assert [log.get("number", log.get("again")) for log in own] == [n for n in range(50) for _ in range(2)]


def test_a_line_that_was_cut_off_is_not_read_and_the_next_writer_removes_it(tmp_path):
    path = tmp_path / "journal.log"
    one = open_journal(path)
    one.append_logs([{"n": 0}, {"n": 1}])
    with open(path, "ab") as file:
        file.write(b'{"n": 2')
    assert [log["n"] for log in one.read_logs(0)] == [0, 1]
    open_journal(path).append_logs([{"n": 3}])
    assert [log["n"] for log in one.read_logs(2)] == [3]
    assert [log["n"] for log in open_journal(path).read_logs(1)] == [1, 3]


# workers that are killed at random times: no trial is lost or run twice. The benchmark's own code, with few kills


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FAULTS = ("lost", "at_the_same_time", "again_after_its_end", "values_lost")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("sweep")


@pytest.mark.slow
def test_kills_of_workers_lose_and_double_no_trial(benchmark, tmp_path):
    found = benchmark.kill_workers(tmp_path / "sweep", 3, seed=1)
    assert found["kills"] == 3
    assert found["trials"] == 18
    assert found["kills_inside_a_trial"] >= 1
    assert {name: found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
