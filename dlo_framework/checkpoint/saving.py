"""The canonical checkpoint: one format for every strategy and every number of ranks.

It is a folder of ``manifest.json``, written last; ``shard-00000.safetensors`` and so on, one file for each rank that
writes tensors, which any safetensors reader opens; and ``state.pt``, the plain data of loops, callbacks and schedulers.
Tensors have their full shapes and plain names; they are stored in chunks, each of which is a box of the tensor. A
reader takes the overlap of the chunks with its own boxes.

The storage is not torch.distributed.checkpoint (DCP); only its protocol is used, by which a DTensor says which box of
the full tensor it is. DCP's metadata and its plain data are pickles, which execute code when they are read; it cannot
read lazily, so that hooks could rename or replace weights before they are loaded; it has no hashes; and its folders,
overwritten in place, are unreadable after a kill.

Before a save the ranks plan it together: rank 0 makes the global plan, and each rank gets its own part. A run's saves
are mostly identical. So the plan is cached, and as long as each rank's inventory is the same, the ranks exchange only
the plan's name.

A tied tensor, which has two names, is written under both, so that each file and each name is complete in itself. Cost
of a load: each file is hashed once, by one of the ranks, at 0.4 to 2 GB/s a core; ``verify="size"`` skips that.

During an asynchronous save, training continues while the checkpoint is written, and removals wait for the save. The
saved state is that of the call: each rank copies what it writes before the call returns. That copy, this rank's
share of the checkpoint, is the memory that an asynchronous save costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlo_framework._version import __version__
from dlo_framework.agreement import gather_then_scatter, rank_of, run_on_all_ranks, size_of
from dlo_framework.atomic_file import PARTIAL, describe_shortage
from dlo_framework.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Key,
    Manifest,
    Runs,
    SavedTensor,
    dtype_of,
    make_header,
    shard_number,
    to_text,
)
from dlo_framework.checkpoint.save_plan import (
    FilePlan,
    InventoryEntry,
    PackedInventory,
    Plan,
    local_inventory,
    make_file_plan,
    make_global_plan,
    pack,
    pack_inventory,
    unpack,
)
from dlo_framework.checkpoint.state_tree import (
    extract_tensors,
    insert_value,
    make_mark,
    merge_extras,
    optimizer_extras,
    refuse_unreadable,
    tensor_bytes,
    write_state,
)
from dlo_framework.checkpoint.store import (
    HashedFile,
    checkpoint_path,
    disk_errors,
    leftover_path,
    no_space_error,
    publish,
    recover_one,
    remove,
    store_of,
)
from dlo_framework.errors import DloError
from dlo_framework.shards import Box

#: Longest wait of a rank for the folder that rank 0 has created, for example on a network file system.
_VISIBLE_SECONDS = 10.0
#: Number of cached plans: one for a run's full checkpoints, one for its weights alone.
_MOST_CACHED = 2


@dataclass
class Prepared:
    """Save that all ranks have planned, of which nothing is written yet.

    Attributes:
        path: Folder of the checkpoint.
        file: Plan of this rank's file; None if it writes none.
        plan: Global plan on rank 0; None on other ranks.
        need: Bytes needed on the disk.
        elements: Tensors of the boxes that this rank writes, in the run's memory or copies.
        rest: State without the tensors of model and optimizer, on rank 0; None on other ranks.
        about: Plain data for the manifest.
        state: Serialized copy of `rest`, if the run may change it before it is written.
    """

    path: Path
    file: FilePlan | None
    plan: Plan | None
    need: int
    elements: dict[tuple[Key, Box], Tensor]
    rest: dict[str, Any] | None
    about: dict[str, Any]
    state: bytes | None = None


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
        DloError: on all ranks, if the disk is too full or cannot be written, a value could not be read back, or the
            shards of the group's ranks do not cover a tensor, as without ``group`` in a run of several ranks.
    """
    prepared = prepare(checkpoint, checkpoint_path(path), group=group, about=about)
    write(prepared, group)


def prepare(
    checkpoint: Mapping[str, Any], path: Path, *, group: ProcessGroup | None, about: dict[str, Any] | None = None
) -> Prepared:
    """Plans a save on all ranks together, and checks that it fits on the disk. See :func:`save`."""
    return _SavePlanner(checkpoint, path, group).prepare(about or {})


def write(prepared: Prepared, group: ProcessGroup | None) -> None:
    """Writes a prepared save, on all ranks together. See :func:`save`."""
    path, rank = prepared.path, rank_of(group)
    partial = leftover_path(path, PARTIAL)

    guarded = disk_errors(path, prepared.need)

    @guarded
    def create_folder() -> None:
        if rank == 0:
            recover_one(path)
            store_of(path).make_folder(partial)

    try:
        run_on_all_ranks(group, create_folder)
        gather_then_scatter(
            group,
            guarded(lambda: _write_files(prepared, rank, partial)),
            guarded(lambda records: _finish(prepared, records)),
        )
    except BaseException:
        if rank == 0:
            store_of(path).remove(partial)
        raise


