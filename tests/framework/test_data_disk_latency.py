"""A disk counts as slow after four slow answers in a row, and a fast one is measured rarely."""

from __future__ import annotations

import pytest

from dlo_framework.data.disk_latency import SLOW, DiskLatency
from dlo_framework.data.remote import LocalFile

FAST, LATE = SLOW / 100, SLOW * 2


def answer(disk: DiskLatency, seconds: float, calls: int) -> int:
    """Counts the measurements of some calls, all with one answer."""
    count = 0
    for _ in range(calls):
        if disk.is_due():
            disk.note(seconds)
            count += 1
    return count


def test_a_fast_disk_is_measured_rarely() -> None:
    disk = DiskLatency()
    assert answer(disk, FAST, 1 + 2 + 4 + 8 + 16 + 32 + 64) == 7
    assert answer(disk, FAST, 6400) == 100
    assert not disk.is_slow


def test_a_disk_that_becomes_slow_is_found_and_remembered() -> None:
    disk = DiskLatency()
    answer(disk, FAST, 1000)
    assert not disk.is_slow
    answer(disk, LATE, 64 + 3)
    assert disk.is_slow


def test_single_late_answers_do_not_count() -> None:
    disk = DiskLatency()
    for _ in range(100):
        for seconds in (LATE, LATE, LATE, FAST):
            disk.note(seconds)
            assert not disk.is_slow
    for _ in range(4):
        disk.note(LATE)
    assert disk.is_slow


def test_a_byte_of_a_local_file_is_read_and_other_files_are_slow(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    file, disk, read = LocalFile(path), DiskLatency(), list[tuple[int, int]]()
    monkeypatch.setattr(file, "read", lambda offset, size: read.append((offset, size)))
    disk.measure(file, 3)
    assert read == [(3, 1)]
    assert not disk.is_slow
    disk.measure(object(), 0)  # type: ignore[arg-type]
    assert disk.is_slow
