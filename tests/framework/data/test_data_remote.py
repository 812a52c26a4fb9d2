"""Remote files: read through a bounded cache that processes share, ahead of the reader, and fetched again if needed."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from dlo_framework.data.remote import BlockCache, LocalFile, RemoteFile, Storage, list_files
from dlo_framework.errors import DloError


class SlowFileSystem(LocalFileSystem):
    """A remote file system: local files, after a delay, with a record of the calls."""

    protocol = "slow"
    cachable = False
    delay, failures, calls = 0.0, 0, None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("slow://"))

    def cat_file(self, path, start=None, end=None, **options):
        kind = type(self)
        kind.calls.append((path, start, end))
        time.sleep(kind.delay)
        if kind.failures:
            kind.failures -= 1
            raise TimeoutError("the server did not answer")
        return super().cat_file(path, start=start, end=end, **options)


@pytest.fixture(autouse=True)
def slow():
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.delay, SlowFileSystem.failures, SlowFileSystem.calls = 0.0, 0, []
    return SlowFileSystem


@pytest.fixture
def content(tmp_path) -> bytes:
    data = random.Random(0).randbytes(100_123)
    (tmp_path / "data.bin").write_bytes(data)
    return data


def opened(folder: Path, max_bytes: int = 1 << 20, block: int = 1024) -> RemoteFile:
    return RemoteFile(f"slow://{folder}/data.bin", BlockCache(folder / "cache", max_bytes, block))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "cache" / "blocks").rglob("*") if path.is_file())


def test_reads_equal_the_file_and_each_block_is_fetched_once(tmp_path, content, slow):
    file = opened(tmp_path)
    generator = random.Random(1)
    for _ in range(300):
        offset, size = generator.randrange(len(content)), generator.randrange(5000)
        assert file.read(offset, size) == content[offset : offset + size]
    assert file.read(len(content) - 3, 10) == content[-3:]
    assert len(slow.calls) == len(set(slow.calls)) <= -(-len(content) // 1024)
    again = opened(tmp_path)
    before = len(slow.calls)
    again.read(0, len(content))
    assert len(slow.calls) == len(set(slow.calls))
    assert len(slow.calls) >= before


def test_the_cache_never_exceeds_its_limit_and_keeps_what_was_used_last(tmp_path, content, slow):
    limit = 20 * 1024
    file = opened(tmp_path, max_bytes=limit)
    for number in range(97):
        file.read(0, 10)  # stays in use
        assert file.read(number * 1024, 1024) == content[number * 1024 : (number + 1) * 1024]
        assert size_of(tmp_path) <= limit
    assert sum(start == 0 for _, start, _ in slow.calls) == 1
    assert size_of(tmp_path) > limit // 2


def test_a_partial_file_of_a_killed_process_is_removed(tmp_path, content):
    file = opened(tmp_path, max_bytes=8 * 1024)
    left = tmp_path / "cache" / "blocks" / "ab" / "abc.dlo-partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(100_000))
    for number in range(20):
        file.read(number * 1024, 1024)
    assert not left.exists()


def test_a_block_cut_by_a_power_failure_is_fetched_again(tmp_path, content):
    file = opened(tmp_path)
    file.read(0, 1024)
    for path in (tmp_path / "cache" / "blocks").rglob("*-0-1024"):
        path.write_bytes(b"")
    assert file.read(0, 1024) == content[:1024]


def _read_all(folder: str, seed: int, results) -> None:
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.calls, SlowFileSystem.delay = [], 0.002
    data = Path(folder, "data.bin").read_bytes()
    RemoteFile(f"slow://{folder}/data.bin", BlockCache(Path(folder) / "shared", 1 << 20, 100_200)).read(5000, 100)
    results.put(len(SlowFileSystem.calls))
    file = opened(Path(folder), max_bytes=30 * 1024)
    generator = random.Random(seed)
    right = True
    for _ in range(150):
        offset, size = generator.randrange(len(data)), generator.randrange(3000)
        file.read_ahead([(generator.randrange(len(data)), 2000)])
        right &= file.read(offset, size) == data[offset : offset + size]
    results.put(right)


def test_processes_share_a_small_cache_and_read_what_is_right(tmp_path, content):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_read_all, args=(str(tmp_path), seed, results)) for seed in range(4)]
    for worker in workers:
        worker.start()
    largest = 0
    while any(worker.is_alive() for worker in workers):
        try:
            largest = max(largest, size_of(tmp_path))
        except FileNotFoundError:  # Removed while it was listed.
            continue
    found = [results.get(timeout=30) for _ in range(2 * len(workers))]
    assert sorted(found, key=str) == [0, 0, 0, 1, True, True, True, True], "one of them fetched the block that all read"
    assert 0 < largest <= 31 * 1024  # with one block that is removed while others are counted


def test_a_fork_while_blocks_are_fetched_does_not_keep_their_locks(tmp_path, content, slow):
    slow.delay = 0.2
    file = opened(tmp_path)
    file.read_ahead([(0, 30 * 1024)])
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    started = threading.Event()
    other = opened(tmp_path)
    thread = threading.Thread(target=lambda: (other.read(0, 30 * 1024), started.set()), daemon=True)
    thread.start()
    assert started.wait(2.5)
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_errors_that_pass_are_tried_again_and_others_say_what_is_wrong(tmp_path, content, slow):
    file = opened(tmp_path)
    slow.failures = 2
    assert file.read(0, 10) == content[:10]
    slow.failures = 100
    with pytest.raises(DloError, match=r"data.bin cannot be read after 4 attempts: TimeoutError: the server did not"):
        file.read(50_000, 10)
    slow.failures = 0
    with pytest.raises(DloError, match=r"nothing.bin cannot be read"):
        RemoteFile(f"slow://{tmp_path}/nothing.bin", file.cache)
    with pytest.raises(DloError, match=r"nope://x cannot be opened"):
        RemoteFile("nope://x", file.cache)
    with pytest.raises(DloError, match=r"nothing cannot be read"):
        LocalFile(tmp_path / "nothing")


def test_a_changed_remote_file_is_not_mixed_with_the_old_one(tmp_path, content):
    file = opened(tmp_path)
    file.read(0, 2000)
    (tmp_path / "data.bin").write_bytes(bytes(50_000))
    with pytest.raises(DloError, match="must have 100123 bytes, as when the run began"):
        file.read(60_000, 10)
    assert opened(tmp_path).read(0, 2000) == bytes(2000)


def test_a_full_file_is_fetched_for_a_map_and_counts_for_the_limit(tmp_path, content):
    file = opened(tmp_path, max_bytes=120_000)
    assert file.local_path().read_bytes() == content
    file.read(0, 50_000)
    assert size_of(tmp_path) <= 120_000
    with pytest.raises(DloError, match=r"cache_bytes must be at least 100.1 kB"):
        opened(tmp_path, max_bytes=90_000).local_path()
    with pytest.raises(DloError, match=r"cache_bytes must be at least four blocks of 1.0 kB, got 2.0 kB"):
        BlockCache(tmp_path, 2048, 1024)


def test_files_are_listed_by_folder_glob_and_name_everywhere(tmp_path):
    for name in ("b.tar", "a.tar", "c.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for prefix in ("", "slow://", "file://"):
        names = [name.rpartition("/")[2] for name in list_files(f"{prefix}{tmp_path}")]
        assert names == ["a.tar", "b.tar", "c.txt"]
        found = list_files(f"{prefix}{tmp_path}/*.tar")
        assert [name.rpartition("/")[2] for name in found] == ["a.tar", "b.tar"]
        assert found[0].startswith("slow://" if prefix == "slow://" else "/")
        assert len(list_files(f"{prefix}{tmp_path}/c.txt")) == 1
        storage = Storage(BlockCache(tmp_path / "cache", 1 << 20, 1024), tmp_path, {})
        assert storage.open(found[0]).read(0, 10) == b"x"
        with pytest.raises(DloError):
            list_files(f"{prefix}{tmp_path}/*.zip")
