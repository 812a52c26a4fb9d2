"""Sources of text and of tokenised shards: the option ``sources``, the formats, and the indices of their files.

Indices are made once for all processes.

Megatron-LM's indexed datasets are ``PREFIX.bin`` with the tokens, and ``PREFIX.idx`` with the sequences. The index,
little-endian, version 1 of Megatron-LM's ``indexed_dataset.py``:

```
0    magic     b"MMIDIDX\0\0"
9    version   uint64            1
17   type      uint8             of the tokens
18   sequences uint64            n
26   documents uint64            d, with the end: number of documents plus one
34   lengths   int32 [n]         tokens of each sequence
     pointers  int64 [n]         offset of each sequence in the .bin, in bytes
     bounds    int64 [d]         first sequence of each document, and n
```

Both files are mapped, so that a corpus of any size opens at once. A remote index is fetched in full; remote tokens are
fetched in blocks.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dlo_framework.atomic_file import open_atomic
from dlo_framework.data.remote import (
    LocalFile,
    RemoteFile,
    Storage,
    TarMember,
    is_remote,
    list_files,
    local_name,
    scan_tar,
)
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.lock import build_once
from dlo_tasks.language.token_windows import (
    StoreShard,
    TokenShard,
    TokenWindows,
    document_of,
    gather_windows,
    map_bytes,
)

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
        opened += [TarShard(files, name, storage) for name in names if name.endswith(".tar")]
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


def _tar_places(file: LocalFile | RemoteFile, suffix: str, source: str) -> np.ndarray:
    members: list[TarMember] = []
    others: set[str] = set()
    for member in scan_tar(file):
        if member.suffix == suffix:
            members.append(member)
        else:
            others.add(member.suffix)
    if not members:
        raise DloError(
            f"sources.{source}.column must be the suffix of members of {file.name}, got {suffix!r}; it has"
            f" {', '.join(sorted(others)) or 'none'}"
        )
    return np.array([(member.offset, member.size) for member in members], np.int64)


class TarShard:
    """Shard whose documents are members of a tar in WebDataset's layout; a :class:`TokenShard`.

    Args:
        files: Source of the tar; its column is the suffix of the members.
        name: Path or URL of the tar.
        storage: Places of files and indices.
    """

    def __init__(self, files: TokenFiles, name: str, storage: Storage) -> None:
        self.name, self.file, self._suffix = name, storage.open(name), files.column or "npy"
        made_of = [self.file.stamp(), self._suffix]
        find = lambda: _tar_places(self.file, self._suffix, files.name)
        self._places_file = _index(storage, [*made_of, "places"], find, name, sums=False)
        self._rows = np.load(self._places_file, mmap_mode="r", allow_pickle=False)  # offset and size of each document
        lengths = lambda: np.array([len(self._read(number)) for number in range(len(self._rows))], np.int64)
        self._index_file = _index(storage, made_of, lengths, name)
        self._bounds = np.load(self._index_file, mmap_mode="r", allow_pickle=False)
        self.documents, self.tokens = len(self._bounds) - 1, int(self._bounds[-1])

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        return np.asarray(self._bounds[index])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns the ids of windows, each of as many documents as it spans."""
        firsts, lasts = document_of(self, np.stack([starts, starts + length - 1]))
        rows = []
        for start, first, last in zip(starts.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            ids = np.concatenate([self._checked(number) for number in range(first, last + 1)])
            rows.append(ids[start - int(self._bounds[first]) :][:length])
        return np.stack(rows)

    def ranges(self, starts: np.ndarray, length: int) -> list[tuple[int, int]]:
        """Returns the ranges of the documents of windows."""
        firsts, lasts = document_of(self, np.stack([starts, starts + length - 1]))
        spans = (range(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True))
        return [(int(offset), int(size)) for offset, size in self._rows[sorted(set().union(*spans))]]

    def _checked(self, number: int) -> np.ndarray:
        ids, expected = self._read(number), int(self._bounds[number + 1] - self._bounds[number])
        if len(ids) != expected:
            raise DloError(
                f"{self.name}: document {number} must have {expected} tokens, as when it was indexed, got {len(ids)};"
                f" delete {self._index_file}"
            )
        return ids

    def _read(self, number: int) -> np.ndarray:
        content = self.file.read(*(int(value) for value in self._rows[number]))
        try:
            if self._suffix.rpartition(".")[2] == "json":
                return np.array(json.loads(content), dtype=np.int64)
            ids = np.load(io.BytesIO(content), allow_pickle=False)
        except ValueError as error:
            raise DloError(
                f"{self.name}: member {number} ({self._suffix}) must be an .npy array or a JSON list of ids, got"
                f" {error}"
            ) from error
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise DloError(
                f"{self.name}: member {number} must be integers with one dim, got {ids.dtype}{list(ids.shape)}"
            )
        return np.asarray(ids)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bounds": None, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows, self._bounds = (
            np.load(path, mmap_mode="r", allow_pickle=False) for path in (self._places_file, self._index_file)
        )


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


