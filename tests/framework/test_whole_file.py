"""Atomic file writes: the new content, or the previous one."""

import errno
import os

import pytest

from dlo_framework.atomic_file import open_atomic, write_atomic
from dlo_framework.errors import DloError


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_takes_its_place_at_the_end(tmp_path):
    path = tmp_path / "made" / "x.json"
    write_atomic(path, "first")
    with open_atomic(path) as partial:
        partial.write_text("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second"
    write_atomic(path, b"third \xc3\xa9")
    assert path.read_text(encoding="utf-8") == "third é"
    assert names(path.parent) == ["x.json"]


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("first")

    def write_half() -> None:
        with open_atomic(path) as partial:
            partial.write_text("sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "first"
    assert names(tmp_path) == ["x.json"]


def test_several_may_write_it_at_once(tmp_path):
    path = tmp_path / "cache"
    with open_atomic(path, shared=True) as one, open_atomic(path, shared=True) as other:
        assert one != other
        one.write_text("outer")
        other.write_text("inner")
    assert path.read_text() == "outer"
    assert names(tmp_path) == ["cache"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_written_is_told_and_the_file_stays(tmp_path, monkeypatch, call):
    path = tmp_path / "x.json"
    write_atomic(path, "first")

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(DloError, match=r"cannot write .*x\.json: No space left on device"):
        write_atomic(path, "second")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["x.json"]
