"""Opens the tokenised shards of a source: finds the format, and indexes the files once for all processes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dlo_framework.atomic_file import open_atomic
from dlo_framework.data.build_lock import build_once
from dlo_framework.data.remote import BlockCache, LocalFile, RemoteFile, is_remote, list_files, local_name, open_bytes
from dlo_framework.data.tar_shard import TarMember, scan_tar
from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.llm.streams.megatron import MegatronShard
from dlo_tasks.llm.streams.token_shards import RecordShard, StoreShard, TokenShard

Format = Literal["dlo", "megatron", "webdataset"]
FORMATS: tuple[Format, ...] = ("dlo", "megatron", "webdataset")
_INDEX_FORMAT = 1


class TokenFiles(NamedTuple):
    """Tokenised files of a source.

    Attributes:
        name: Name of the source.
        path: File, folder or glob, local or a URL; for Megatron-LM, its ``.bin`` or the path without suffix.
        format: Format of the files; None finds it from their names.
        column: Suffix of a tar's members with the ids, by default ``npy``.
    """

    name: str
    path: str
    format: Format | None = None
    column: str | None = None


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
        """Returns a file by path or URL."""
        return open_bytes(path, self.cache, self.options)


def open_tokens(files: TokenFiles, storage: Storage) -> list[TokenShard]:
    """Returns the shards of a source; indexes them first, if no process has done so.

    Raises:
        DloError: If files are missing or damaged, or their format is unknown.
    """
    names = list_token_files(files, storage)
    kind = files.format or _find_format(files, names)
    opened: list[TokenShard] = []
    if kind == "dlo":
        opened += [StoreShard(storage.open(name).local_path()) for name in names if name.endswith(".bin")]
    elif kind == "megatron":
        for name in names:
            if name.endswith(".bin"):
                opened.append(MegatronShard(storage.open(name), storage.open(f"{name.removesuffix('.bin')}.idx")))
    else:
        opened += [_open_tar(files, name, storage) for name in names if name.endswith(".tar")]
    if not opened:
        raise DloError(f"sources.{files.name}.path must name files of the format {kind}, got {names[0]}")
    return opened


def list_token_files(files: TokenFiles, storage: Storage) -> list[str]:
    """Returns the files of a source.

    Raises:
        DloError: If there are none.
    """
    path = files.path
    if is_remote(path) or local_name(path).exists() or any(mark in path for mark in "*?["):
        return list_files(path, storage.options)
    prefix = local_name(f"{path}.bin")
    if not prefix.exists():
        near = local_name(path).parent
        hint = did_you_mean(Path(path).name, [entry.name for entry in near.iterdir()] if near.is_dir() else [])
        raise DloError(f"sources.{files.name}.path must name files, got {path}, which does not exist{hint}")
    return [str(prefix)]


def _find_format(files: TokenFiles, names: Sequence[str]) -> Format:
    ends = {Path(name).suffix for name in names}
    if ".tar" in ends:
        return "webdataset"
    if ".bin" in ends:
        first = next(name for name in names if name.endswith(".bin"))
        return "dlo" if first.rpartition("/")[2].startswith("tokens-") else "megatron"
    removed = next((did_you_mean(kind, FORMATS) for kind in ("mds", "parquet") if f".{kind}" in ends), "")
    raise DloError(
        f"sources.{files.name}.format must be one of {', '.join(FORMATS)}, because no file of {files.path} has a known"
        f" suffix{removed or f'; set it, or name text under sources.{files.name}.files'}"
    )


def _open_tar(files: TokenFiles, name: str, storage: Storage) -> TokenShard:
    file, suffix = storage.open(name), files.column or "npy"
    made_of = [file.stamp(), suffix]
    places = _index(storage, [*made_of, "places"], lambda: _tar_places(file, suffix, files.name), name, sums=False)
    rows = np.load(places, mmap_mode="r", allow_pickle=False)
    read = partial(_read_tar, file, rows, suffix)
    lengths = lambda: np.array([len(read(number)) for number in range(len(rows))], np.int64)
    return RecordShard(name, _index(storage, made_of, lengths, name), read, partial(_row_range, rows), file)


def _tar_places(file: LocalFile | RemoteFile, suffix: str, source: str) -> np.ndarray:
    found: list[TarMember] = []
    others: set[str] = set()
    for member in scan_tar(file):
        if member.suffix == suffix:
            found.append(member)
        else:
            others.add(member.suffix)
    if not found:
        raise DloError(
            f"sources.{source}.column must be the suffix of members of {file.name}, got {suffix!r}; it has"
            f" {', '.join(sorted(others)) or 'none'}"
        )
    return np.array([(member.offset, member.size) for member in found], np.int64)


def _row_range(rows: np.ndarray, number: int) -> tuple[int, int]:
    return int(rows[number, 0]), int(rows[number, 1])


def _read_tar(file: LocalFile | RemoteFile, rows: np.ndarray, suffix: str, number: int) -> np.ndarray:
    content = file.read(*_row_range(rows, number))
    try:
        if suffix.rpartition(".")[2] == "json":
            return np.array(json.loads(content), dtype=np.int64)
        ids = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise DloError(
            f"{file.name}: member {number} ({suffix}) must be an .npy array or a JSON list of ids, got {error}"
        ) from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise DloError(f"{file.name}: member {number} must be integers with one dim, got {ids.dtype}{list(ids.shape)}")
    return ids


def _index(
    storage: Storage, made_of: list[Any], lengths: Callable[[], np.ndarray], name: str, *, sums: bool = True
) -> Path:
    """Returns the index file of a shard; builds it if no process has.

    Args:
        storage: Places of files.
        made_of: Values that the index depends on.
        lengths: Function that returns the number of tokens of each document; or with ``sums=False``, the rows to store.
        name: Name of the shard, for messages.
        sums: Whether to store the sums of the lengths.
    """
    key = hashlib.sha256(json.dumps([_INDEX_FORMAT, *made_of]).encode()).hexdigest()[:32]
    path = storage.indices / f"index-{key}.npy"

    def build() -> None:
        rows = lengths()
        if sums:
            rows = np.concatenate([[0], np.cumsum(rows)])
        with open_atomic(path, shared=True) as partly, open(partly, "wb") as file:
            np.save(file, rows.astype(np.int64), allow_pickle=False)

    build_once(path, build, f"indexing {name}")
    return path
