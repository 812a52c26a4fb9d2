"""Sources of image files: class folders, and tar shards in WebDataset's layout, local or remote.

A shard is read once, header by header, to store the offset, the size and the label of each image in an index file,
which all processes share. After that an image is one read of its bytes. Nothing is ever extracted, so names and links
of a hostile archive do not reach the file system.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlo_framework.atomic_file import open_atomic
from dlo_framework.data.remote import (
    LocalFile,
    RemoteFile,
    Storage,
    find_files,
    is_remote,
    read_at,
    scan_tar,
)
from dlo_framework.errors import DloError, MissingInput, did_you_mean, nearest, shown_names
from dlo_framework.lock import build_once

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
LABEL_SUFFIXES = (".cls", ".json")
MAX_LABEL_BYTES = 1 << 16
_INDEX_FORMAT = 2


class ImageSource(Protocol):
    """Indexed collection of image files with their classes."""

    labels: np.ndarray
    """int64 [N]"""

    def __len__(self) -> int: ...

    def read(self, index: int, most: int | None = None) -> bytes:
        """Returns the bytes of one image file, or the first of them, at most `most`; thread-safe."""

    def name(self, index: int) -> str:
        """Returns the name of the file for messages."""

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begins to fetch images that are not on a disk."""


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
            files = image_files(folder / name) if (folder / name).is_dir() else []
            paths += [os.fsencode(path) for path in files]
            labels += [label] * len(files)
        self.labels = np.array(labels, dtype=np.int64)
        self._ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._block = b"".join(paths)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Returns the file's path."""
        start = int(self._ends[index - 1]) if index else 0
        return f"{self._prefix}{os.fsdecode(self._block[start : int(self._ends[index])])}"

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Does nothing: the files are on a disk."""

    def read(self, index: int, most: int | None = None) -> bytes:
        """Returns the file's bytes, with half the system calls of ``open().read()``."""
        file = os.open(self.name(index), os.O_RDONLY)
        try:
            return read_at(file, most or os.fstat(file).st_size, 0)
        finally:
            os.close(file)


def image_files(folder: Path) -> list[str]:
    """Returns the image files of one class folder and its subfolders, as ``class/.../file``, sorted."""
    files: list[str] = []
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    pending.append(entry.path)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    files.append(os.path.relpath(entry.path, folder.parent))
    return sorted(files)


def class_folders(folder: Path) -> list[str]:
    """Returns the names of the class folders in ``folder``, sorted; a name's position is its class index."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


# --- tar shards --------------------------------------------------------------------------------------------


class ShardIndex(NamedTuple):
    """Index of the images of one tar file.

    Attributes:
        offsets: Offset of the first byte of each image, int64 [N].
        sizes: Sizes in bytes, int64 [N].
        labels: Class indices, int64 [N].
        names: Names of the images inside the tar, [N].
    """

    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    names: np.ndarray


class ShardSource:
    """Source of images in tar shards, ``KEY.jpg`` with ``KEY.cls`` or ``KEY.json``, one shard after the other.

    Args:
        shards: Paths or URLs of the tar files.
        storage: Places for blocks of remote files and for indices.
        class_names: Names that labels may use; None allows only class indices.

    Raises:
        DloError: If a shard cannot be read, or an image has no usable label.
    """

    def __init__(self, shards: Sequence[str], storage: Storage, class_names: list[str] | None) -> None:
        self._files = [storage.open(path) for path in shards]
        self._indices = [load_index(file, storage, class_names) for file in self._files]
        self._starts = np.cumsum([0] + [len(index.labels) for index in self._indices])
        self.labels = np.concatenate([index.labels for index in self._indices])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, most: int | None = None) -> bytes:
        """Returns the bytes of one image file."""
        file, offset, size = self._place(index)
        return file.read(offset, min(size, most or size))

    def name(self, index: int) -> str:
        """Returns ``shard.tar!member``."""
        shard, within = self._within(index)
        return f"{self._files[shard].name}!{self._indices[shard].names[within]}"

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begins to fetch images of remote shards."""
        for index in indices:
            file, offset, size = self._place(index)
            if isinstance(file, RemoteFile):
                file.read_ahead([(offset, size)])

    def _within(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])

    def _place(self, index: int) -> tuple[LocalFile | RemoteFile, int, int]:
        shard, within = self._within(index)
        known = self._indices[shard]
        return self._files[shard], int(known.offsets[within]), int(known.sizes[within])


