"""Asynchronous saves: training continues while the checkpoint is written, and removals wait for the save.

The saved state is that of the call: each rank copies what it writes before the call returns. That copy, this rank's
share of the checkpoint, is the memory that an asynchronous save costs.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlo_framework.checkpoint.saving import Prepared, prepare, write
from dlo_framework.checkpoint.store import checkpoint_path, remove

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
