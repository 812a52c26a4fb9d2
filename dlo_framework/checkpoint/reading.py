"""Loads a checkpoint: all files are verified before any is used, and tensors are read lazily."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from dlo_framework.checkpoint import folder as folders
from dlo_framework.checkpoint.agreement import rank_of, run_on_all_ranks
from dlo_framework.checkpoint.chunks import Key
from dlo_framework.checkpoint.lazy_state import LazyStateDict, TensorReader
from dlo_framework.checkpoint.manifest import STATE, Manifest, read_manifest
from dlo_framework.checkpoint.state_file import read_state
from dlo_framework.checkpoint.state_tree import METADATA, insert_tensors
from dlo_framework.checkpoint.torch_file import SafeCheckpointIO, local_path, refuse_unsafe
from dlo_framework.checkpoint.verify import Level, newest_valid, verify
from dlo_framework.errors import DloError


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
    path = local_path(path)
    if level is not None:
        _refuse_damaged(path, level, group)
    found = folders.locate(path)
    if found is None:
        raise DloError(f"no checkpoint {path}")
    if found.is_file():
        return SafeCheckpointIO().load_checkpoint(found)
    manifest = read_manifest(found)
    return assemble(found, manifest, read_state(found / STATE))


def check(path: str | Path) -> None:
    """Refuses a checkpoint that is missing, truncated or unsafe, before anything starts.

    It is quick: no tensor is read; :func:`load` reads and hashes.

    Raises:
        DloError: if it is refused; it names the file and the newest valid checkpoint.
    """
    path = local_path(path)
    found = folders.locate(path)
    if found is None:
        raise DloError(f"no checkpoint {path}; choose an existing path, or 'last' or 'best'")
    if found.is_dir() and (found / STATE).exists():
        _refuse_damaged(path, "size", None)
        refuse_unsafe(found / STATE)
    else:
        refuse_unsafe(found)


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


def _refuse_damaged(path: Path, level: Level, group: ProcessGroup | None) -> None:
    try:
        verify(path, level, group=group)
    except DloError as error:
        # The search hashes files too, so one rank does it.
        offers = run_on_all_ranks(group, lambda: _offer(path, level) if rank_of(group) == 0 else "")
        raise DloError(f"{error}{offers[0]}") from None


def _offer(path: Path, level: Level) -> str:
    newest = newest_valid(path.parent, level, but=path)
    return f"; the newest valid one beside it is {newest}" if newest is not None else "; no other one there is valid"