def _write_files(prepared: Prepared, rank: int, partial: Path) -> dict[str, dict[str, Any]]:
    """Writes this rank's files; returns their sizes and hashes by name."""
    _wait_for(partial, rank)
    records = {}
    mine = prepared.file
    if mine is not None:
        head = make_header(mine.entries, {"format": "pt", "written_by": "dlo", "rank": str(rank)})
        with HashedFile(partial / mine.name) as file:
            file.write(head)
            for item in mine.boxes:
                file.write_tensor(prepared.elements[item])
        wrote = file.bytes - len(head)
        assert wrote == mine.bytes, f"{mine.name}: wrote {wrote} of {mine.bytes} bytes"
        records[mine.name] = {"bytes": file.bytes, "sha256": file.sha256, "data": len(head)}
    if prepared.rest is not None:
        with HashedFile(partial / STATE) as file:
            if prepared.state is not None:
                file.write(prepared.state)
            else:
                write_state(file, prepared.rest)
        records[STATE] = {"bytes": file.bytes, "sha256": file.sha256}
    return records


def _finish(prepared: Prepared, records: list[dict[str, dict[str, Any]]]) -> list[None]:
    """Writes the manifest of all ranks' files and renames the folder to its final name."""
    assert prepared.rest is not None
    assert prepared.plan is not None
    files = {name: record for of_rank in records for name, record in of_rank.items()}
    manifest = Manifest(
        step=int(prepared.rest.get("global_step", 0)),
        epoch=int(prepared.rest.get("epoch", 0)),
        world_size=len(records),
        time=time.time(),
        versions={"dlo": __version__, "torch": torch.__version__},
        weights_only="optimizer_states" not in prepared.rest,
        about=prepared.about,
        files=dict(sorted(files.items())),
    )
    starts = {number: file["data"] for name, file in files.items() if (number := shard_number(name)) is not None}
    for (group, name), tensor in prepared.plan.tensors.items():
        runs = Runs(tensor.runs, dtype_of(tensor.dtype).itemsize, starts)
        manifest.tensors.setdefault(group, {})[name] = SavedTensor(tensor.dtype, tensor.shape, runs)
    with HashedFile(leftover_path(prepared.path, PARTIAL) / MANIFEST) as file:
        file.write(to_text(manifest).encode())
    publish(prepared.path)
    _warn_of_same_bytes(prepared.path, manifest)
    return [None] * len(records)


#: Name, step and hashes of the last checkpoint that this process has published, by folder and by what it has.
_last_saved: dict[tuple[Path, bool], tuple[str, int, list[str]]] = {}


def _warn_of_same_bytes(path: Path, manifest: Manifest) -> None:
    """Warns if steps have been taken since the last checkpoint, and no bit of a weight or of a moment has changed."""
    hashes = [file["sha256"] for name, file in manifest.files.items() if name != STATE]
    key = path.parent, manifest.weights_only
    name, step, before = _last_saved.get(key, ("", manifest.step, []))
    _last_saved[key] = path.name, manifest.step, hashes
    if step < manifest.step and hashes and hashes == before:
        warnings.warn(
            f"checkpoint {path} of step {manifest.step} has weights and optimizer state of {name}, of step {step}, to"
            " the bit: nothing has trained in between, or what is saved is not the state of the run, as where"
            " on_save_checkpoint keeps a copy",
            stacklevel=2,
        )


def _wait_for(partial: Path, rank: int) -> None:
    """Waits for the folder that rank 0 has created; raises a DloError if it does not appear here."""
    until = time.monotonic() + _VISIBLE_SECONDS
    while store_of(partial).status(partial) is None:
        if time.monotonic() > until:
            raise DloError(
                f"a checkpoint's folder must be on a file system that all nodes share, got {partial}, which rank 0 has"
                f" created and {os.uname().nodename} does not see; choose another with --run.dir"
            )
        time.sleep(0.05)


class Part(NamedTuple):
    """One rank's part of a plan.

    Attributes:
        plan: Unique name of the plan.
        mask: Bit mask of the boxes that the rank writes; see :class:`~dlo_framework.checkpoint.save_plan.Plan`.
        size: Size of these boxes, in bytes.
        total: Size of all ranks' files, in bytes.
        supplies: Paths of plain values of the optimizers that only this rank sends to rank 0.
    """

    plan: str
    mask: bytes
    size: int
    total: int
    supplies: list[tuple[str | int, ...]]


@dataclass
class _CachedPlan:
    """Cache entry of a plan; the last two attributes are set on rank 0 alone."""

    part: Part
    plan: Plan | None = None
    groups: Sequence[dict[str, Any]] = ()  # names that other ranks have added to the optimizers' groups


