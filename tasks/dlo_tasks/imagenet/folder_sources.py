"""Sources of image files: class folders, or tar shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dlo_tasks.imagenet.tar_shards import IMAGE_SUFFIXES, load_index

HEAD = 1 << 16
"""Number of bytes that usually contain an image file's header; thumbnails and large colour profiles need more."""

_O_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


class ImageSource(Protocol):
    """Indexed collection of image files with their classes."""

    labels: np.ndarray
    """int64 [N]"""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Returns the bytes of one image file."""

    def head(self, index: int) -> bytes:
        """Returns the first :data:`HEAD` bytes of one image file, or all if there are fewer; thread-safe."""

    def name(self, index: int) -> str:
        """Returns the name of the file for messages."""


class FolderSource:
    """Source of image files in class folders.

    The paths are stored as one block of bytes: a list of a million strings would be copied page by page into each
    worker as its reference counts change.

    Args:
        folder: Folder with one subfolder per class.
        class_names: Names of the classes to read; the position of a name is the class index.
    """

    def __init__(self, folder: Path, class_names: Sequence[str]) -> None:
        self._prefix = os.path.join(folder, "")
        paths: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(class_names):
            found = image_files(folder / name) if (folder / name).is_dir() else []
            paths += [os.fsencode(path) for path in found]
            labels += [label] * len(found)
        self.labels = np.array(labels, dtype=np.int64)
        self._ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._block = b"".join(paths)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Returns the file's path."""
        start = int(self._ends[index - 1]) if index else 0
        return f"{self._prefix}{os.fsdecode(self._block[start : int(self._ends[index])])}"

    def read(self, index: int) -> bytes:
        """Returns the file's bytes, with half the system calls of ``open().read()``."""
        return self._read(index, None)

    def head(self, index: int) -> bytes:
        """Returns the file's first bytes."""
        return self._read(index, HEAD)

    def _read(self, index: int, most: int | None) -> bytes:
        file = os.open(self.name(index), os.O_RDONLY | _O_CLOEXEC)
        try:
            return _read_at(file, most or os.fstat(file).st_size, 0)
        finally:
            os.close(file)


def _read_at(file: int, size: int, offset: int) -> bytes:
    """Returns ``size`` bytes, fewer only at the end of the file; one ``pread`` may return fewer anywhere."""
    data = os.pread(file, size, offset)
    while len(data) < size:
        more = os.pread(file, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def image_files(folder: Path) -> list[str]:
    """Returns the image files of one class folder and its subfolders, as ``class/.../file``, sorted."""
    found: list[str] = []
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    pending.append(entry.path)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    found.append(os.path.relpath(entry.path, folder.parent))
    return sorted(found)


def class_folders(folder: Path) -> list[str]:
    """Returns the names of the class folders in ``folder``, sorted; a name's position is its class index."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


class ShardSource:
    """Source of images in tar shards; each image is read by one ``pread``.

    Args:
        shards: Paths of the tar files.
        class_names: Names that labels may use; None allows only class indices.
    """

    def __init__(self, shards: Sequence[Path], class_names: list[str] | None = None) -> None:
        self.shards = list(shards)
        indices = [load_index(path, class_names) for path in self.shards]
        self.labels = np.concatenate([index.labels for index in indices])
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._sizes = np.concatenate([index.sizes for index in indices])
        self._starts = np.cumsum([0] + [len(index.labels) for index in indices])
        self._keys = [np.array(index.keys, dtype=np.bytes_ if _ascii(index.keys) else np.str_) for index in indices]
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def name(self, index: int) -> str:
        """Returns ``shard.tar!member``."""
        shard = self._shard_of(index)
        key = self._keys[shard][index - self._starts[shard]]
        return f"{self.shards[shard]}!{key.decode() if isinstance(key, bytes) else key}"

    def read(self, index: int) -> bytes:
        """Returns the image's bytes; each process opens a shard once, and ``pread`` moves no shared position."""
        return _read_at(self._file(self._shard_of(index)), int(self._sizes[index]), int(self._offsets[index]))

    def head(self, index: int) -> bytes:
        """Returns the image's first bytes."""
        size = min(HEAD, int(self._sizes[index]))
        return _read_at(self._file(self._shard_of(index)), size, int(self._offsets[index]))

    def _file(self, shard: int) -> int:
        file = self._files.get(shard)
        if file is None:
            opened = os.open(self.shards[shard], os.O_RDONLY | _O_CLOEXEC)
            file = self._files.setdefault(shard, opened)
            if file != opened:  # another thread was faster
                os.close(opened)
        return file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # file descriptors are invalid in another process

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def _ascii(keys: list[str]) -> bool:
    return all(key.isascii() for key in keys)
