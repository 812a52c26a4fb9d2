"""Files of a data source, local or remote: random access to bytes, cached in bounded blocks on disk; samples in tars.

A remote file is any URL that fsspec reads (``hf://``, ``s3://``, ``gs://``, ``https://``). It is fetched in blocks,
each of which becomes one file of the cache. All processes of a node share the cache:

* A block is fetched by one process at a time, and its file appears by a rename, so that none reads half of it.
* The size of all files never exceeds the limit; the least recently used are removed first. A removed file stays
  readable for a process that has opened it.
* A block's name has the version of the remote file in it, so that a changed file is fetched again.

Coming reads of remote files are announced with ``read_ahead``, which fetches their blocks in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

from dlo_framework.atomic_file import PARTIAL
from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes

#: Size of the blocks in bytes. At 100 ms of latency, a connection of 1 GB/s loses half of its speed with 100 MB, and
#: several threads fetch at once; a global shuffle fetches a full block for one sample.
BLOCK = 4 << 20
_STRIPES = 1024  # lock files for fetching
_TRIES = 4
#: What file systems call the version of a file; `blob_id` is that of `hf://`.
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created")
_THREADS = 32


def cache_folder(given: str | None, kind: str) -> Path:
    """Returns a cache folder that the user has set, or that of this kind of data in the user's cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlo" / kind