_cached_plans: OrderedDict[str, _CachedPlan] = OrderedDict()

#: Message of a rank to rank 0 at each save: name of the cached plan that matches this rank's inventory, plain values
#: that rank 0 lacks under it, free bytes, and on rank 0 the bytes of tensors in the remaining tree.
_Report = tuple[str | None, list[tuple[Any, Any]], int, int]


class _SavePlanner:
    """Planning of one save, on this rank; see :func:`prepare`."""

    def __init__(self, checkpoint: Mapping[str, Any], path: Path, group: ProcessGroup | None) -> None:
        # On rank 0 the other ranks' plain values and marks are added to the tree.
        self._rest, self._tensors = extract_tensors(checkpoint)
        self._path, self._group = path, group
        self._rank, self._size = rank_of(group), size_of(group)
        self._elements: dict[tuple[Key, Box], Tensor] = {}
        self._holdings: list[InventoryEntry] = []
        self._extras: dict[str, Any] = {}
        self._digest = ""

    def prepare(self, about: dict[str, Any]) -> Prepared:
        """Returns the save, whose plan is made together with the other ranks or cached."""
        same, rest_bytes, free = gather_then_scatter(self._group, self._take_inventory, self._match_cached_plan)
        if not same:
            part = gather_then_scatter(
                self._group,
                lambda: (pack_inventory(self._holdings), pack(self._extras) if self._rank > 0 else b""),
                self._make_plan,
            )
            _cached_plans.setdefault(self._digest, _CachedPlan(part)).part = part
        _cached_plans.move_to_end(self._digest)
        while len(_cached_plans) > _MOST_CACHED:
            _cached_plans.popitem(last=False)
        known = _cached_plans[self._digest]
        need = known.part.total + rest_bytes
        if free < need:
            raise no_space_error(self._path, describe_shortage(self._path.parent, need, free))
        file = make_file_plan(self._rank, self._holdings, known.part.mask, known.part.size)
        elements = {item: self._elements[item] for item in file.boxes} if file is not None else {}
        rest = self._rest if self._rank == 0 else None
        return Prepared(self._path, file, known.plan, need, elements, rest, about)

    def _take_inventory(self) -> _Report:
        self._holdings, self._elements = local_inventory(self._tensors)
        self._extras = optimizer_extras(self._rest)
        values = dict(self._extras["values"])
        content = repr((self._size, self._rank, self._holdings, list(values), self._extras["groups"]))
        self._digest = hashlib.sha256(content.encode()).hexdigest()
        if self._rank == 0:
            refuse_unreadable(self._rest)
        known = _cached_plans.get(self._digest)
        return (
            known.part.plan if known is not None else None,
            [(path, values[path]) for path in known.part.supplies] if known is not None else [],
            store_of(self._path).free_bytes(self._path.parent),
            tensor_bytes(self._rest) if self._rank == 0 else 0,
        )

    def _match_cached_plan(self, reports: list[_Report]) -> list[tuple[bool, int, int]]:
        """Returns for each rank, on rank 0, whether the cached plan matches every rank's inventory."""
        plans, supplied, free, rest_bytes = zip(*reports, strict=True)
        same = plans[0] is not None and len(set(plans)) == 1
        if same:
            known = _cached_plans[self._digest]
            assert known.plan is not None
            self._add_marks(known.plan)
            for values, groups in zip(supplied[1:], known.groups, strict=True):
                merge_extras(self._rest, {"values": values, "groups": groups})
        return [(same, rest_bytes[0], min(free))] * len(reports)

    def _make_plan(self, told: list[tuple[PackedInventory, bytes]]) -> list[Part]:
        """Makes a plan, on rank 0."""
        plan = make_global_plan([of_rank for of_rank, _ in told])
        self._add_marks(plan)
        added = [merge_extras(self._rest, unpack(extras)) for _, extras in told[1:]]
        supplies = [[], *([path for path, _ in of_rank["values"]] for of_rank in added)]
        name = uuid.uuid4().hex
        parts = [
            Part(name, mask, size, plan.bytes, paths)
            for mask, size, paths in zip(plan.masks, plan.sizes, supplies, strict=True)
        ]
        _cached_plans[self._digest] = _CachedPlan(parts[0], plan, [of_rank["groups"] for of_rank in added])
        return parts

    def _add_marks(self, plan: Plan) -> None:
        """Adds marks for tensors that have no shard on this rank."""
        for key, tensor in plan.tensors.items():
            insert_value(self._rest, tensor.path, make_mark(key))


#: Longest time that the ranks wait for the slowest one's disk.
_TIMEOUT = timedelta(minutes=30)


