"""The canonical checkpoint: one format for every strategy and every number of ranks.

It is a folder of ``manifest.json``, written last; ``shard-00000.safetensors`` and so on, one file for each rank that
writes tensors, which any safetensors reader opens; and ``state.pt``, the plain data of loops, callbacks and schedulers.
Tensors have their full shapes and plain names; they are stored in chunks, each of which is a box of the tensor. A
reader takes the overlap of the chunks with its own boxes.

The storage is not torch.distributed.checkpoint (DCP); only its protocol is used, by which a DTensor says which box of
the full tensor it is. DCP's metadata and its plain data are pickles, which execute code when they are read; it cannot
read lazily, so that hooks could rename or replace weights before they are loaded; it has no hashes; and its folders,
overwritten in place, are unreadable after a kill.

A tied tensor, which has two names, is written under both, so that each file and each name is complete in itself. Cost
of a load: each file is hashed once, by one of the ranks, at 0.4 to 2 GB/s a core; ``verify="size"`` skips that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlo_framework._version import __version__
from dlo_framework.atomic_file import PARTIAL
from dlo_framework.checkpoint import folder
from dlo_framework.checkpoint.agreement import gather_then_scatter, rank_of, run_on_all_ranks
from dlo_framework.checkpoint.chunks import Key, Runs, SavedTensor, shard_number
from dlo_framework.checkpoint.dtypes import dtype_of
from dlo_framework.checkpoint.manifest import MANIFEST, STATE, Manifest, to_text
from dlo_framework.checkpoint.save_planner import AgreedPlan, SavePlanner
from dlo_framework.checkpoint.shards import Box
from dlo_framework.checkpoint.state_file import write_state
from dlo_framework.checkpoint.state_tree import extract_tensors
from dlo_framework.checkpoint.tensor_file import HashedFile, make_header
from dlo_framework.checkpoint.torch_file import NO_SPACE, describe_shortage, explain_refusal, find_os_error
from dlo_framework.errors import DloError

T = TypeVar("T")

#: Longest wait of a rank for the folder that rank 0 has created, for example on a network file system.
_VISIBLE_SECONDS = 10.0


@dataclass
class Prepared:
    """Save that all ranks have planned, of which nothing is written yet.

    Attributes:
        path: Folder of the checkpoint.
        agreed: Plan of the files that this rank and the others write.
        elements: Tensors of the boxes that this rank writes, in the run's memory or copies.
        rest: State without the tensors of model and optimizer, on rank 0; None on other ranks.
        about: Plain data for the manifest.
    """

    path: Path
    plan: AgreedPlan
    elements: dict[tuple[Key, Box], Tensor]
    rest: dict[str, Any] | None
    about: dict[str, Any]


def save(
    checkpoint: Mapping[str, Any],
    path: str | Path,
    *,
    group: ProcessGroup | None = None,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a checkpoint, on all ranks together, atomically: it replaces the previous one only when it is complete.

    Beside the tensors themselves a rank holds at most 64 MB, and the inventory of its boxes, about a kilobyte a tensor.

    Args:
        checkpoint: Lightning's dict. ``state_dict`` maps plain names to tensors, DTensors or flat shards; under
            ``optimizer_states`` each ``state`` maps parameter names to their tensors and values. A name may be missing
            on ranks that hold no shard of it. What is not a tensor is taken from rank 0.
        path: Folder of the checkpoint; an existing one is replaced.
        group: Process group of the run's ranks, preferably gloo; None for a single process.
        about: Plain data for the manifest: the strategy, the mesh, the config.

    Raises:
        DloError: on all ranks, if the disk is too full or cannot be written, or a value could not be read back.
    """
    prepared = prepare(checkpoint, Path(path), group=group, about=about)
    write(prepared, group)


def prepare(
    checkpoint: Mapping[str, Any], path: Path, *, group: ProcessGroup | None, about: dict[str, Any] | None = None
) -> Prepared:
    """Plans a save on all ranks together, and checks that it fits on the disk. See :func:`save`."""
    rest, found = extract_tensors(checkpoint)
    planning = SavePlanner(rest, found, path, group)
    agreed = planning.plan()
    if agreed.free < agreed.need:
        raise make_no_space_error(path, describe_shortage(path.parent, agreed.need, agreed.free))
    kept = {item: planning.elements[item] for item in agreed.file.boxes} if agreed.file is not None else {}
    return Prepared(path, agreed, kept, rest if rank_of(group) == 0 else None, about or {})


