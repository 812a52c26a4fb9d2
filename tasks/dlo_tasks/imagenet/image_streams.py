"""Images in tar shards, MDS shards and Parquet files, local or remote, as one indexed collection.

Labels are read once and stored in an index file, which all processes share. After that, an image is one read of its
bytes; those of remote files come from a bounded cache of blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlo_framework.atomic_file import open_atomic
from dlo_framework.data.build_lock import build_once
from dlo_framework.data.mds_shard import MdsShard, decode_mds_scalar, read_mds_index
from dlo_framework.data.parquet_shard import ParquetShard
from dlo_framework.data.remote import BlockCache, ByteFile, LocalFile, RemoteFile, find_files, is_remote, open_bytes
from dlo_framework.data.tar_shard import scan_tar
from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.imagenet.folder_sources import HEAD, ImageSource
from dlo_tasks.imagenet.tar_shards import IMAGE_SUFFIXES, LABEL_SUFFIXES, MAX_LABEL_BYTES, parse_label

#: Names of columns that datasets use for images and their classes.
_NAMES = {"image": ("image", "jpg", "jpeg", "img", "x"), "label": ("label", "cls", "labels", "class", "y")}
_INDEX_FORMAT = 1


class ImageStorage(NamedTuple):
    """Places for remote files and indices, and the columns of shards.

    Attributes:
        cache: Cache of remote files.
        indices: Folder of the indices, shared by all processes.
        options: Options of the remote file system.
        columns: Names of the columns of images and labels, under ``image`` and ``label``; known ones are found.
    """

    cache: BlockCache
    indices: Path
    options: dict[str, Any]
    columns: Mapping[str, str]

    def open(self, path: str) -> LocalFile | RemoteFile:
        """Returns a file by path or URL."""
        return open_bytes(path, self.cache, self.options)


class ImageShard(Protocol):
    """Images of one file.

    Attributes:
        name: Name for messages.
        labels: Class indices, int64 [N].
    """

    name: str
    labels: np.ndarray

    def read(self, index: int) -> bytes:
        """Returns the bytes of an image file."""

    def range(self, index: int) -> tuple[int, int]:
        """Returns the (offset, size) in the file that :meth:`read` reads."""

    @property
    def file(self) -> ByteFile:
        """The file."""


class TarImages:
    """Images of a tar in WebDataset's layout: ``KEY.jpg`` with ``KEY.cls`` or ``KEY.json``."""

    def __init__(self, path: str, storage: ImageStorage, class_names: list[str] | None) -> None:
        self.name, self.file = path, storage.open(path)
        rows = _stored(
            storage, [self.file.stamp(), class_names], path, lambda: tar_rows(self.file, class_names).ravel()
        ).reshape(-1, 3)
        self._offsets, self._sizes, self.labels = (np.ascontiguousarray(rows[:, column]) for column in range(3))

    def read(self, index: int) -> bytes:
        """Returns the bytes of an image file."""
        return self.file.read(*self.range(index))

    def range(self, index: int) -> tuple[int, int]:
        """Returns the place of an image."""
        return int(self._offsets[index]), int(self._sizes[index])


class MdsImages:
    """Images of an MDS shard, in a column with the encoding ``jpeg``, ``png`` or ``bytes``."""

    def __init__(self, shard: MdsShard, storage: ImageStorage) -> None:
        self.name, self.file, self._shard = shard.name, shard.file, shard
        self._image = find_column("image", shard.columns, storage.columns, shard.name)
        label = find_column("label", shard.columns, storage.columns, shard.name)
        shard.check_column(self._image)
        shard.check_column(label)
        if shard.encodings[self._image] not in ("jpeg", "png", "bytes"):
            raise DloError(
                f"column {self._image!r} of {shard.name} must be jpeg, png or bytes, got the encoding"
                f" {shard.encodings[self._image]}; set columns: {{image: ...}}"
            )

        def labels() -> np.ndarray:
            encoding = shard.encodings[label]
            return np.array([decode_mds_scalar(shard.read(n, label)[0], encoding) for n in range(len(shard))])

        self.labels = _stored(storage, [shard.stamp(), label], shard.name, labels)

    def read(self, index: int) -> bytes:
        """Returns the bytes of an image file."""
        return self._shard.read(index, self._image)[0]

    def range(self, index: int) -> tuple[int, int]:
        """Returns the place of a sample."""
        return self._shard.range(index)