class AsyncSaver:
    """Writes checkpoints in one background thread, one at a time.

    The ranks plan the save in the calling thread and confirm it in the background thread, over a process group of its
    own, because two threads must not share one. The next call of :meth:`save` or :meth:`wait` raises the error of a
    failed save, on all ranks.

    Args:
        group: Process group of the run's ranks; None for a single process. With a group, every process of the default
            group must construct its AsyncSaver at the same point, because this creates a new group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._own_group: ProcessGroup | None = None
        if group is not None:
            made = dist.new_group(dist.get_process_group_ranks(group), timeout=_TIMEOUT, backend="gloo")
            assert isinstance(made, ProcessGroup)  # Only processes outside the group get a number here.
            self._own_group = made
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dlo-checkpoint")
        self._pending: list[Future[None]] = []
        self._failed = False

    def save(self, checkpoint: Mapping[str, Any], path: str | Path, *, about: dict[str, Any] | None = None) -> None:
        """Saves in the background, after the previous save has finished. See :func:`dlo_framework.checkpoint.save`.

        Raises:
            DloError: if the disk is too full for it, or the previous save failed.
        """
        self.wait()
        prepared = prepare(checkpoint, checkpoint_path(path), group=self._group, about=about)
        self._pending.append(self._thread.submit(self._write, stage_on_host(prepared)))

    def remove(self, path: str | Path) -> None:
        """Removes a checkpoint, after the pending save is on the disk; if that save fails, keeps it."""
        if self._pending:
            self._pending.append(self._thread.submit(self._remove, Path(path)))
        else:
            remove(Path(path))

    @property
    def is_busy(self) -> bool:
        """Whether a save or a removal is pending."""
        return any(not future.done() for future in self._pending)

    def wait(self) -> None:
        """Waits for pending saves and removals.

        Raises:
            DloError: if one failed for a reason that the user can fix, else RuntimeError. Each failure is raised once.
        """
        pending, self._pending = self._pending, []
        errors = [error for error in (future.exception() for future in pending) if error is not None]
        self._failed = False
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Waits for pending saves and ends the thread. Call it before the process group is destroyed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, prepared: Prepared) -> None:
        try:
            write(prepared, self._own_group)
        except BaseException:
            self._failed = True
            raise

    def _remove(self, path: Path) -> None:
        if not self._failed:
            remove(path)


def stage_on_host(prepared: Prepared) -> Prepared:
    """Returns the save with copies, in CPU memory, of all that the run may change from now on."""
    bounces: dict[torch.device, BounceBuffers] = {}
    copies = {}
    for item, tensor in prepared.elements.items():
        if tensor.device.type == "cpu":
            copies[item] = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            if tensor.device not in bounces:
                bounces[tensor.device] = BounceBuffers(tensor.device)
            copies[item] = bounces[tensor.device].copy(tensor)
    for bounce in bounces.values():
        bounce.finish()
    state = io.BytesIO()
    if prepared.rest is not None:
        torch.save(prepared.rest, state)
    return dataclasses.replace(prepared, elements=copies, state=state.getvalue())


class BounceBuffers:
    """Copies a device's tensors to CPU memory through two pinned buffers of one size.

    A pinned copy of each tensor would occupy up to twice its size for good: torch (2.11 to 2.15) rounds it up to a
    power of two, and keeps the memory. While the device fills one of the buffers, the host empties the other.

    Args:
        device: Device of the tensors.
        size: Size of a buffer, in bytes.
    """

    def __init__(self, device: torch.device, size: int = 32 << 20) -> None:
        self._pinned, self._size = device.type == "cuda", size
        self._module: Any = torch.get_device_module(device) if self._pinned else None
        self._device = device
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(2)]
        self._filled: list[tuple[Any, Tensor, Tensor] | None] = [None, None]
        self._turn = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Starts to copy a tensor; the result is complete after :meth:`finish`."""
        source = tensor.detach().contiguous().resolve_conj().resolve_neg()
        target = torch.empty(source.shape, dtype=source.dtype)
        if not source.numel():
            return target
        sent, received = (whole.reshape(-1).view(torch.uint8) for whole in (source, target))
        for part, place in zip(sent.split(self._size), received.split(self._size), strict=True):
            self._empty(self._turn)
            buffer = self._buffers[self._turn][: part.numel()]
            buffer.copy_(part, non_blocking=self._pinned)
            event = self._module.current_stream(self._device).record_event() if self._pinned else None
            self._filled[self._turn] = event, buffer, place
            self._turn = 1 - self._turn
        return target

    def finish(self) -> None:
        """Waits for the copies that have been started."""
        for number in (self._turn, 1 - self._turn):
            self._empty(number)

    def _empty(self, number: int) -> None:
        filled, self._filled[number] = self._filled[number], None
        if filled is not None:
            event, buffer, place = filled
            if event is not None:
                event.synchronize()
            place.copy_(buffer)
