"""Images in remote tar shards, as one indexed collection.

Labels are read once and stored in an index file, which all processes share. After that, an image is one read of its
bytes, from a bounded cache of blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlo_framework.atomic_file import open_atomic
from dlo_framework.data.build_lock import build_once
from dlo_framework.data.remote import BlockCache, LocalFile, RemoteFile, find_files, is_remote, open_bytes
from dlo_framework.data.tar_shard import scan_tar
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.folder_sources import HEAD, ImageSource
from dlo_tasks.imagenet.tar_shards import IMAGE_SUFFIXES, LABEL_SUFFIXES, MAX_LABEL_BYTES, parse_label

_INDEX_FORMAT = 1


class ImageStorage(NamedTuple):
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


class TarImages:
    """Images of a tar in WebDataset's layout: ``KEY.jpg`` with ``KEY.cls`` or ``KEY.json``."""

    def __init__(self, path: str, storage: ImageStorage, class_names: list[str] | None) -> None:
        file = storage.open(path)
        assert isinstance(file, RemoteFile)
        self.name, self.file = path, file
        key = hashlib.sha256(json.dumps([_INDEX_FORMAT, self.file.stamp(), class_names]).encode()).hexdigest()[:32]
        index = storage.indices / f"labels-{key}.npy"

        def build() -> None:
            with open_atomic(index, shared=True) as partly, open(partly, "wb") as file:
                np.save(file, tar_rows(self.file, class_names).ravel(), allow_pickle=False)

        build_once(index, build, f"indexing {path}")
        rows = np.asarray(np.load(index, allow_pickle=False)).reshape(-1, 3)
        self._offsets, self._sizes, self.labels = (np.ascontiguousarray(rows[:, column]) for column in range(3))

    def read(self, index: int) -> bytes:
        """Returns the bytes of an image file."""
        return self.file.read(*self.range(index))

    def range(self, index: int) -> tuple[int, int]:
        """Returns the place of an image."""
        return int(self._offsets[index]), int(self._sizes[index])


class StreamSource:
    """Images of several shards, one after the other; a :class:`dlo_tasks.imagenet.folder_sources.ImageSource`.

    Args:
        shards: Shards, in the order of their names.
    """

    def __init__(self, shards: Sequence[TarImages]) -> None:
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

    def _place(self, index: int) -> tuple[TarImages, int]:
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
    """Returns the tar files of a split of a remote root; [] for none, and for a local root.

    Args:
        root: Folder or URL.
        split: Name of the split.
        options: Options of the remote file system.
    """
    if not is_remote(root):
        return []
    base = root.rstrip("/")
    for folder, name in ((base, f"{split}-*.tar"), (f"{base}/{split}", "*.tar")):
        found = [each for each in find_files(folder, options) if fnmatch(each.rpartition("/")[2], name)]
        if found:
            return found
    return []


def open_stream(names: Sequence[str], storage: ImageStorage, class_names: list[str] | None) -> StreamSource:
    """Returns the images of shards that :func:`find_streams` has found; reads their labels first, if nobody has.

    Raises:
        DloError: If they cannot be read, an image has no label, or they hold no image.
    """
    source = StreamSource([TarImages(name, storage, class_names) for name in names])
    if not len(source):
        raise DloError(f"the shards {names[0]} ... must contain images, got none")
    return source


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
