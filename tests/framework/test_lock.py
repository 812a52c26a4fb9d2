"""Locks of runs and of files that are built once: one process at a time, and the next one takes over a dead one's."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dlo_framework import lock as locks
from dlo_framework.errors import DloError
from dlo_framework.lock import build_once
from support.launchers import wait_until


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Returns a function that creates the lock of a process on another host."""
    monkeypatch.setattr(locks, "DEAD", 2.0)

    def lock(age: float):
        path = tmp_path / "run.lock.4"
        path.write_text(json.dumps({"host": "node7", "pid": 1, "start": "5", "machine": "another", "job": "311"}))
        os.utime(path, (time.time() - age, time.time() - age))
        return path

    return lock


def _hold(run, ready, done):
    locks.lock_run(run)
    ready.set()
    done.wait(60)
    os._exit(9)  # As a killed process: nothing is released.


@contextlib.contextmanager
def held_by_another(run):
    """Yields a process that holds a run's lock, and then dies."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(run, ready, done))
    other.start()
    assert ready.wait(60)
    yield other
    done.set()
    other.join(60)


def test_a_run_that_another_process_trains_is_refused_until_that_has_died(tmp_path):
    with held_by_another(tmp_path) as other:
        with pytest.raises(DloError, match=f"process {other.pid} on .* trains it; wait until it has ended"):
            locks.lock_run(tmp_path)
        with pytest.raises(DloError, match="one job at a time"):
            locks.check_free(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock.0"]
    lock = locks.lock_run(tmp_path)
    assert locks.lock_run(tmp_path) is lock
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock.1"]
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_slow_to_take_a_dead_ones_lock_sees_who_came_between(tmp_path, elsewhere, monkeypatch):
    stale = elsewhere(age=100.0)
    newest = locks.RunLock(tmp_path).newest()
    stale.unlink()
    with held_by_another(tmp_path):  # It holds run.lock.0, while this process still checks run.lock.4.
        monkeypatch.setattr(locks.FileLock, "newest", lambda self: newest)
        with pytest.raises(DloError, match="one job at a time"):
            locks.lock_run(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock.0"]


def test_another_hosts_process_that_is_silent_is_dead(tmp_path, elsewhere):
    elsewhere(age=100.0)
    locks.lock_run(tmp_path).release()
    elsewhere(age=0.5)  # It waits for a touch, in vain.
    locks.lock_run(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_another_hosts_process_that_touches_its_lock_lives(tmp_path, elsewhere, capsys):
    path = elsewhere(age=0.0)
    threading.Timer(1.2, lambda: os.utime(path)).start()
    with pytest.raises(DloError, match=r"process 1 on node7 \(SLURM job 311\) trains it"):
        locks.lock_run(tmp_path)
    assert "waiting up to 2 s" in capsys.readouterr().err


def test_of_many_that_take_a_dead_ones_lock_at_once_one_gets_it(tmp_path, elsewhere):
    elsewhere(age=100.0)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()

    def take():
        start.wait(60)
        try:
            locks.lock_run(tmp_path)
            results.put(os.getpid())
            time.sleep(1)
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
    monkeypatch.setattr(locks, "BEAT", 0.1)
    ended = threading.Event()
    monkeypatch.setattr(locks.os, "_exit", lambda code: (ended.set(), time.sleep(100)))
    lock = locks.lock_run(tmp_path)
    path = tmp_path / "run.lock.0"
    os.utime(path, (0, 0))
    wait_until(lambda: path.stat().st_mtime)
    path.rename(tmp_path / "run.lock.1")
    assert ended.wait(20)
    lock.release()


def test_two_jobs_that_start_the_same_run_at_once_leave_one(tmp_path, elsewhere):
    first, second = tmp_path / "version_0", tmp_path / "version_1"
    for run in (first, second):
        run.mkdir()
    elsewhere(age=0.0).rename(second / "run.lock.0")
    lock = locks.lock_run(first)
    touch = threading.Timer(
        1.0, lambda: (second / "run.lock.0").unlink()
    )  # It has seen this one's and releases its own.
    touch.start()
    locks.check_only_starter(first, [first, second])
    (second / "run.lock.0").write_text((first / "run.lock.0").read_text().replace('"pid": ', '"pid": 1'))
    lock.release()
    locks.check_only_starter(first, [first])


def test_whether_a_lock_is_held_is_known_without_waiting(tmp_path, elsewhere, monkeypatch):
    assert not locks.is_held(tmp_path)
    with held_by_another(tmp_path):
        assert locks.is_held(tmp_path)
    assert not locks.is_held(tmp_path)
    monkeypatch.setattr("dlo_framework.lock.time.sleep", lambda seconds: pytest.fail("waits"))
    elsewhere(age=0.5)
    assert locks.is_held(tmp_path)
    elsewhere(age=10.0)
    assert not locks.is_held(tmp_path)
    (tmp_path / "run.lock.5").write_text('{"pid"')
    assert not locks.is_held(tmp_path)


# --- files that are built once ---------------------------------------------------------------------------------


def _build(folder: str, seconds: float) -> None:
    path = Path(folder, "built")

    def build() -> None:
        with open(path.with_name("calls"), "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        path.with_name("draft").write_text("done")
        path.with_name("draft").rename(path)

    build_once(path, build, "building")
    assert path.read_text() == "done"


def started(folder: Path, seconds: float) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_build, args=(str(folder), seconds))
    process.start()
    return process


def locks_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("built.lock.*"))


def test_many_processes_build_once(tmp_path):
    processes = [started(tmp_path, 0.5) for _ in range(6)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 6
    assert len((tmp_path / "calls").read_text().split()) == 1
    assert not locks_in(tmp_path)


def test_a_killed_builder_is_replaced_and_those_that_wait_say_so(tmp_path, capfd):
    first = started(tmp_path, 60)
    wait_until((tmp_path / "calls").exists)
    others = [started(tmp_path, 0.1) for _ in range(3)]
    said: list[str] = []
    wait_until(lambda: said.append(capfd.readouterr().err) or f"waiting for process {first.pid} on" in "".join(said))
    assert "which is building (built)" in "".join(said)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    for process in others:
        process.join(30)
    assert [process.exitcode for process in others] == [0] * 3
    assert len((tmp_path / "calls").read_text().split()) == 2
    assert f"process {first.pid} on" in capfd.readouterr().err
    assert not locks_in(tmp_path)


def test_an_error_releases_the_lock_and_a_holder_touches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.05)
    path, touched = tmp_path / "built", []

    def fail() -> None:
        lock = next(tmp_path.glob("built.lock.*"))
        os.utime(lock, (0, 0))
        wait_until(lambda: lock.stat().st_mtime)
        touched.append(lock)
        raise DloError("the third line is broken")

    with pytest.raises(DloError, match="third line"):
        build_once(path, fail, "building")
    assert touched
    assert not locks_in(tmp_path)
    assert build_once(path, lambda: path.write_text("x"), "building")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DloError, match="set cache_dir to a folder that can be written to"):
        build_once(tmp_path / "file" / "built", lambda: None, "building")