class JoinedImages:
    """Images of several sources, one after the other; an :class:`ImageSource`.

    Args:
        sources: Sources, with the same classes.
    """

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        self.sources = list(sources)
        self._starts = np.cumsum([0] + [len(source) for source in sources])
        self.labels = np.concatenate([source.labels for source in sources])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, most: int | None = None) -> bytes:
        """Returns the bytes of one image file."""
        source, within = self._place(index)
        return source.read(within, most)

    def name(self, index: int) -> str:
        """Returns the file's name."""
        source, within = self._place(index)
        return source.name(within)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begins to fetch images."""
        for index in indices:
            source, within = self._place(index)
            source.read_ahead([within])

    def _place(self, index: int) -> tuple[ImageSource, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.sources[number], index - int(self._starts[number])


def find_shards(root: Path | str, split: str, options: dict[str, Any]) -> list[str]:
    """Returns ``root/split-*.tar`` and ``root/split/*.tar``, sorted by name; of a remote root the first that is there.

    Args:
        root: Folder or URL.
        split: Name of the split.
        options: Options of the remote file system.
    """
    if not is_remote(str(root)):
        folder = Path(root)
        return list(map(str, sorted(folder.glob(f"{split}-*.tar")) + sorted((folder / split).glob("*.tar"))))
    base = str(root).rstrip("/")
    for place, name in ((base, f"{split}-*.tar"), (f"{base}/{split}", "*.tar")):
        shards = [each for each in find_files(place, options) if fnmatch(each.rpartition("/")[2], name)]
        if shards:
            return shards
    return []


def load_index(file: LocalFile | RemoteFile, storage: Storage, class_names: list[str] | None) -> ShardIndex:
    """Returns the index of a tar, from its file if the tar has not changed.

    Args:
        file: Tar file.
        storage: Place of the indices.
        class_names: Names that labels may use; None allows only class indices.

    Raises:
        DloError: If it is not a tar file, or an image has no usable label.
    """
    key = hashlib.sha256(json.dumps([_INDEX_FORMAT, file.stamp(), class_names]).encode()).hexdigest()[:32]
    path = storage.indices / f"labels-{key}.npz"

    def build() -> None:
        index = build_index(file, class_names)
        with open_atomic(path, shared=True) as partial, open(partial, "wb") as written:
            np.savez(written, **index._asdict())

    build_once(path, build, f"indexing {file.name}", lambda: _read_index(path) is not None)
    shard_index = _read_index(path)
    assert shard_index is not None
    return shard_index


def _read_index(path: Path) -> ShardIndex | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return ShardIndex(**stored)
    except Exception:  # Not there, or damaged: it is built again.
        return None


def build_index(file: LocalFile | RemoteFile, class_names: list[str] | None) -> ShardIndex:
    """Reads a tar file's headers and labels; see :func:`load_index`."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, int] = {}
    for member in scan_tar(file):
        suffix, name = f".{member.suffix}", f"{member.key}.{member.suffix}"
        if suffix in IMAGE_SUFFIXES:
            images[member.key] = member.offset, member.size, name
        elif suffix in LABEL_SUFFIXES:
            if member.size > MAX_LABEL_BYTES:
                raise DloError(f"{file.name}: the label {name!r} must be at most 64 KiB, got {member.size}")
            content = file.read(member.offset, member.size)
            labels[member.key] = parse_label(content, suffix, f"{file.name}: {name}", class_names)
    missing = next((key for key in images if key not in labels), None)
    if missing is not None:
        raise DloError(f"{file.name}: {images[missing][2]!r} must have a label, got none; add {missing}.cls")
    rows = np.array([(*images[key][:2], labels[key]) for key in images], dtype=np.int64).reshape(-1, 3)
    names = [images[key][2] for key in images]
    offsets, sizes, classes = (rows[:, column].copy() for column in range(3))
    return ShardIndex(offsets, sizes, classes, np.array(names, dtype=np.str_))


def parse_label(content: bytes, suffix: str, where: str, class_names: list[str] | None) -> int:
    """Returns the class index in the bytes of a label.

    Args:
        content: Bytes of the file.
        suffix: Suffix of the file, ``.cls`` or ``.json``.
        where: Place of the file, for messages.
        class_names: Names that labels may use; None allows only class indices.

    Raises:
        DloError: If it has none.
    """
    try:
        label = content.decode().strip()
        if suffix == ".json":
            record = json.loads(label)
            entry = next((record[k] for k in ("label", "cls", "class") if k in record), None)
            if not isinstance(entry, int | str):
                raise ValueError
            label = str(entry)
        if class_names is not None and label in class_names:
            return class_names.index(label)
        number = int(label)
    except (ValueError, TypeError, AttributeError):
        raise DloError(
            f"{where}: the label must be a class index (or a name in classes.txt), got {content[:40]!r}"
        ) from None
    if number < 0:
        raise DloError(f"{where}: the label must be 0 or more, got {number}")
    return number


# --- a root's classes and splits ----------------------------------------------------------------------------------


def find_classes(root: Path | str, storage: Storage) -> list[str]:
    """Returns the class names of a dataset: its training class folders, or ``classes.txt`` for shards.

    Shards without a ``classes.txt`` use the numbers up to the largest label as names.

    Raises:
        DloError: If there is neither; the message has the expected paths.
    """
    shards = find_shards(root, "train", storage.options)
    if shards:
        names = _listed_classes(root, storage)
        if names is None:
            largest = ShardSource(shards, storage, None).labels.max(initial=-1)
            names = [str(number) for number in range(int(largest) + 1)]
        return names
    if isinstance(root, str):
        _refuse_removed(root, storage)
        raise DloError(f"root must have train-*.tar or train/*.tar, got {root} without them")
    if not root.is_dir():
        raise MissingInput(
            f"root must be a folder with train/ and val/, got {root}: no such folder; set data.init_args.root",
            str(root),
        )
    names = _listed_classes(root, storage)
    if not (root / "train").is_dir() and names is not None:
        return names
    _refuse_removed(root, storage)
    if not (root / "train").is_dir():
        raise DloError(
            f"root must have train/<class>/*.jpg, train-*.tar or train/*.tar, got {root} without train/;"
            f" {_guess_root(root)}"
        )
    folders = class_folders(root / "train")
    if not folders:
        raise DloError(f"{root / 'train'} has no class folders; expected train/<class>/*.jpg")
    return folders


def _refuse_removed(root: Path | str, storage: Storage) -> None:
    """Raises an error for shards of formats that earlier versions read."""
    base = str(root).rstrip("/")
    for folder, ends in ((base, "parquet"), (f"{base}/train", "parquet"), (f"{base}/train", "mds")):
        if any(name.endswith(f".{ends}") for name in find_files(folder, storage.options)):
            raise DloError(
                f"root must have train-*.tar or train/*.tar, got .{ends} in {folder}{did_you_mean(ends, [])}"
            )


def _guess_root(root: Path) -> str:
    """Returns what to change about a folder that has no `train/`: another root, or another layout."""
    for other in (root.absolute().parent, *sorted(path for path in root.iterdir() if path.is_dir())):
        if (other / "train").is_dir():
            shown = other if other.is_relative_to(root) else root.parent
            return f"set data.init_args.root to {shown}"
    folders = class_folders(root)
    near = nearest("train", folders)
    if near is not None:
        return f"rename {root / near} to train, or set data.init_args.root"
    if folders and "val" not in folders:
        return (
            f"its folders {shown_names(folders)} look like classes: move them to {root / 'train'}, and a part of each"
            f" one's images to {root / 'val'}/<class>"
        )
    return "set data.init_args.root"


def _listed_classes(root: Path | str, storage: Storage) -> list[str] | None:
    if isinstance(root, str):
        try:
            file = storage.open(f"{root.rstrip('/')}/classes.txt")
        except DloError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return file.read(0, file.size).decode().splitlines()
    listing = root / "classes.txt"
    return listing.read_text().splitlines() if listing.is_file() else None


def open_flat_folder(folder: Path) -> ImageSource:
    """Returns the source of all images in a folder and below, without classes, sorted by path.

    Raises:
        DloError: If the folder is missing, or has no image.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise DloError(f"predict_folder must be a folder of images, got {folder}: no such folder; set it to one")
    source = FolderSource(folder.parent, [folder.name])
    if not len(source):
        raise DloError(f"predict_folder must have images ({', '.join(IMAGE_SUFFIXES)}), got none in {folder}; add some")
    return source


def open_source(root: Path | str, split: str, class_names: list[str], storage: Storage) -> ImageSource:
    """Returns the source of one split.

    Raises:
        DloError: If a folder is missing, a class is empty, training does not have a class, or a label exceeds the
            number of classes; the message has its name.
    """
    shards = find_shards(root, split, storage.options)
    if shards:
        source = ShardSource(shards, storage, _listed_classes(root, storage))
        if not len(source):
            raise DloError(f"the shards {shards[0]} ... must contain images ({', '.join(IMAGE_SUFFIXES)}), got none")
        largest = int(source.labels.max())
        if largest >= len(class_names):
            raise DloError(
                f"labels of {split} shards must be class indices in 0..{len(class_names) - 1}, got {largest}; training"
                f" has {len(class_names)} classes"
            )
        return source
    if isinstance(root, str):
        raise DloError(f"root must have shards of {split}, such as {split}-*.tar, got {root} without them; add them")
    folder = root / split
    if not folder.is_dir():
        raise DloError(f"no such folder: {folder}; expected {split}/<class>/*.jpg, {split}-*.tar or {split}/*.tar")
    present = class_folders(folder)
    foreign = sorted(set(present) - set(class_names))
    if foreign:
        raise DloError(
            f"{folder} must have only the classes of train/, got {shown_names(foreign)}; remove them, or add them to"
            " train/"
        )
    if not present:
        raise DloError(f"{folder} has no class folders; expected {split}/<class>/*.jpg")
    files = FolderSource(folder, class_names)
    counts = np.bincount(files.labels, minlength=len(class_names))
    empty = [name for name, count in zip(class_names, counts, strict=True) if not count and name in present]
    if empty:
        raise DloError(
            f"each class must have an image ({', '.join(IMAGE_SUFFIXES)}), got the empty folder"
            f" {shown_names([str(folder / name) for name in empty])}; add images or remove the folder"
        )
    return files
