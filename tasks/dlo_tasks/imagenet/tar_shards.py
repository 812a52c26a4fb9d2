"""Random access to images in tar shards (webdataset's layout), through an index of their offsets.

A shard is read once, header by header, to store the offset, the length and the label of each image in an index, beside
the shard or, if that is read-only, in the user's cache folder. After that an image takes one ``pread``. Nothing is
ever extracted, so names and links of a hostile archive do not reach the file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlo_framework.atomic_file import open_atomic
from dlo_framework.errors import DloError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
LABEL_SUFFIXES = (".cls", ".json")
MAX_LABEL_BYTES = 1 << 16
_FORMAT = 1


class ShardIndex(NamedTuple):
    """Index of the images of one tar file.

    Attributes:
        offsets: Offset of the first byte of each image, int64 [N].
        sizes: Sizes in bytes, int64 [N].
        labels: Class indices, int64 [N].
        keys: Names of the images inside the tar.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    keys: list[str]


def find_shards(root: Path, split: str) -> list[Path]:
    """Returns ``root/split-*.tar`` and ``root/split/*.tar``, sorted by name."""
    return sorted(root.glob(f"{split}-*.tar")) + sorted((root / split).glob("*.tar"))


def load_index(path: Path, class_names: list[str] | None = None) -> ShardIndex:
    """Returns the index of a tar file, from the cache if the file's size and time have not changed.

    Args:
        path: Path of the tar file.
        class_names: Names that labels may use; None allows only class indices.

    Raises:
        DloError: If the file is not a tar file, or an image has no usable label.
    """
    stat = path.stat()
    stamp = [_FORMAT, stat.st_size, stat.st_mtime_ns]
    naming = hashlib.sha256(json.dumps(class_names).encode()).hexdigest()
    places = _cache_places(path)
    for place in places:
        index = _read_cache(place, stamp, naming)
        if index is not None:
            return index
    index = build_index(path, class_names)
    for place in places:
        if _write_cache(place, index, stamp, naming):
            break
    return index


def build_index(path: Path, class_names: list[str] | None = None) -> ShardIndex:
    """Reads a tar file's headers and labels; see :func:`load_index`."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, int] = {}
    length = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isreg() or member.sparse is not None:  # links and devices contain no data
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")
                key, suffix = f"{folder}/{stem}", (dot + suffix).lower()
                if suffix in IMAGE_SUFFIXES:
                    if member.size < 0 or member.offset_data + member.size > length:
                        raise DloError(f"{path}: {member.name!r} exceeds the file's {length} bytes; truncated?")
                    images[key] = (member.offset_data, member.size, member.name)
                elif suffix in LABEL_SUFFIXES:
                    if member.size > MAX_LABEL_BYTES:
                        raise DloError(f"{path}: the label {member.name!r} must be at most 64 KiB, got {member.size}")
                    content = tar.extractfile(member)
                    assert content is not None
                    labels[key] = parse_label(content.read(), suffix, f"{path}: {member.name}", class_names)
    except tarfile.TarError as error:
        raise DloError(f"{path} is not a readable, uncompressed tar file: {error}") from error
    missing = next((name for key, (_, _, name) in images.items() if key not in labels), None)
    if missing is not None:
        raise DloError(f"{path}: {missing!r} must have a label, got none; add {Path(missing).stem}.cls")
    rows = np.array([(*images[key][:2], labels[key]) for key in images], dtype=np.int64).reshape(-1, 3)
    return ShardIndex(rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy(), [images[key][2] for key in images])


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
            found = next((record[k] for k in ("label", "cls", "class") if k in record), None)
            if not isinstance(found, int | str):
                raise ValueError
            label = str(found)
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


def _cache_places(path: Path) -> list[Path]:
    absolute = path.resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlo" / "tar-index"
    return [
        absolute.with_name(absolute.name + ".dlo-index.npz"),
        cache / f"{hashlib.sha256(str(absolute).encode()).hexdigest()[:32]}.npz",
    ]


def _read_cache(place: Path, stamp: list[int], naming: str) -> ShardIndex | None:
    try:
        with np.load(place, allow_pickle=False) as stored:
            if stored["stamp"].tolist() != stamp or str(stored["naming"]) != naming:
                return None
            rows, keys = stored["rows"], str(stored["keys"]).split("\0")
    except Exception:  # unreadable, of another version or half-written: rebuild the cache
        return None
    keys = [] if not len(rows) else keys
    beyond = len(rows) and int((rows[:, 0] + rows[:, 1]).max()) > stamp[1]
    if len(rows) != len(keys) or beyond:
        return None
    return ShardIndex(rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy(), keys)


def _write_cache(place: Path, index: ShardIndex, stamp: list[int], naming: str) -> bool:
    try:
        with open_atomic(place, shared=True) as partial, open(partial, "wb") as file:
            np.savez(
                file,
                stamp=np.array(stamp, dtype=np.int64),
                naming=np.array(naming),
                rows=np.stack([index.offsets, index.sizes, index.labels], axis=1),
                keys=np.array("\0".join(index.keys)),
            )
    except OSError:
        return False
    return True
