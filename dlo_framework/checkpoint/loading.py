"""Loads a checkpoint: all files are verified before any is used, and tensors are read lazily.

Modules and datamodules are loaded from canonical checkpoints as Lightning loads them from its own, and what a run's
ModelCheckpoints have recorded, its best checkpoints and their paths, is read and relocated.

:class:`SafeCheckpointIO` writes single-file checkpoints atomically, and reads them without executing anything.
Lightning stages a checkpoint in the temporary folder and moves it without a sync, so that a kill or a full disk can
destroy the previous one, and torch reads a pickle that may execute code. Here a checkpoint is written beside its final
path, synced and renamed; and only tensors and plain data are read.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import zipfile
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dlo_framework.agreement import rank_of, run_on_all_ranks
from dlo_framework.atomic_file import PARTIAL, describe_shortage, free_bytes
from dlo_framework.checkpoint.history import newest_valid
from dlo_framework.checkpoint.manifest import STATE, Key, Manifest, SavedTensor, Stored, dtype_of
from dlo_framework.checkpoint.state_tree import (
    METADATA,
    insert_tensors,
    make_read_error,
    make_refusal,
    plain_data,
    read_state,
    tensor_bytes,
)
from dlo_framework.checkpoint.store import (
    LOCAL,
    OLD,
    checkpoint_path,
    disk_errors,
    is_folder,
    is_folder_checkpoint,
    leftover_path,
    locate,
    no_space_error,
    refuse_remote,
    store_of,
)
from dlo_framework.checkpoint.verify import Level, OpenCheckpoint, open_checkpoint, verify
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.shards import BUCKET_BYTES, Box, Shard, byte_range, full_box, held_boxes, slice_view, split_box


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint IO that writes atomically and reads with ``weights_only=True``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` to a file beside ``path``, syncs it, and renames it to ``path``.

        Raises:
            DloError: if the disk is too full, with the previous file at ``path`` intact; for a path or options of other
                storage than a file system.
        """
        target = checkpoint_path(path, storage_options)
        refuse_remote(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        need = tensor_bytes(checkpoint)
        free = free_bytes(target.parent)
        if free < need:
            raise no_space_error(target, describe_shortage(target.parent, need, free))
        partial, old = leftover_path(target, PARTIAL), leftover_path(target, OLD)
        try:
            with disk_errors(target, need):
                with LOCAL.create(partial) as file:
                    torch.save(checkpoint, file)
                if target.is_dir() and not target.is_symlink():
                    target.rename(old)
                LOCAL.rename(partial, target)
                LOCAL.remove(old)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        LOCAL.sync(target.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads tensors and plain data; ``weights_only`` is always True.

        Raises:
            DloError: if the file is missing or damaged, or it contains anything that would execute.
        """
        return read_file(Path(path), map_location)


def read_file(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Reads a single-file checkpoint: tensors and plain data, without executing anything.

    Args:
        path: Path of the file.
        map_location: Device of the tensors, as in ``torch.load``.
        mmap: Whether to leave tensors on the file's pages, to be read on use.

    Raises:
        DloError: if the file is missing or damaged, or it contains anything that would execute.
    """
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
        if not isinstance(content, dict) or not {"state_dict", "pytorch-lightning_version"} <= content.keys():
            raise DloError(
                f"{path} is not a checkpoint of a run: it must hold 'state_dict' and 'pytorch-lightning_version'"
            )
        return content
    except FileNotFoundError:
        raise DloError(f"no checkpoint {path}") from None
    except Exception as error:  # Damaged bytes raise anything.
        if isinstance(error, DloError) or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise make_read_error(path, error) from None


def refuse_unsafe(path: Path) -> None:
    """Refuses a checkpoint whose pickle names globals that are not plain data, without unpickling it.

    Raises:
        DloError: if it names a global that is not allowed, or is not a checkpoint.
    """
    store = store_of(path)
    status = store.status(path)
    if status is not None and status.is_folder:
        if not {"manifest.json", ".metadata", "meta.pt", "latest"}.isdisjoint(store.list(path)):
            return  # A sharded checkpoint; its strategy verifies it.
        raise DloError(
            f"a checkpoint must be a file, or hold a manifest, got {path}; name a file in it, or 'last' or 'best'"
        )
    try:
        with store.open(path) as file:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        unsafe = []  # Not torch's zip file: an older pickle, or damaged. Loading it is safe, and finds out.
        SafeCheckpointIO().load_checkpoint(path)
    if unsafe:
        raise make_refusal(path, ", ".join(sorted(unsafe)))


M = TypeVar("M", LightningModule, LightningDataModule)


def load(path: str | Path, *, group: ProcessGroup | None = None, level: Level | None = "hash") -> dict[str, Any]:
    """Loads a checkpoint as Lightning's dict, in which mappings of tensors are lazy :class:`LazyStateDict`.

    Args:
        path: Folder of a checkpoint, or a single file of Lightning's (which is read at once, and never executed).
        group: Process group of the ranks that share the hashing and all call this; None for this process alone.
        level: ``hash`` (the default: every byte is checked before use), ``size`` (only missing or truncated files are
            found), or None, for a checkpoint that has just been verified.

    Returns:
        The saved state. Under ``optimizer_states`` each ``state`` is {parameter name: its tensors and values}.

    Raises:
        DloError: on all ranks, if it is damaged; it names the file and the newest valid checkpoint.
    """
    path = checkpoint_path(path)
    opened = open_checkpoint(path) if level is None else _verify_or_offer(path, level, group)
    if opened.manifest is None:
        return SafeCheckpointIO().load_checkpoint(opened.path)
    return assemble(opened.path, opened.manifest, read_state(opened.path / STATE))


def check(path: str | Path) -> None:
    """Refuses a checkpoint that is missing, truncated or unsafe, before anything starts.

    It is quick: no tensor is read; :func:`load` reads and hashes.

    Raises:
        DloError: if it is refused; it names the file and the newest valid checkpoint.
    """
    path = checkpoint_path(path)
    current_path = locate(path)
    if current_path is None:
        hint = did_you_mean(str(path), ["last", "best"])
        raise DloError(f"no checkpoint {path}{hint or ';'} choose an existing path, or 'last' or 'best'")
    if store_of(current_path).status(current_path / STATE) is not None:
        _verify_or_offer(path, "size", None)
        refuse_unsafe(current_path / STATE)
    else:
        if not is_folder(current_path):
            refuse_remote(current_path)
        refuse_unsafe(current_path)


def assemble(folder: Path, manifest: Manifest, rest: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint of a manifest and the remaining tree, with lazy tensors.

    Raises:
        DloError: if the tree names a tensor that the manifest does not have.
    """
    tensors = {(group, name): tensor for group, named in manifest.tensors.items() for name, tensor in named.items()}
    source = TensorReader(folder, tensors)

    def make(keys: dict[str, Key], others: dict[str, Any]) -> LazyStateDict:
        metadata = others.pop(METADATA, None)
        for key in keys.values():
            if key not in tensors:
                raise DloError(
                    f"damaged checkpoint: {folder / STATE} names the tensor {'/'.join(key)}, which the manifest"
                    " does not list"
                )
        result = LazyStateDict(source, keys, others, title=str(folder))
        result._metadata = metadata
        return result

    return insert_tensors(rest, make, source.read)


def _verify_or_offer(path: Path, level: Level, group: ProcessGroup | None) -> OpenCheckpoint:
    try:
        return verify(path, level, group=group)
    except DloError as error:
        # The search hashes files too, so one rank does it.
        search = run_on_all_ranks(
            group, lambda: newest_valid(path.parent, level, but=path) if rank_of(group) == 0 else None
        )
        offer = "no other one there is valid" if search[0] is None else f"the newest valid one beside it is {search[0]}"
        raise DloError(f"{error}; {offer}") from None


class TensorReader:
    """Reader of the tensors in a folder of any store.

    Args:
        folder: Folder of the files.
        tensors: Tensors of the checkpoint, with their chunks.
    """

    def __init__(self, folder: Path, tensors: Mapping[Key, SavedTensor]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._files: dict[str, TensorFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the open files: a copy, such as one of a callback's state, opens them again."""
        return {**self.__dict__, "_files": {}}

    def read(self, group: str, name: str) -> Tensor:
        """Returns a full tensor: the file's own pages if it is one chunk, else assembled."""
        tensor = self.tensors[group, name]
        if len(tensor.chunks) == 1:
            chunk = next(iter(tensor.chunks))
            return self._file(chunk.file).tensor(Stored(tensor.dtype, tensor.shape, chunk.begin, chunk.end))
        result = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
        self.read_part((group, name), full_box(tensor.shape), result)
        return result

    def read_part(self, key: Key, box: Box, target: Tensor) -> None:
        """Reads the elements of ``box`` into ``target``, which has the shape of the box."""
        tensor = self.tensors[key]
        for chunk, shared in tensor.overlapping(box):
            stored = Stored(tensor.dtype, chunk.box.sizes, chunk.begin, chunk.end)
            self._file(chunk.file).copy_part(stored, chunk.box, shared, slice_view(target, box, shared))

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]


class _Reference(NamedTuple):
    """Entry of a :class:`LazyStateDict` that is a tensor of the checkpoint."""

    group: str
    name: str


class LazyStateDict(MutableMapping[str, Any]):
    """Lazy mapping of a checkpoint: a model's weights, or one parameter's optimizer state.

    A tensor is read on access. Assignments and deletions affect this mapping alone, not the file.

    Args:
        source: Reader of the tensors.
        keys: Tensors of the mapping: {key here: (group, name)}.
        others: Other entries of the mapping: tensors set by the caller, plain values.
        title: Name of the mapping in errors.
    """

    def __init__(
        self,
        source: TensorReader,
        keys: Mapping[str, Key],
        others: Mapping[str, Any] | None = None,
        title: str = "checkpoint",
    ) -> None:
        self._source, self._title = source, title
        self._entries: dict[str, Any] = {name: _Reference(*key) for name, key in keys.items()} | dict(others or {})
        #: Versions of torch's modules, for ``load_state_dict``.
        self._metadata: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        return self._source.read(*value) if isinstance(value, _Reference) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries of {self._title})"

    def copy(self) -> LazyStateDict:
        """Returns a mapping of the same entries; changes to one do not affect the other."""
        result = LazyStateDict(self._source, {}, self._entries, self._title)
        result._metadata = self._metadata
        return result

    def rename(self, old: str, new: str) -> None:
        """Renames an entry without reading it (``pop`` reads)."""
        self._entries[new] = self._entries.pop(old)

    def saved_tensor(self, name: str) -> SavedTensor | None:
        """Returns the description of a stored tensor; None for an entry that is not in the checkpoint."""
        value = self._entries.get(name)
        return self._source.tensors[value] if isinstance(value, _Reference) else None

    def add_saved(self, name: str, tensor: SavedTensor) -> None:
        """Adds a tensor that consists of boxes of the checkpoint's files, such as experts that are stored apart.

        Args:
            name: Name of the new entry.
            tensor: Description of the tensor.
        """
        self._entries[name] = key = _Reference("model", name)
        self._source.tensors = {**self._source.tensors, key: tensor}

    def is_tensor(self, name: str) -> bool:
        """Returns whether an entry is a tensor, without reading it."""
        return isinstance(self._entries[name], Tensor | _Reference)

    def shape(self, name: str) -> torch.Size:
        """Returns a tensor's shape, without reading it."""
        return torch.Size((self.saved_tensor(name) or self._entries[name]).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Returns a tensor's dtype, without reading it."""
        saved = self.saved_tensor(name)
        return self._entries[name].dtype if saved is None else dtype_of(saved.dtype)

    @torch.no_grad()
    def read_into(self, name: str, target: Shard) -> None:
        """Fills a rank's shard of a tensor: reads only its elements, and converts them to its dtype.

        At most 64 MB are held beside the target.

        Args:
            name: Name of the tensor.
            target: Tensor, DTensor or flat shard of the same full shape, on any device.

        Raises:
            DloError: if the tensor does not exist, or its shape differs.
        """
        if name not in self:
            raise DloError(f"no '{name}' in {self._title}{did_you_mean(name, self)}")
        if tuple(self.shape(name)) != tuple(target.shape):
            raise DloError(
                f"'{name}' must have the run's shape {tuple(target.shape)} in {self._title}, got"
                f" {tuple(self.shape(name))}; load it into the model, and with the settings, that it was saved from"
            )
        for box, view in held_boxes(target):
            if box.numel > 0:
                self.read_part(name, box, view)

    @torch.no_grad()
    def read_part(self, name: str, box: Box, target: Tensor) -> None:
        """Reads the elements of ``box`` of a tensor into ``target``, which has the shape of the box."""
        value = self._entries[name]
        if isinstance(value, _Reference):
            self._source.read_part(value, box, target)
        else:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            target.copy_(slice_view(full, full_box(tuple(full.shape)), box))


def as_lazy_state_dict(mapping: Mapping[str, Any]) -> LazyStateDict:
    """Returns a checkpoint's mapping as one that reads into shards; a single file's tensors are in memory already."""
    return mapping if isinstance(mapping, LazyStateDict) else LazyStateDict(TensorReader(Path(), {}), {}, mapping)


class TensorFile:
    """Safetensors file (or any file of row-major tensors): mapped into memory, or read by ranges where it cannot be.

    safetensors' own ``get_slice`` (0.8.0) takes the same time, and keeps the pages that it has read in the process: a
    full read of six tensors of 64 MB took 26 ms of CPU time here and 27 ms there, with 64 and 384 MB beside the target;
    their rows 6 ms each, with 18 and 108 MB; a quarter of their columns 9 ms each, with 64 and 384 MB (medians of nine
    interleaved reads on one core). It has no element types that are stored as bytes, and reads from file systems alone.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tensor(self, stored: Stored) -> Tensor:
        """Returns a tensor on the file's own pages; writing to it changes this process's copy alone."""
        if self._mapped is not None:
            return _map_tensor(self._mapped, stored)
        with self._open() as file:
            return _read_range(file, stored.begin, stored.end, dtype_of(stored.dtype)).view(stored.shape)

    def copy_part(self, stored: Stored, box: Box, part: Box, target: Tensor) -> None:
        """Copies ``part`` of a tensor into ``target``, at most a bucket at a time, converting its dtype.

        Args:
            stored: Location of the elements of ``box``.
            box: Stored box, in coordinates of the full tensor.
            part: Box to copy, in coordinates of the full tensor.
            target: Tensor in the shape of ``part``, on any device.
        """
        size = dtype_of(stored.dtype).itemsize
        # The larger of the two types: a conversion makes a copy in the target's.
        pieces = split_box(part, max(size, target.element_size()))
        streaming = self._streaming._mapped
        if streaming is None:
            with self._open() as file:
                for piece in pieces:
                    _copy_range(file, stored, box, piece, slice_view(target, part, piece))
            return
        source = _map_tensor(streaming, stored)
        for piece in pieces:
            slice_view(target, part, piece).copy_(slice_view(source, box, piece))
            # The pages are released from the process's memory; the system may still cache them.
            begin, end = (stored.begin + at for at in byte_range(box, piece, size))
            start = begin // mmap.PAGESIZE * mmap.PAGESIZE
            stop = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, len(streaming))
            streaming.madvise(mmap.MADV_DONTNEED, start, stop - start)

    @cached_property
    def _streaming(self) -> TensorFile:
        """The same file with a map of its own, whose pages are released after use."""
        return TensorFile(self.path)

    @cached_property
    def _mapped(self) -> mmap.mmap | None:
        try:
            return store_of(self.path).map(self.path)
        except (OSError, ValueError) as error:
            raise DloError(f"cannot read {self.path}: {error}") from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with store_of(self.path).open(self.path) as file:
                yield file
        except OSError as error:
            raise DloError(f"cannot read {self.path}: {error}") from error


def _map_tensor(mapped: mmap.mmap, stored: Stored) -> Tensor:
    dtype = dtype_of(stored.dtype)
    if stored.begin == stored.end:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.begin % dtype.itemsize:
        # Files of other writers may be unaligned.
        raw = bytearray(memoryview(mapped)[stored.begin : stored.end])
        return torch.frombuffer(raw, dtype=dtype).view(stored.shape)
    return torch.frombuffer(mapped, dtype=dtype, count=math.prod(stored.shape), offset=stored.begin).view(stored.shape)


def _copy_range(file: BinaryIO, stored: Stored, box: Box, piece: Box, target: Tensor) -> None:
    """Reads the range that a slice spans, gaps included, in halves where it is longer than a bucket."""
    dtype = dtype_of(stored.dtype)
    begin, end = byte_range(box, piece, dtype.itemsize)
    dim = next((dim for dim, size in enumerate(piece.sizes) if size > 1), None)
    if end - begin > BUCKET_BYTES and dim is not None:
        half = piece.sizes[dim] // 2
        for first, count in ((0, half), (half, piece.sizes[dim] - half)):
            offsets, sizes = list(piece.offsets), list(piece.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + first, count
            _copy_range(file, stored, box, Box(tuple(offsets), tuple(sizes)), target.narrow(dim, first, count))
        return
    elements = _read_range(file, stored.begin + begin, stored.begin + end, dtype)
    strides = [math.prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
    target.copy_(elements.as_strided(piece.sizes, strides))


def _read_range(file: BinaryIO, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    if begin == end:
        return torch.empty(0, dtype=dtype)
    file.seek(begin)
    raw = bytearray(file.read(end - begin))
    if len(raw) < end - begin:
        raise OSError(f"it ends after byte {begin + len(raw)}")
    return torch.frombuffer(raw, dtype=dtype)


# --- modules and runs -------------------------------------------------------------------------------------------


def load_from_checkpoint(
    kind: type[M],
    path: str | Path,
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> M:
    """Constructs a module with the hyperparameters of a checkpoint, and loads its weights.

    For a canonical checkpoint ``kind.load_from_checkpoint(path)`` would do so only in a
    :class:`~dlo_framework.task.Task`: Lightning's opens a file, and a canonical checkpoint is a folder. The weights are
    in memory twice meanwhile. ``on_load_checkpoint`` gets the full checkpoint but the optimizer states.

    Args:
        kind: Class of the module or datamodule.
        path: Canonical checkpoint, or one of Lightning's files.
        map_location: Device of the weights, as in ``torch.load``; by default the CPU, for a file the saved device.
        hparams_file: YAML or CSV file with hyperparameters, which replace the checkpoint's.
        strict: Whether to require the module's names for the weights; by default the module's ``strict_loading``.
        kwargs: Arguments of the class, which override the checkpoint's hyperparameters.

    Raises:
        DloError: If the checkpoint does not exist, or is damaged.
    """
    if isinstance(path, str | Path) and "://" not in str(path) and locate(path) is None:
        raise DloError(f"no checkpoint {path}; choose an existing path, such as a run's checkpoints/last.ckpt")
    source: Any = single_file(path) if is_canonical(path) else path
    return kind.load_from_checkpoint(
        source, map_location=map_location, hparams_file=hparams_file, strict=strict, **kwargs
    )


def is_canonical(path: Any) -> bool:
    """Returns whether ``path`` is a canonical checkpoint, which is a folder."""
    current_path = locate(path) if isinstance(path, str | Path) else None
    return current_path is not None and is_folder_checkpoint(current_path)


def single_file(path: str | Path) -> io.BytesIO:
    """Returns a canonical checkpoint as an in-memory file for Lightning, without the optimizer states."""
    content = {key: value for key, value in load(path).items() if key != "optimizer_states"}
    buffer = io.BytesIO()
    torch.save(plain_data(content), buffer)
    buffer.seek(0)
    return buffer


#: Key of a checkpoint for the folder of the run that saved it, with links resolved.
RUN_FOLDER = "run_folder"
_PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path")
_SCORES = "best_k_models"


class Best(NamedTuple):
    """Best checkpoint of a run.

    Attributes:
        path: Path of the checkpoint.
        score: Value of its monitored metric; None if it is not known.
    """

    path: Path
    score: float | None


def best_kept(path: str | Path, folder: str | Path) -> Best | None:
    """Returns the best checkpoint of a run, as recorded when the run saved ``path``.

    Args:
        path: Verified checkpoint of the run.
        folder: Current folder of the run.
    """
    checkpoint = load(path, level=None)
    relocate_paths(checkpoint, folder)
    for state in _saver_states(checkpoint):
        if state.get("monitor") and state["best_model_path"]:
            score = state.get("best_model_score")
            return Best(Path(state["best_model_path"]), None if score is None else float(score))
    return None


def relocate_paths(checkpoint: dict[str, Any], folder: str | Path) -> None:
    """Relocates the paths in a checkpoint's ModelCheckpoint states to a run that has been moved or copied.

    Lightning restores the scores of a ModelCheckpoint only if its folder is the one that was saved; otherwise a worse
    checkpoint would become the best. Paths outside the run's folder stay.

    Args:
        checkpoint: Loaded checkpoint, whose states are changed in place.
        folder: Current folder of the run, with links resolved.
    """
    was, now = checkpoint.get(RUN_FOLDER), Path(folder)
    if not was or Path(was) == now:
        return

    def moved(path: Any) -> Any:
        inside = bool(path) and Path(path).is_relative_to(was)
        return str(now / Path(path).relative_to(was)) if inside else path

    for state in _saver_states(checkpoint):
        state.update({name: moved(state[name]) for name in _PATHS if name in state})
        if _SCORES in state:
            state[_SCORES] = {moved(path): score for path, score in state[_SCORES].items()}


def _saver_states(checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and "best_model_path" in state:
            yield state
