"""Converts between canonical checkpoints and one safetensors file, and writes a model's weights for other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

from dlo_framework.atomic_file import open_atomic
from dlo_framework.checkpoint.loading import (
    LazyStateDict,
    SafeCheckpointIO,
    TensorReader,
    as_lazy_state_dict,
    assemble,
    load,
    read_file,
)
from dlo_framework.checkpoint.manifest import (
    STATE,
    Chunk,
    Manifest,
    SavedTensor,
    as_memoryview,
    dtype_name,
    make_header,
    read_header,
)
from dlo_framework.checkpoint.saving import save
from dlo_framework.checkpoint.state_tree import MODEL, read_state, write_state
from dlo_framework.checkpoint.store import HashedFile, disk_errors, refuse_remote, store_of
from dlo_framework.checkpoint.verify import sha256, verify
from dlo_framework.errors import DloError
from dlo_framework.shards import BUCKET_BYTES, full_box, split_box

#: Entry of the header that marks a full checkpoint in one file, as opposed to a model's weights.
_KIND, _WHOLE = "dlo", "checkpoint"


def to_single_file(source: Path, target: Path) -> Path:
    """Writes a canonical checkpoint's tensors to one safetensors file, and the rest of its state beside it.

    The tensors are named ``model/head.weight``, ``optimizer.0/head.weight.exp_avg``. One bucket is in memory at a time.

    Returns:
        The file of the remaining state: ``target`` with the ending ``.state.pt``.

    Raises:
        DloError: if the source is damaged, or a file cannot be written.
    """
    for path in (target, state_file_of(target)):
        check_new_file(path)
    folder, manifest = verify(source)
    assert manifest is not None
    rest = read_state(folder / STATE)
    tensors = {(group, name): tensor for group, named in manifest.tensors.items() for name, tensor in named.items()}
    # A group may be a path with slashes in it.
    flat = {f"{quote(group, safe='.')}/{name}": (group, name) for group, name in tensors}
    everything = LazyStateDict(TensorReader(folder, tensors), flat, title=str(source))
    write_safetensors(everything, target, {_KIND: _WHOLE})
    with _whole_file(state_file_of(target)) as file:
        write_state(file, rest)
    return state_file_of(target)


def from_single_file(source: Path, target: Path) -> None:
    """Converts a safetensors file to a canonical checkpoint.

    A file of :func:`to_single_file` is restored as the checkpoint that it was. Any other file is read as a model's
    weights, under the names in the file.

    Raises:
        DloError: if it is damaged or its state is missing, or the target cannot be written.
    """
    refuse_existing(target)
    manifest, state = manifest_of_file(source), state_file_of(source)
    if not manifest.weights_only:
        if not state.is_file():
            raise DloError(
                f"{source} is a full checkpoint in one file, and {state.name} is not beside it; copy that there"
            )
        checkpoint = assemble(source.parent, manifest, read_state(state))
    else:
        tensors = {(MODEL, name): tensor for name, tensor in manifest.tensors.get(MODEL, {}).items()}
        keys = {name: key for key in tensors for name in key[1:]}
        weights = LazyStateDict(TensorReader(source.parent, tensors), keys, title=str(source))
        checkpoint = {"state_dict": weights, "pytorch-lightning_version": metadata.version("lightning")}
    save(checkpoint, target, about={"strategy": "imported", "imported_from": source.name})


def manifest_of_file(path: Path) -> Manifest:
    """Returns a safetensors file's content in the form of a checkpoint's manifest.

    Raises:
        DloError: if it is not a safetensors file, or damaged.
    """
    stored, about = read_header(path)
    is_whole = about.get(_KIND) == _WHOLE
    manifest = make_file_manifest(path, weights_only=not is_whole)
    for name, place in stored.items():
        group, own_name = name.split("/", 1) if is_whole else (MODEL, name)
        chunks = [Chunk(full_box(place.shape), path.name, place.begin, place.end)] if place.begin < place.end else []
        manifest.tensors.setdefault(unquote(group), {})[own_name] = SavedTensor(place.dtype, place.shape, chunks)
    return manifest


def make_file_manifest(path: Path, *, weights_only: bool) -> Manifest:
    """Returns the manifest of a single file, without tensors."""
    status = path.stat()
    files = {path.name: {"bytes": status.st_size, "sha256": sha256(path)}}
    return Manifest(0, 0, 1, status.st_mtime, {}, weights_only, {"file": path.name}, files=files)


def write_safetensors(
    tensors: LazyStateDict, target: Path, about: dict[str, str], *, dtype: torch.dtype | None = None
) -> None:
    """Writes tensors to a safetensors file, one bucket at a time, atomically.

    Args:
        tensors: Mapping whose entries are all tensors.
        target: File to write.
        about: Text for the header's ``__metadata__``.
        dtype: Type of the floating-point tensors in the file; None keeps their own.

    Raises:
        DloError: if it cannot be written.
    """

    def stored_type(name: str) -> torch.dtype:
        own = tensors.dtype(name)
        return dtype if dtype is not None and own.is_floating_point else own

    names = sorted(tensors, key=lambda name: -stored_type(name).itemsize)
    head = make_header([(name, dtype_name(stored_type(name)), tuple(tensors.shape(name))) for name in names], about)
    with _whole_file(target) as file:
        file.write(head)
        for name in names:
            element = max(stored_type(name).itemsize, tensors.dtype(name).itemsize)
            # Half a bucket: a slice is held twice, as the file's pages and as the bytes to write.
            for piece in split_box(full_box(tuple(tensors.shape(name))), element, BUCKET_BYTES // 2):
                target_part = torch.empty(piece.sizes, dtype=stored_type(name))
                tensors.read_part(name, piece, target_part)
                file.write(as_memoryview(target_part))


def state_file_of(path: Path) -> Path:
    """Returns the path of the state that is not tensors, beside a single safetensors file."""
    return path.with_suffix(".state.pt")


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[HashedFile]:
    """Opens a new file that is renamed to ``path`` once it is complete and synced."""
    # The inner one reports the free space while the partial file is still there.
    with disk_errors(path), open_atomic(path) as partial, disk_errors(path), HashedFile(partial) as file:
        yield file


def check_new_file(path: Path) -> None:
    """Raises a DloError if a single file cannot be written to ``path``: something is there, or it is in a store."""
    refuse_remote(path)
    refuse_existing(path)


def refuse_existing(path: Path) -> None:
    """Raises a DloError if there is something at the path of a file or folder to write."""
    if store_of(path).status(path) is not None:
        raise DloError(f"{path} exists; remove it, or choose another path")


# --- weights of a model alone -----------------------------------------------------------------------------------

#: Endings of files that ``torch.save`` writes.
TORCH_ENDINGS = (".pt", ".pth", ".bin")
#: Prefix of a Task's model; a library that loads the weights uses the model's own names.
PREFIX = "model."


def model_weights(checkpoint: Mapping[str, Any], prefix: str | None = None) -> LazyStateDict:
    """Returns the weights of the model alone, under the names that the model's own library uses.

    Exporters to other formats, for example a Hugging Face folder, read them from here.

    Args:
        checkpoint: Loaded checkpoint.
        prefix: Prefix of the names, which is removed; other names are left out. By default ``model.``, the prefix of a
            Task's model, and none if no name begins with it.

    Raises:
        DloError: if no name begins with ``prefix``.
    """
    state = checkpoint["state_dict"]
    weights = as_lazy_state_dict(state).copy()
    if prefix is None:
        prefix = PREFIX if any(name.startswith(PREFIX) for name in weights) else ""
    for name in list(weights):
        if not name.startswith(prefix) or not weights.is_tensor(name):
            del weights[name]
        elif prefix:
            weights.rename(name, name.removeprefix(prefix))
    if not weights:
        first = next(iter(state), None)
        raise DloError(f"prefix must begin the name of a weight, got '{prefix}'; the first weight is '{first}'")
    return weights


def export_weights(
    source: Path, target: Path, *, prefix: str | None = None, dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """Writes the model's weights alone to a safetensors file, as timm and others load it, or to a ``torch.save`` file.

    Args:
        source: Checkpoint, a folder or a single file of Lightning's.
        target: File to write. With an ending of :data:`TORCH_ENDINGS` it holds a plain dict of tensors, for
            ``torch.load`` and ``load_state_dict``, and is assembled in memory.
        prefix: Prefix of the names; see :func:`model_weights`.
        dtype: Type that floating-point weights are converted to; None keeps their own.

    Returns:
        The number of tensors written, and the number left out.

    Raises:
        DloError: if the source is damaged, or the target cannot be written.
    """
    check_new_file(target)
    opened = verify(source)
    checkpoint = read_file(opened.path, mmap=True) if opened.manifest is None else load(source, level=None)
    weights = model_weights(checkpoint, prefix)
    if target.suffix in TORCH_ENDINGS:
        stored = {name: weights[name] for name in weights}
        floats = {name for name, tensor in stored.items() if dtype is not None and tensor.is_floating_point()}
        plain = {name: tensor.to(dtype) if name in floats else tensor for name, tensor in stored.items()}
        SafeCheckpointIO().save_checkpoint(plain, target)
    else:
        write_safetensors(weights, target, {"format": "pt"}, dtype=dtype)
    return len(weights), len(checkpoint["state_dict"]) - len(weights)
