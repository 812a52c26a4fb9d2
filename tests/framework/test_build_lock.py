"""A file is built once by many processes, a dead builder is replaced, and those that wait say so."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from dlo_framework.data import build_lock
from dlo_framework.data.build_lock import build_once
from dlo_framework.errors import DloError


def _build(folder: str, seconds: float) -> None:
    path = Path(folder, "built")

    def build() -> None:
        with open(path.with_name("calls"), "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        path.write_text("done")

    build_once(path, build, "building")
    assert path.read_text() == "done"


def started(folder: Path, seconds: float) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_build, args=(str(folder), seconds))
    process.start()
    return process


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def locks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("built.lock.*"))


def test_many_processes_build_once(tmp_path):
    processes = [started(tmp_path, 0.5) for _ in range(6)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 6
    assert len((tmp_path / "calls").read_text().split()) == 1
    assert not locks(tmp_path)


def test_a_killed_builder_is_replaced_and_those_that_wait_say_so(tmp_path, capfd):
    first = started(tmp_path, 60)
    wait_for(tmp_path / "calls")
    others = [started(tmp_path, 0.1) for _ in range(3)]
    deadline = time.monotonic() + 30
    said = ""
    while f"waiting for process {first.pid} on" not in said:
        said += capfd.readouterr().err
        assert time.monotonic() < deadline
    assert "which is building (built)" in said
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    for process in others:
        process.join(30)
    assert [process.exitcode for process in others] == [0] * 3
    assert len((tmp_path / "calls").read_text().split()) == 2
    assert f"process {first.pid} on" in capfd.readouterr().err
    assert not locks(tmp_path)


def test_another_hosts_lock_is_dead_if_nobody_touches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(build_lock, "DEAD", 1.0)
    lock = tmp_path / "built.lock.3"
    lock.write_text(json.dumps({"host": "other", "pid": 1, "start": "1", "machine": "elsewhere"}))
    path, begin = tmp_path / "built", time.monotonic()
    assert build_once(path, lambda: path.write_text("x"), "building")
    assert time.monotonic() - begin > 0.9
    assert not locks(tmp_path)


def test_another_hosts_lock_is_respected_while_it_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(build_lock, "DEAD", 1.0)
    lock, path = tmp_path / "built.lock.0", tmp_path / "built"
    lock.write_text(json.dumps({"host": "other", "pid": 1, "start": "1", "machine": "elsewhere"}))
    child = os.fork()
    if child == 0:
        for _ in range(20):
            os.utime(lock)
            time.sleep(0.1)
        path.write_text("theirs")
        lock.unlink()
        os._exit(0)
    assert not build_once(path, lambda: path.write_text("ours"), "building")
    os.waitpid(child, 0)
    assert path.read_text() == "theirs"


def test_an_error_releases_the_lock_and_a_holder_touches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(build_lock, "BEAT", 0.05)
    path, touched = tmp_path / "built", []

    def fail() -> None:
        lock = next(tmp_path.glob("built.lock.*"))
        os.utime(lock, (0, 0))
        deadline = time.monotonic() + 30
        while lock.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        touched.append(lock)
        raise DloError("the third line is broken")

    with pytest.raises(DloError, match="third line"):
        build_once(path, fail, "building")
    assert touched
    assert not locks(tmp_path)
    assert build_once(path, lambda: path.write_text("x"), "building")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DloError, match="set cache_dir to a folder that can be written to"):
        build_once(tmp_path / "file" / "built", lambda: None, "building")
