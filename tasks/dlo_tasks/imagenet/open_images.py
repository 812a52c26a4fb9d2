"""Finds the classes and the images of a root: class folders or tar shards, local or remote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlo_framework.data.remote import Storage, find_files
from dlo_framework.errors import DloError, did_you_mean, nearest
from dlo_tasks.imagenet.image_sources import (
    IMAGE_SUFFIXES,
    FolderSource,
    ImageSource,
    ShardSource,
    class_folders,
    find_shards,
)


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
        raise DloError(
            f"root must be a folder with train/ and val/, got {root}: no such folder; set data.init_args.root"
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
            f"its folders {_some(folders)} look like classes: move them to {root / 'train'}, and a part of each one's"
            f" images to {root / 'val'}/<class>"
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
        _check_labels(source.labels, split, class_names)
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
            f"{folder} must have only the classes of train/, got {_some(foreign)}; remove them or add them to train/"
        )
    if not present:
        raise DloError(f"{folder} has no class folders; expected {split}/<class>/*.jpg")
    files = FolderSource(folder, class_names)
    counts = np.bincount(files.labels, minlength=len(class_names))
    empty = [name for name, count in zip(class_names, counts, strict=True) if not count and name in present]
    if empty:
        raise DloError(
            f"each class must have an image ({', '.join(IMAGE_SUFFIXES)}), got the empty folder"
            f" {_some([str(folder / name) for name in empty])}; add images or remove the folder"
        )
    return files


def _check_labels(labels: np.ndarray, split: str, class_names: list[str]) -> None:
    largest = int(labels.max())
    if largest >= len(class_names):
        raise DloError(
            f"labels of {split} shards must be class indices in 0..{len(class_names) - 1}, got {largest}; training"
            f" has {len(class_names)} classes"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