class ParquetImages:
    """Images of a Parquet file, as Hugging Face's datasets store them: ``{bytes, path}``, or binary."""

    def __init__(self, path: str, storage: ImageStorage) -> None:
        self.name, self.file = path, storage.open(path)
        self._shard = ParquetShard(self.file)
        self._image = find_column("image", self._shard.columns, storage.columns, path)
        label = find_column("label", self._shard.columns, storage.columns, path)

        def labels() -> np.ndarray:
            groups = [self._shard.group(n, label) for n in range(len(self._shard.starts) - 1)]
            return np.concatenate([np.array(group.to_pylist()) for group in groups])

        self.labels = _stored(storage, [self._shard.stamp(), label], path, labels)

    def read(self, index: int) -> bytes:
        """Returns the bytes of an image file."""
        value = self._shard.read(index, self._image).as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise DloError(
                f"column {self._image!r} of {self.name} must have the bytes of images, got {type(content).__name__} in"
                f" row {index}; set columns: {{image: ...}}"
            )
        return content

    def range(self, index: int) -> tuple[int, int]:
        """Returns the place of a row's group."""
        return self._shard.group_range(index)


class StreamSource:
    """Images of several shards, one after the other; a :class:`dlo_tasks.imagenet.folder_sources.ImageSource`.

    Args:
        shards: Shards, in the order of their names.
    """

    def __init__(self, shards: Sequence[ImageShard]) -> None:
        self._shards = list(shards)
        self._starts = np.cumsum([0] + [len(shard.labels) for shard in shards])
        self.labels = np.concatenate([shard.labels for shard in shards])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Returns the bytes of one image file."""
        shard, within = self._place(index)
        return shard.read(within)

    def head(self, index: int) -> bytes:
        """Returns the first bytes of one image file."""
        return self.read(index)[:HEAD]

    def name(self, index: int) -> str:
        """Returns ``file!number``."""
        shard, within = self._place(index)
        return f"{shard.name}!{within}"

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begins to fetch images."""
        for index in indices:
            shard, within = self._place(index)
            shard.file.read_ahead([shard.range(within)])

    def _place(self, index: int) -> tuple[ImageShard, int]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[shard], index - int(self._starts[shard])