def write(
    prepared: Prepared,
    group: ProcessGroup | None,
    write_rest: Callable[[HashedFile, dict[str, Any]], None] = write_state,
) -> None:
    """Writes a prepared save, on all ranks together. See :func:`save`."""
    path, rank = prepared.path, rank_of(group)
    partial = folder.leftover_path(path, PARTIAL)
    try:
        run_on_all_ranks(group, lambda: _guarded(prepared, lambda: folder.create_partial(path)) if rank == 0 else None)
        gather_then_scatter(
            group,
            lambda: _guarded(prepared, lambda: _write_files(prepared, rank, partial, write_rest)),
            lambda records: _guarded(prepared, lambda: _finish(prepared, records)),
        )
    except BaseException:
        if rank == 0:
            folder.remove_partial(path)
        raise


def _write_files(
    prepared: Prepared, rank: int, partial: Path, write_rest: Callable[[HashedFile, dict[str, Any]], None]
) -> dict[str, dict[str, Any]]:
    """Writes this rank's files; returns their sizes and hashes by name."""
    _wait_for(partial, rank)
    records = {}
    mine = prepared.plan.file
    if mine is not None:
        head, _ = make_header(mine.entries, {"format": "pt", "written_by": "dlo", "rank": str(rank)})
        with HashedFile(partial / mine.name) as file:
            file.write(head)
            for item in mine.boxes:
                file.write_tensor(prepared.elements[item])
        wrote = file.bytes - len(head)
        assert wrote == mine.bytes, f"{mine.name}: wrote {wrote} of {mine.bytes} bytes"
        records[mine.name] = {"bytes": file.bytes, "sha256": file.sha256, "data": len(head)}
    if prepared.rest is not None:
        with HashedFile(partial / STATE) as file:
            write_rest(file, prepared.rest)
        records[STATE] = {"bytes": file.bytes, "sha256": file.sha256}
    return records


def _finish(prepared: Prepared, records: list[dict[str, dict[str, Any]]]) -> list[None]:
    """Writes the manifest of all ranks' files and renames the folder to its final name."""
    rest, plan = prepared.rest or {}, prepared.plan.plan
    assert plan is not None
    files = {name: record for of_rank in records for name, record in of_rank.items()}
    manifest = Manifest(
        step=int(rest.get("global_step", 0)),
        epoch=int(rest.get("epoch", 0)),
        world_size=len(records),
        time=time.time(),
        versions={"dlo": __version__, "torch": torch.__version__},
        weights_only="optimizer_states" not in rest,
        about=prepared.about,
        files=dict(sorted(files.items())),
    )
    starts = {number: file["data"] for name, file in files.items() if (number := shard_number(name)) is not None}
    for (group, name), tensor in plan.tensors.items():
        runs = Runs(tensor.runs, dtype_of(tensor.dtype).itemsize, starts)
        manifest.tensors.setdefault(group, {})[name] = SavedTensor(tensor.dtype, tensor.shape, runs)
    with HashedFile(folder.leftover_path(prepared.path, PARTIAL) / MANIFEST) as file:
        file.write(to_text(manifest).encode())
    folder.publish(prepared.path)
    return [None] * len(records)


@contextlib.contextmanager
def disk_errors(path: Path, need: int | None = None) -> Iterator[None]:
    """Turns an error of the disk while ``path`` is written into a DloError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = find_os_error(error)
        if refused is None:
            raise
        reason = explain_refusal(refused, path.parent, need)
        if refused.errno in NO_SPACE:
            raise make_no_space_error(path, reason) from error
        raise DloError(f"cannot write the checkpoint {path}: {reason}") from error


def _guarded(prepared: Prepared, work: Callable[[], T]) -> T:
    with disk_errors(prepared.path, prepared.plan.need):
        return work()


def _wait_for(partial: Path, rank: int) -> None:
    """Waits for the folder that rank 0 has created; raises a DloError if it does not appear here."""
    until = time.monotonic() + _VISIBLE_SECONDS
    while not partial.is_dir():
        if time.monotonic() > until:
            raise DloError(
                f"a checkpoint's folder must be on a file system that all nodes share, got {partial}, which rank 0 has"
                f" created and {os.uname().nodename} does not see; choose another with --run.dir"
            )
        time.sleep(0.05)


def make_no_space_error(path: Path, reason: str) -> DloError:
    """Returns the error of a full disk, with the reason and the checkpoint that is still intact."""
    if path.exists():
        previous = f"previous {path.name} intact"
    else:
        others = [p for p in path.parent.glob("*") if folder.is_folder_checkpoint(p)] if path.parent.is_dir() else []
        newest = max(others, key=lambda other: other.stat().st_mtime, default=None)
        previous = f"previous {newest.stem} intact" if newest is not None else "no earlier checkpoint there"
    return DloError(f"no space for the checkpoint {path}: {reason}; {previous}")