class BlockCache:
    """Folder of fetched blocks, shared by all processes of a node and bounded in bytes.

    Args:
        folder: Folder of the cache, on a local disk.
        max_bytes: Limit of the size of all its files.
        block: Size of a block, in bytes.

    Raises:
        DloError: If the limit is less than four blocks.
    """

    def __init__(self, folder: Path, max_bytes: int, block: int = BLOCK) -> None:
        if max_bytes < 4 * block:
            raise DloError(
                f"cache_bytes must be at least four blocks of {format_bytes(block)}, got {format_bytes(max_bytes)};"
                f" set it to {format_bytes(4 * block)} or more"
            )
        self.folder, self.max_bytes, self.block = folder, max_bytes, block

    def path(self, key: str) -> Path:
        """Returns the path of an entry."""
        return self.folder / "blocks" / key[:2] / key

    def read(self, key: str, offset: int, size: int, expected: int) -> bytes | None:
        """Returns bytes of an entry, and marks it as used; None if it is not there, or its size is not ``expected``."""
        try:
            file = os.open(self.path(key), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(file).st_size != expected:  # after a power cut
                return None
            os.utime(file)
            return read_at(file, size, offset)
        finally:
            os.close(file)

    def write(self, key: str, content: bytes) -> None:
        """Writes an entry, and removes others if the limit is exceeded."""
        path = self.path(key)
        with self.making_space(len(content), path) as partial:
            partial.write_bytes(content)

    @contextlib.contextmanager
    def making_space(self, size: int, path: Path) -> Iterator[Path]:
        """Yields a temporary path for an entry of ``size`` bytes, for which space was made, and renames it.

        Raises:
            DloError: If the entry exceeds the limit by itself, or the disk is full.
        """
        if size > self.max_bytes:
            raise DloError(
                f"cache_bytes must be at least {format_bytes(size)} for {path.name}, got"
                f" {format_bytes(self.max_bytes)}; raise it"
            )
        partial = path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / "size.lock"):
                self._reserve(size, path)
                yield partial
                os.replace(partial, path)
        except OSError as error:
            raise DloError(
                f"cannot write to the cache {self.folder}: {error.strerror or error}; set cache_dir to a folder on a"
                " local disk with enough space"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def fetching(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Returns the lock under which one process at a time fetches an entry."""
        stripe = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % _STRIPES
        return _locked(self.folder / "fetching" / f"{stripe:04}.lock")

    def _reserve(self, size: int, path: Path) -> None:
        """Adds an entry to the recorded total, and removes the least recently used ones; the caller has the lock."""
        ledger = self.folder / "size"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of another size, after a power cut
        try:
            total = int(ledger.read_text())
        except (FileNotFoundError, ValueError):
            total = self.max_bytes  # unknown: counted below
        if total + size > self.max_bytes:
            total = self._evict(int(0.9 * self.max_bytes) - size)
        ledger.write_text(str(total + size))

    def _evict(self, limit: int) -> int:
        """Removes the least recently used entries until ``limit`` bytes are left; returns the number of bytes left."""
        entries: list[tuple[float, int, str]] = []
        for folder, _, names in os.walk(self.folder / "blocks"):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    if name.endswith(PARTIAL):  # of a killed process: writers have the lock
                        os.unlink(path)
                        continue
                    stat = os.stat(path)
                    entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= max(0, limit):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


class LocalFile:
    """File on a local or mounted disk.

    Args:
        path: Path of the file.

    Raises:
        DloError: If the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise DloError(f"{path} cannot be read: {error.strerror}; correct the path") from error

    def read(self, offset: int, size: int) -> bytes:
        """Returns ``size`` bytes from ``offset``, by one ``pread``."""
        file = self._file
        return read_at(file.fileno(), size, offset)

    def local_path(self) -> Path:
        """Returns the file's path."""
        return self.path

    def stamp(self) -> str:
        """Returns a string that changes when the file does."""
        stat = self.path.stat()
        return f"{self.path.resolve()} {stat.st_size} {stat.st_mtime_ns}"

    @cached_property
    def _file(self) -> BinaryIO:
        return open(self.path, "rb", buffering=0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def __del__(self) -> None:
        if "_file" in self.__dict__:
            self._file.close()


class RemoteFile:
    """Remote file, read through a cache of blocks.

    Args:
        url: URL that fsspec reads.
        cache: Cache of the blocks.
        options: Options of the file system, such as ``{anon: true}`` of ``s3://``.

    Raises:
        DloError: If the file cannot be reached, or the package of its protocol is missing.
    """

    def __init__(self, url: str, cache: BlockCache, options: dict[str, Any] | None = None) -> None:
        self.name, self.cache, self.options = url, cache, options or {}
        system, path = file_system(url, self.options)
        details = _try(lambda: system.info(path), url)
        if details.get("size") is None:
            raise DloError(f"{url} must have a size, got none from its server; copy it to a local disk")
        self.size = int(details["size"])
        version = [str(details.get(key, "")) for key in _VERSIONS]
        self._key = hashlib.sha256("\0".join([url, str(self.size), *version]).encode()).hexdigest()[:40]

    def stamp(self) -> str:
        """Returns a string that changes when the remote file does."""
        return self._key

    def read(self, offset: int, size: int) -> bytes:
        """Returns ``size`` bytes from ``offset``, from cached blocks where there are."""
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        block = self.cache.block
        numbers = range(offset // block, (offset + size - 1) // block + 1)
        if len(numbers) > 1:
            self.read_ahead([(offset, size)])
        parts = []
        for number in numbers:
            start = max(offset, number * block) - number * block
            stop = min(offset + size, (number + 1) * block) - number * block
            cached = self.cache.read(self._block_key(number), start, stop - start, self._length(number))
            parts.append(self._begin_fetch(number).result()[start:stop] if cached is None else cached)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begins to fetch the blocks of ranges, in threads."""
        for offset, size in ranges:
            first, last = offset // self.cache.block, (min(offset + size, self.size) - 1) // self.cache.block
            for number in range(first, last + 1):
                if not self.cache.path(self._block_key(number)).exists():
                    self._begin_fetch(number)

    def local_path(self) -> Path:
        """Returns the path of the full file in the cache; fetches it first.

        Its blocks are not used: other entries may be removed while it is written.
        """
        key = f"{self._key}-full"
        path = self.cache.path(key)
        with self.cache.fetching(key):
            if not path.exists() or path.stat().st_size != self.size:
                system, remote = file_system(self.name, self.options)
                with self.cache.making_space(self.size, path) as partial:
                    _try(lambda: system.get_file(remote, str(partial)), self.name)
        os.utime(path)
        return path

    def _begin_fetch(self, number: int) -> Future[bytes]:
        return _fetches_of_process().begin(self._block_key(number), lambda: self._fetch(number))

    def _fetch(self, number: int) -> bytes:
        """Returns a block, from the cache if another process has fetched it meanwhile."""
        from fsspec import AbstractFileSystem

        key, length = self._block_key(number), self._length(number)
        with self.cache.fetching(key):
            content = self.cache.read(key, 0, length, length)
            if content is None:
                system, path = file_system(self.name, self.options)
                start = number * self.cache.block
                # fsspec's own `cat_file` (2026.9), which `hf://` has, opens the file, and fetches 5 MiB ahead;
                # asynchronous file systems have a method on each object.
                inherits = not system.async_impl and type(system).cat_file is AbstractFileSystem.cat_file
                options = {"cache_type": "none"} if inherits else {}
                content = _try(lambda: system.cat_file(path, start=start, end=start + length, **options), self.name)
                if len(content) != length:
                    raise DloError(
                        f"{self.name} must have {self.size} bytes, as when the run began, got {len(content)} of"
                        f" {length} bytes at {start}; start the run again if the file has changed"
                    )
                self.cache.write(key, content)
        return content

    def _block_key(self, number: int) -> str:
        return f"{self._key}-{number}-{self.cache.block}"

    def _length(self, number: int) -> int:
        return min(self.cache.block, self.size - number * self.cache.block)


class _Fetches:
    """Blocks that threads of this process are fetching, by their keys."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dlo-fetch")
        self._lock = threading.Lock()
        self._blocks: dict[str, Future[bytes]] = {}

    def begin(self, key: str, fetch: Callable[[], bytes]) -> Future[bytes]:
        """Returns the future of a block, whose fetching has begun."""
        with self._lock:
            future = self._blocks.get(key)
            if future is not None:
                return future
            future = self._blocks[key] = self._threads.submit(fetch)
        # Outside of the lock: a callback of a future that is done is called at once, by this thread.
        future.add_done_callback(lambda _: self._blocks.pop(key, None))
        return future


_fetches: list[_Fetches] = []


def _fetches_of_process() -> _Fetches:
    """Returns the fetches of this process; a forked one has none of its parent's threads."""
    if not _fetches or _fetches[0].process != os.getpid():
        _fetches[:] = [_Fetches()]
    return _fetches[0]


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL."""
    return "://" in path and not path.startswith("file://")


def local_name(path: str) -> Path:
    """Returns the local path that a path or a ``file://`` URL names."""
    return Path(path.removeprefix("file://")).expanduser()


class Storage(NamedTuple):
    """Places for remote files and indices.

    Attributes:
        cache: Cache of remote files.
        indices: Folder of the indices, shared by all processes.
        options: Options of the remote file system.
    """

    cache: BlockCache
    indices: Path
    options: dict[str, Any]

    def open(self, path: str) -> LocalFile | RemoteFile:
        """Returns a file by path or URL.

        Raises:
            DloError: If it cannot be reached.
        """
        return RemoteFile(path, self.cache, self.options) if is_remote(path) else LocalFile(local_name(path))


def list_files(pattern: str, options: dict[str, Any] | None = None) -> list[str]:
    """Returns the files that a path, a folder or a glob names, local or remote, sorted by name.

    Args:
        pattern: File, folder or glob. A folder gives its files, not those of its folders.
        options: Options of the remote file system.

    Raises:
        DloError: If nothing is there.
    """
    names = find_files(pattern, options)
    if not names:
        place = pattern if is_remote(pattern) else f"{local_name(pattern)} (from {Path.cwd()})"
        raise DloError(f"{place} must name files, got none there; correct it")
    return names


def find_files(pattern: str, options: dict[str, Any] | None = None) -> list[str]:
    """Returns what :func:`list_files` does, but [] if nothing is there.

    Raises:
        DloError: If the server cannot be reached, or refuses access.
    """
    if not is_remote(pattern):
        local = local_name(pattern)
        is_glob = any(mark in str(local) for mark in "*?[")
        if not is_glob and not local.is_dir():
            return [str(local)] if local.is_file() else []
        entries = glob.glob(str(local), recursive=True) if is_glob else map(str, local.iterdir())
        return sorted(name for name in entries if os.path.isfile(name))
    system, path = file_system(pattern, options)
    protocol = pattern.partition("://")[0]

    def list_names() -> list[str]:
        try:
            if any(mark in path for mark in "*?["):
                return [name for name in system.glob(path) if not system.isdir(name)]
            if protocol in ("http", "https") and "." not in path.rstrip("/").rpartition("/")[2]:
                return _list_web_folder(system, path.rstrip("/"))
            if system.isfile(path):
                return [path]
            return [entry["name"] for entry in system.ls(path, detail=True) if entry["type"] == "file"]
        except FileNotFoundError:
            return []

    names = sorted(_try(list_names, pattern))
    return [name if "://" in name else f"{protocol}://{name}" for name in names]


def _list_web_folder(system: Any, folder: str) -> list[str]:
    """Returns the files that a web server's listing of a folder links to, or its `index.json` without a listing.

    fsspec (2026.9) takes each URL that exists for a file, and lists a large file by reading it as text. So a name
    without a suffix is a folder here.
    """
    try:
        entries = system.ls(f"{folder}/", detail=True)
    except FileNotFoundError:
        entries = []
    files = [entry["name"] for entry in entries if entry["type"] == "file"]
    inside = [name for name in files if name.rpartition("/")[0] == folder and "?" not in name]
    return inside or [name for name in (f"{folder}/index.json", folder) if system.isfile(name)][:1]


def file_system(url: str, options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path in it.

    Raises:
        DloError: If its protocol is unknown, or its package is missing.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url, **(options or {}))
    except (ValueError, ImportError) as error:
        raise DloError(f"{url} cannot be opened: {error}") from error
    return system, path


def _try(call: Any, url: str) -> Any:
    """Returns the result of a call to a remote file system; tries again after errors that may pass."""
    for attempt in range(_TRIES):
        try:
            return call()
        except (FileNotFoundError, PermissionError) as error:
            raise DloError(f"{url} cannot be read: {error or type(error).__name__}; correct the URL") from error
        except Exception as error:  # Each file system raises errors of its own.
            if isinstance(error, DloError) or attempt + 1 == _TRIES:
                raise DloError(
                    f"{url} cannot be read after {attempt + 1} attempts: {type(error).__name__}: {error}; check the"
                    " connection, and resume the run"
                ) from error
            time.sleep(0.1 * 4**attempt)
    raise AssertionError


def read_at(file: int, size: int, offset: int) -> bytes:
    """Returns ``size`` bytes of a descriptor, fewer only at the end of the file; one ``pread`` may return fewer."""
    data = os.pread(file, size, offset)
    while len(data) < size:
        more = os.pread(file, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, between threads and processes of this node."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # Closing would leave it to a worker that was forked meanwhile.
        os.close(file)


# --- tars in WebDataset's layout --------------------------------------------------------------------------------


class TarMember(NamedTuple):
    """File in a tar.

    Attributes:
        key: Name of its sample: its path up to the first dot of the file's name.
        suffix: Rest of the name, in lower case, without the dot: ``jpg``, ``tokens.npy``.
        offset: Offset of its first byte.
        size: Size in bytes.
    """

    key: str
    suffix: str
    offset: int
    size: int


def scan_tar(file: LocalFile | RemoteFile) -> Iterator[TarMember]:
    """Yields the regular files of a tar, in their order; reads all headers.

    Members are called ``KEY.SUFFIX``, those of a sample in a row. Nothing is extracted to a file system, so that names
    and links of a hostile archive do nothing.

    Raises:
        DloError: If it is not an uncompressed tar, or it is truncated.
    """
    try:
        with tarfile.open(fileobj=io.BufferedReader(SeekableBytes(file), 1 << 20), mode="r:") as tar:
            for member in tar:
                if not member.isreg() or member.issparse():
                    continue
                if member.size < 0 or member.offset_data + member.size > file.size:
                    raise DloError(f"{file.name} must have the bytes of {member.name!r}, got a truncated file")
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                yield TarMember(key, suffix.lower(), member.offset_data, member.size)
    except tarfile.TarError as error:
        raise DloError(f"{file.name} must be a readable, uncompressed tar file, got {error}") from error


class SeekableBytes(io.RawIOBase):
    """Readable file object of a local or remote file.

    Args:
        file: File to read.
    """

    def __init__(self, file: LocalFile | RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position, and returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads into a buffer; returns the number of bytes."""
        content = self._file.read(self._at, min(len(buffer), max(0, self._file.size - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
