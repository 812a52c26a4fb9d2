"""Log of the memory that tensors take while it is on: each allocation and release of a storage, in order.

It counts what operators return, on any device, also on fake tensors. Memory that a kernel allocates and frees inside
one operator, and the inside of compiled code, is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import tree_leaves
from dlo_framework.models.recompute import in_backward


@dataclass(frozen=True)
class Usage:
    """Memory of the storages that were allocated in a section of the log.

    Attributes:
        peak: Largest number of bytes at one time.
        final: Bytes at the section's end.
    """

    peak: int
    final: int


class _HostMemory:
    """Number of contexts in which new storages are the host's."""

    depth = 0


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Makes logs leave out the storages that are allocated inside: they are the host's, also where it is the device."""
    _HostMemory.depth += 1
    try:
        yield
    finally:
        _HostMemory.depth -= 1


class AllocationLog(TorchDispatchMode):
    """Mode that logs the allocation and release of storages, each with a number.

    Args:
        device: Device of the storages that are logged; None for all.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device
        self._events: list[tuple[int, int]] = []  # number of the storage, bytes; negative for a release
        self._seen: dict[int, tuple[int, Any]] = {}  # number and weak reference by address; 0 for storages from before
        self._count = 0
        self._in_backward: set[int] = set()  # numbers of the storages that a backward has allocated

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and logs the storages of its results that are not those of its arguments."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._note(tensor, is_new=True)
        return result

    def _note(self, tensor: Tensor, is_new: bool) -> None:
        storage = tensor_storage(tensor)
        if storage is None or storage._cdata in self._seen:
            return
        address, size, number = storage._cdata, storage.nbytes(), 0
        if is_new and not _HostMemory.depth and self._device in (None, storage.device):
            self._count = number = self._count + 1
            self._events.append((number, size))
            if in_backward():
                self._in_backward.add(number)

        def released(_: Any) -> None:
            del self._seen[address]
            if number:
                self._events.append((number, -size))

        self._seen[address] = number, weakref.ref(storage, released)

    def mark(self) -> int:
        """Returns the current position in the log."""
        return len(self._events)

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Returns the numbers of the storages of tensors; those from before the log have none."""
        found = set()
        for tensor in tensors:
            storage = tensor_storage(tensor)
            if storage is not None and storage._cdata in self._seen:
                found.add(self._seen[storage._cdata][0])
        return found - {0}

    def allocated_bytes(
        self, storages: Iterable[torch.UntypedStorage], start: int, without: Collection[int] = ()
    ) -> int:
        """Returns the bytes of those of some storages that were allocated after a position, each counted once.

        Args:
            storages: Storages.
            start: Position in the log.
            without: Numbers of storages that are not counted.
        """
        born = {number for number, size in self._events[start:] if size >= 0} - {*without}
        found = {s._cdata: s.nbytes() for s in storages if self._seen.get(s._cdata, (0, None))[0] in born}
        return sum(found.values())

    def left_by_backward(self, start: int, end: int | None = None) -> set[int]:
        """Returns the numbers of the storages that a backward has allocated in a section, and not released in it."""
        section = self._events[start:end]
        return {number for number, size in section if size >= 0 and number in self._in_backward} - {
            number for number, size in section if size < 0
        }

    def usage(
        self, start: int, end: int | None = None, without: Collection[int] = (), *, releases: bool = False
    ) -> Usage:
        """Returns the memory of the storages that were allocated in a section.

        Args:
            start: Position of the section's start.
            end: Position of its end; by default the current one.
            without: Numbers of storages that are not counted.
            releases: Whether releases of storages from before the section count too, relative to its start.
        """
        level = peak = 0
        born: set[int] = set()
        for number, size in self._events[start:end]:
            if size >= 0:
                born.add(number)
            if number not in without and (releases or number in born):
                level += size
                peak = max(peak, level)
        return Usage(peak, level)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors' storages, each counted once."""
    storages = {
        storage._cdata: storage.nbytes() for tensor in tensors if (storage := tensor_storage(tensor)) is not None
    }
    return sum(storages.values())


def _tensors(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def tensor_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns a tensor's storage; None for one without storage of its own, such as a DTensor."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None
