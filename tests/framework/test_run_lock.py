"""One job at a time trains in a run's folder; the next one takes over a dead job's lock."""

import json
import multiprocessing
import os
import threading
import time

import pytest

from dlo_framework import run_lock
from dlo_framework.errors import DloError


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Returns a function that creates the lock of a process on another host."""
    monkeypatch.setattr(run_lock, "DEAD", 2.0)

    def lock(age: float):
        path = tmp_path / f"{run_lock.NAME}.4"
        path.write_text(json.dumps({"host": "node7", "pid": 1, "start": "5", "machine": "another", "job": "311"}))
        os.utime(path, (time.time() - age, time.time() - age))
        return path

    return lock


def _hold(run, ready, done):
    run_lock.lock_run(run)
    ready.set()
    done.wait(60)
    os._exit(9)  # As a killed process: nothing is released.


def test_a_run_that_another_process_trains_is_refused_until_that_has_died(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(60)
    with pytest.raises(DloError, match=f"process {other.pid} on .* trains it; wait until it has ended"):
        run_lock.lock_run(tmp_path)
    with pytest.raises(DloError, match="one job at a time"):
        run_lock.check_free(tmp_path)
    done.set()
    other.join(60)
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock.0"]
    lock = run_lock.lock_run(tmp_path)
    assert run_lock.lock_run(tmp_path) is lock
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock.1"]
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_slow_to_take_a_dead_ones_lock_sees_who_came_between(tmp_path, elsewhere, monkeypatch):
    stale = elsewhere(age=100.0)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    newest = run_lock._newest(tmp_path)
    stale.unlink()
    other.start()
    assert ready.wait(60)  # It holds run.lock.0, while this process still checks run.lock.4.
    monkeypatch.setattr(run_lock, "_newest", lambda run: newest)
    with pytest.raises(DloError, match="one job at a time"):
        run_lock.lock_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock.0"]
    done.set()
    other.join(60)


def test_another_hosts_process_that_is_silent_is_dead(tmp_path, elsewhere):
    elsewhere(age=100.0)
    run_lock.lock_run(tmp_path).release()
    elsewhere(age=0.5)  # It waits for a touch, in vain.
    run_lock.lock_run(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_another_hosts_process_that_touches_its_lock_lives(tmp_path, elsewhere, capsys):
    path = elsewhere(age=0.0)
    threading.Timer(1.2, lambda: os.utime(path)).start()
    with pytest.raises(DloError, match=r"process 1 on node7 \(SLURM job 311\) trains it"):
        run_lock.lock_run(tmp_path)
    assert "waiting up to 2 s" in capsys.readouterr().err


def test_of_many_that_take_a_dead_ones_lock_at_once_one_gets_it(tmp_path, elsewhere):
    elsewhere(age=100.0)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()

    def take():
        start.wait(60)
        try:
            run_lock.lock_run(tmp_path)
            results.put(os.getpid())
            time.sleep(3)
        except DloError:
            results.put(0)

    takers = [context.Process(target=take) for _ in range(6)]
    for taker in takers:
        taker.start()
    time.sleep(0.5)
    start.set()
    found = [results.get(timeout=60) for _ in takers]
    for taker in takers:
        taker.join(60)
    assert len([pid for pid in found if pid]) == 1


def test_a_lock_is_touched_and_one_that_was_taken_over_ends_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.1)
    ended = threading.Event()
    monkeypatch.setattr(run_lock.os, "_exit", lambda code: (ended.set(), time.sleep(100)))
    lock = run_lock.lock_run(tmp_path)
    path = tmp_path / "run.lock.0"
    os.utime(path, (0, 0))
    until = time.monotonic() + 20
    while path.stat().st_mtime == 0:
        assert time.monotonic() < until
        time.sleep(0.05)
    path.rename(tmp_path / "run.lock.1")
    assert ended.wait(20)
    lock.release()


def test_two_jobs_that_start_the_same_run_at_once_leave_one(tmp_path, elsewhere):
    first, second = tmp_path / "version_0", tmp_path / "version_1"
    for run in (first, second):
        run.mkdir()
    elsewhere(age=0.0).rename(second / "run.lock.0")
    lock = run_lock.lock_run(first)
    touch = threading.Timer(
        1.0, lambda: (second / "run.lock.0").unlink()
    )  # It has seen this one's and releases its own.
    touch.start()
    run_lock.check_only_starter(first, [first, second])
    (second / "run.lock.0").write_text((first / "run.lock.0").read_text().replace('"pid": ', '"pid": 1'))
    lock.release()
    run_lock.check_only_starter(first, [first])


def test_whether_a_lock_is_held_is_known_without_waiting(tmp_path, elsewhere, monkeypatch):
    assert not run_lock.is_held(tmp_path)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(60)
    assert run_lock.is_held(tmp_path)
    done.set()
    other.join(60)
    assert not run_lock.is_held(tmp_path)
    monkeypatch.setattr("dlo_framework.run_lock.time.sleep", lambda seconds: pytest.fail("waits"))
    elsewhere(age=0.5)
    assert run_lock.is_held(tmp_path)
    elsewhere(age=10.0)
    assert not run_lock.is_held(tmp_path)
    (tmp_path / f"{run_lock.NAME}.5").write_text('{"pid"')
    assert not run_lock.is_held(tmp_path)