# --- Megatron-LM's files ------------------------------------------------------------------------------------------

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = 34
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}


class MegatronShard:
    """One pair of ``.bin`` and ``.idx``; a :class:`dlo_tasks.language.token_windows.TokenShard`.

    Args:
        tokens: File of the tokens.
        index: File of the index.

    Raises:
        DloError: If the index is damaged, has another version, or does not belong to the tokens.
    """

    def __init__(self, tokens: LocalFile | RemoteFile, index: LocalFile | RemoteFile) -> None:
        self.name, self.file, self._index = tokens.name, tokens, index.local_path()
        with open(self._index, "rb") as file:
            head = file.read(_HEADER)
        if len(head) < _HEADER or not head.startswith(_MAGIC):
            raise DloError(f"{index.name} must be an index of Megatron-LM, got another file; correct the path")
        version, code, sequences, bounds = struct.unpack("<QBQQ", head[len(_MAGIC) :])
        if version != 1 or code not in _TYPES:
            got = _FLOATS.get(code, f"type {code}")
            raise DloError(f"{index.name} must have version 1 and integer tokens, got version {version} and {got}")
        expected = _HEADER + sequences * 12 + bounds * 8
        size = self._index.stat().st_size
        if size != expected or bounds < 2:
            raise DloError(
                f"{index.name} must have {expected} bytes for {sequences} sequences and {bounds} bounds, got {size};"
                " copy it again"
            )
        self.kind = np.dtype(_TYPES[code])
        self._shape = int(sequences), int(bounds)
        self._map()
        self.documents = int(bounds) - 1
        self.tokens = tokens.size // self.kind.itemsize
        end = int(self._pointers[-1]) + int(self._lengths[-1]) * self.kind.itemsize if sequences else 0
        if end != tokens.size or (sequences and self._pointers[0] != 0) or self._bounds[-1] != sequences:
            raise DloError(
                f"{tokens.name} must have the {end} bytes that {index.name} describes, in the order of its sequences,"
                f" got {tokens.size}; copy both again"
            )

    def _map(self) -> None:
        sequences, bounds = self._shape
        # Searches read a few entries in random places.
        index = map_bytes(self._index, random=True)
        ends = np.cumsum([_HEADER, 4 * sequences, 8 * sequences, 8 * bounds]).tolist()
        self._lengths = index[ends[0] : ends[1]].view("<i4")
        self._pointers = index[ends[1] : ends[2]].view("<i8")
        self._bounds = index[ends[2] : ends[3]].view("<i8")
        self._ids: np.ndarray | None = None
        if isinstance(self.file, LocalFile) and self.file.size:
            self._ids = map_bytes(Path(self.file.path)).view(self.kind)

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        sequence = self._bounds[index]
        pointers = self._pointers[np.minimum(sequence, self._shape[0] - 1)]
        return np.where(sequence < self._shape[0], pointers // self.kind.itemsize, self.tokens)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns the ids of windows."""
        if self._ids is not None:
            return gather_windows(self._ids, starts, length)
        size = self.kind.itemsize
        rows = [self.file.read(start * size, length * size) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), self.kind).reshape(len(rows), length)

    def ranges(self, starts: np.ndarray, length: int) -> list[tuple[int, int]]:
        """Returns the ranges of windows."""
        size = self.kind.itemsize
        return [(start * size, length * size) for start in starts.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lengths": None, "_pointers": None, "_bounds": None, "_ids": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


# --- the option `sources` -----------------------------------------------------------------------------------------

_TEXT = ("files",)
_TOKENS = ("path", "format", "column")


class TextSource(NamedTuple):
    """One source of text.

    Attributes:
        name: Name of the source.
        files: Paths or globs of text that is tokenised; None for tokenised shards.
        tokens: Tokenised shards; None for text.
    """

    name: str
    files: str | list[str] | None
    tokens: TokenFiles | None


def read_sources(option: Mapping[str, Any]) -> list[TextSource]:
    """Returns the sources that the option ``sources`` describes.

    Args:
        option: Options of each source, by name: ``files``; or ``path`` with ``format`` and ``column``.

    Raises:
        DloError: If there is none, or a source has unknown, missing or contradictory keys.
    """
    if not option:
        raise DloError("sources must name at least one source, got none; write {web: {files: web/*.jsonl}}")
    return [_read_source(name, values) for name, values in option.items()]


def _read_source(name: str, values: Any) -> TextSource:
    key = f"sources.{name}"
    if not isinstance(values, Mapping):
        raise DloError(f"{key} must be an object with files or path, got {str(values)[:60]!r}; write {{files: ...}}")
    known = (*_TEXT, *_TOKENS)
    unknown = next((entry for entry in values if entry not in known), None)
    if unknown is not None:
        raise DloError(
            f"{key} must have only {', '.join(known)}, got {unknown!r}{did_you_mean(unknown, known) or '; remove it'}"
        )
    if ("files" in values) == ("path" in values):
        got = "both" if "files" in values else "neither"
        raise DloError(f"{key} must have either files, for text, or path, for tokenised shards, got {got}")
    if "files" in values:
        extra = next((entry for entry in values if entry != "files"), None)
        if extra is not None:
            raise DloError(f"{key}.{extra} must not be set for text, got {values[extra]!r}; remove it, or set path")
        return TextSource(name, values["files"], None)
    if values.get("format") not in (None, *FORMATS):
        raise DloError(
            f"{key}.format must be one of {', '.join(FORMATS)}, got {values['format']!r}"
            f"{did_you_mean(str(values['format']), FORMATS)}"
        )
    return TextSource(name, None, TokenFiles(name, str(values["path"]), values.get("format"), values.get("column")))


class SourceStatistics(NamedTuple):
    """Statistics of the windows of all sources.

    Attributes:
        sizes: Number of windows of each source.
        seq_len: Positions per window.
    """

    sizes: dict[str, int]
    seq_len: int

    @property
    def samples(self) -> int:
        """Number of windows of all sources."""
        return sum(self.sizes.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {size:,}" for name, size in self.sizes.items())
        return f"{self.samples:,} windows of {self.seq_len:,} in {len(self.sizes)} sources: {each}"


def hold_out(windows: TokenWindows, val_fraction: float) -> tuple[TokenWindows, TokenWindows]:
    """Returns the windows for training and those for validation: the last of the source, rounded up.

    Contiguous windows share no document with those for training but one. Nothing is read.

    Args:
        windows: All windows of a source.
        val_fraction: Fraction of them to hold out; with 0, both parts are all windows.

    Raises:
        DloError: If no window is left for training.
    """
    if not val_fraction:
        return windows, windows
    held = math.ceil(len(windows) * val_fraction)
    if held >= len(windows):
        raise DloError(
            f"val_fraction must leave windows of sources.{windows.name} for training, got {val_fraction} of"
            f" {len(windows)}; lower it, or set val_files"
        )
    past = len(windows)
    return windows.part(0, past - held), windows.part(past - held, past)