class JoinedImages:
    """Images of several sources, one after the other; an :class:`dlo_tasks.imagenet.folder_sources.ImageSource`.

    Args:
        sources: Sources, with the same classes.
    """

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        self.sources = list(sources)
        self._starts = np.cumsum([0] + [len(source) for source in sources])
        self.labels = np.concatenate([source.labels for source in sources])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Returns the bytes of one image file."""
        source, within = self._place(index)
        return source.read(within)

    def head(self, index: int) -> bytes:
        """Returns the first bytes of one image file."""
        source, within = self._place(index)
        return source.head(within)

    def name(self, index: int) -> str:
        """Returns the file's name."""
        source, within = self._place(index)
        return source.name(within)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begins to fetch images."""
        for index in indices:
            source, within = self._place(index)
            if isinstance(source, StreamSource):
                source.read_ahead([within])

    def _place(self, index: int) -> tuple[ImageSource, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.sources[number], index - int(self._starts[number])


def find_streams(root: str, split: str, options: dict[str, Any]) -> list[str]:
    """Returns the shards of a split: an MDS index, Parquet files, or the tar files of a remote root; [] for none.

    Args:
        root: Folder or URL.
        split: Name of the split.
        options: Options of the remote file system.
    """
    base = root.rstrip("/")
    patterns = [f"{base}/{split}/index.json", f"{base}/{split}-*.parquet", f"{base}/{split}/*.parquet"]
    if is_remote(root):
        patterns += [f"{base}/{split}-*.tar", f"{base}/{split}/*.tar"]
    for pattern in patterns:
        found = _matching(pattern, options)
        if found:
            return found
    return []


def _matching(pattern: str, options: dict[str, Any]) -> list[str]:
    """Returns the files whose names match the last part of a pattern; characters of the folder have no meaning."""
    folder, _, name = pattern.rpartition("/")
    if not is_remote(pattern) and not Path(folder).is_dir():
        return []
    return [each for each in find_files(folder, options) if fnmatch(each.rpartition("/")[2], name)]


def open_stream(names: Sequence[str], storage: ImageStorage, class_names: list[str] | None) -> StreamSource:
    """Returns the images of shards that :func:`find_streams` has found; reads their labels first, if nobody has.

    Raises:
        DloError: If they cannot be read, have no columns of images and labels, or hold no image.
    """
    shards: list[ImageShard] = []
    for name in names:
        if name.endswith(".tar"):
            shards.append(TarImages(name, storage, class_names))
        elif name.endswith(".parquet"):
            shards.append(ParquetImages(name, storage))
        else:
            index = storage.open(name)
            for entry in read_mds_index(index.read(0, index.size), name):
                file = storage.open(f"{name.rpartition('/')[0]}/{entry['raw_data']['basename']}")
                shards.append(MdsImages(MdsShard(file, entry), storage))
    source = StreamSource(shards)
    if not len(source):
        raise DloError(f"the shards {names[0]} ... must contain images, got none")
    return source


def find_column(kind: str, columns: Sequence[str], given: Mapping[str, str], name: str) -> str:
    """Returns the column of images or labels.

    Args:
        kind: ``image`` or ``label``.
        columns: Columns of the file.
        given: Names that the user has set.
        name: Name of the file, for messages.

    Raises:
        DloError: If there is none.
    """
    if kind in given:
        if given[kind] not in columns:
            hint = did_you_mean(given[kind], columns)
            raise DloError(f"columns.{kind} must be one of {', '.join(columns)} for {name}, got {given[kind]!r}{hint}")
        return given[kind]
    found = next((column for column in _NAMES[kind] if column in columns), None)
    if found is None:
        raise DloError(
            f"{name} must have a column {' or '.join(_NAMES[kind])}, got {', '.join(columns)}; set columns:"
            f" {{{kind}: ...}}"
        )
    return found


def tar_rows(file: LocalFile | RemoteFile, class_names: list[str] | None) -> np.ndarray:
    """Returns the offset, the size and the class index of each image of a tar, int64 [N, 3].

    Raises:
        DloError: If an image has no usable label.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    for member in scan_tar(file):
        suffix = f".{member.suffix}"
        if suffix in IMAGE_SUFFIXES:
            images[member.key] = member.offset, member.size
        elif suffix in LABEL_SUFFIXES:
            if member.size > MAX_LABEL_BYTES:
                raise DloError(f"{file.name}: the label of {member.key!r} must be at most 64 KiB, got {member.size}")
            content = file.read(member.offset, member.size)
            labels[member.key] = parse_label(content, suffix, f"{file.name}: {member.key}", class_names)
    missing = next((key for key in images if key not in labels), None)
    if missing is not None:
        raise DloError(f"{file.name}: {missing!r} must have a label, got none; add {missing}.cls")
    return np.array([(*images[key], labels[key]) for key in images], np.int64).reshape(-1, 3)


def _stored(storage: ImageStorage, made_of: list[Any], name: str, rows: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the rows of a shard's index, int64; makes and stores them if no process has."""
    key = hashlib.sha256(json.dumps([_INDEX_FORMAT, *made_of]).encode()).hexdigest()[:32]
    path = storage.indices / f"labels-{key}.npy"

    def build() -> None:
        made = np.asarray(rows())
        if made.size and (not np.issubdtype(made.dtype, np.integer) or int(made.min()) < 0):
            raise DloError(
                f"{name}: labels must be class indices from 0, got {made.dtype}, {made.ravel()[:3].tolist()}"
            )
        with open_atomic(path, shared=True) as partly, open(partly, "wb") as file:
            np.save(file, made.astype(np.int64), allow_pickle=False)

    build_once(path, build, f"indexing {name}")
    return np.asarray(np.load(path, allow_pickle=False))
