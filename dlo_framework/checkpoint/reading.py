"""Loads a checkpoint: verified as a whole before anything in it is used, read where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from dlo_framework.checkpoint import folder as folders
from dlo_framework.checkpoint.agreement import rank_of, together
from dlo_framework.checkpoint.chunks import Key
from dlo_framework.checkpoint.manifest import STATE, Manifest, read_manifest
from dlo_framework.checkpoint.nest import METADATA, join
from dlo_framework.checkpoint.saved import SavedTensors, Source
from dlo_framework.checkpoint.state_file import read_state
from dlo_framework.checkpoint.torch_file import SafeCheckpointIO, local_path, refuse_unsafe
from dlo_framework.checkpoint.verify import Level, newest_valid, verify
from dlo_framework.errors import DloError


def load(path: str | Path, *, group: ProcessGroup | None = None, level: Level | None = "hash") -> dict[str, Any]:
    """Loads a checkpoint: Lightning's dict, in which mappings of tensors are :class:`SavedTensors`, still to be read.

    Args:
        path: a checkpoint's folder, or a single file of Lightning's (which is read as a whole, and never executed).
        group: ranks that share the hashing, all of which call this; None for this process alone.
        level: ``hash`` (the default: every byte is checked before anything is used), ``size`` (only what is missing or
            cut off is found), or None, for a checkpoint that has just been verified.

    Returns:
        What was saved. Under ``optimizer_states`` each ``state`` is {parameter's name: its tensors and values}.

    Raises:
        DloError: if it is damaged, with the file and the newest one that is not; on all ranks alike.
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
    """Refuses, before anything starts, a checkpoint that is not there, cut off, or unsafe.

    Quick: no tensor is read; :func:`load` reads and hashes.

    Raises:
        DloError: with the file and the newest one that is whole.
    """
    path = local_path(path)
    found = folders.locate(path)
    if found is None:
        raise DloError(f"no checkpoint {path}; give a path, or 'last' or 'best'")
    if found.is_dir() and (found / STATE).exists():
        _refuse_damaged(path, "size", None)
        refuse_unsafe(found / STATE)
    else:
        refuse_unsafe(found)


def assemble(folder: Path, manifest: Manifest, rest: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint of a manifest and the rest of the state, with its tensors still to be read.

    Raises:
        DloError: if the state names a tensor that the manifest does not have.
    """
    tensors = {(group, name): tensor for group, named in manifest.tensors.items() for name, tensor in named.items()}
    source = Source(folder, tensors)

    def make(keys: dict[str, Key], others: dict[str, Any]) -> SavedTensors:
        metadata = others.pop(METADATA, None)
        for key in keys.values():
            if key not in tensors:
                raise DloError(
                    f"damaged checkpoint: {folder / STATE} names the tensor {'/'.join(key)}, which is not there"
                )
        result = SavedTensors(source, keys, others, title=str(folder))
        result._metadata = metadata
        return result

    return join(rest, make, source.read)


def _refuse_damaged(path: Path, level: Level, group: ProcessGroup | None) -> None:
    try:
        verify(path, level, group=group)
    except DloError as error:
        # The search hashes files too: one rank's work.
        offers = together(group, lambda: _offer(path, level) if rank_of(group) == 0 else "")
        raise DloError(f"{error}{offers[0]}") from None


def _offer(path: Path, level: Level) -> str:
    newest = newest_valid(path.parent, level, but=path)
    return f"; the newest valid one beside it is {newest}" if newest is not None else "; no other there is valid"
