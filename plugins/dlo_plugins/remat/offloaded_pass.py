"""One forward and backward of a chain in which nodes are offloaded, by the points of the schedule's transfers.

Autograd holds handles in place of the tensors that an offloaded node saves: hooks for saved tensors pack them. A
handle's storage is copied to the host after the node's forward, its memory is released where the schedule says, and it
is copied back before the node's backward. What else refers to a tensor keeps it in memory, and reads right values.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dlo_plugins.remat.allocation_log import tensor_storage
from dlo_plugins.remat.host_link import HostCopy, HostLink
from dlo_plugins.remat.schedule import Keep, Node, Transfer


class StoredStorage:
    """Storage of saved tensors, which is on the device or on the host.

    Args:
        storage: Storage on the device.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device, self._size = storage.device, storage.nbytes()
        self._handles: list[weakref.ref[PackedTensor]] = []
        self._copy: HostCopy | None = None
        self._there: Tensor | None = None  # bytes on the host
        self._here: Tensor | None = None  # bytes on the device, once they are back

    def add(self, handle: PackedTensor) -> None:
        """Adds a saved tensor of the storage."""
        self._handles.append(weakref.ref(handle))

    def start_store(self, link: HostLink) -> None:
        """Starts the copy to the host; a storage that nothing saves, or whose owner has freed it, stays."""
        tensor = next((handle.tensor for ref in self._handles if (handle := ref()) is not None), None)
        if tensor is not None and tensor.untyped_storage().nbytes() == self._size:
            self._copy = link.store(_bytes_of(tensor.untyped_storage()))

    def release(self) -> None:
        """Waits for the copy to the host, and gives up the memory of the device."""
        if self._copy is not None:
            self._there, self._copy = self._copy.finish(), None
            for ref in self._handles:
                if (handle := ref()) is not None:
                    handle.drop_tensor()
        self._handles = []

    def start_load(self, link: HostLink) -> None:
        """Starts the copy to the device."""
        if self._there is not None:
            self._copy, self._there = link.load(self._there, self._device), None

    def arrive(self) -> None:
        """Waits for the copy to the device."""
        if self._copy is not None:
            self._here, self._copy = self._copy.finish(), None

    def view(self, link: HostLink, dtype: torch.dtype, size: Any, stride: Any, offset: Any) -> Tensor:
        """Returns a tensor of the storage on the device, to which it is copied first where it is not there."""
        self.start_load(link)
        self.arrive()
        assert self._here is not None
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(self._here.untyped_storage(), offset, size, stride)


class PackedTensor:
    """What autograd holds in place of a saved tensor.

    Args:
        tensor: Tensor.
        stored: Storage of the tensor.
        link: Link of the storage's copies.
    """

    def __init__(self, tensor: Tensor, stored: StoredStorage, link: HostLink) -> None:
        self.tensor: Tensor | None = tensor
        self._stored, self._version = stored, tensor._version
        self._view = functools.partial(
            stored.view, link, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        stored.add(self)

    def drop_tensor(self) -> None:
        """Gives up the tensor on the device."""
        self._check()
        self.tensor = None

    def unpack(self) -> Tensor:
        """Returns the tensor on the device."""
        if self.tensor is None:
            return self._view()
        self._check()
        return self.tensor

    def _check(self) -> None:
        if self.tensor is not None and self.tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}, saved at"
                f" {self._version}"
            )


class _Packer:
    """Hook that packs the tensors that a running node saves.

    Autograd keeps the hook until the backward, so it must not keep the node's tensors.

    Args:
        link: Link of the copies.
        apart: Function that returns the tensors that stay on the device.

    Attributes:
        storages: Storages of packed tensors, by address.
        staying: Addresses of the storages whose tensors are not packed.
    """

    def __init__(self, link: HostLink, apart: Callable[[], Iterable[Tensor]]) -> None:
        self._link, self._apart = link, apart
        self.storages: dict[int, StoredStorage] = {}
        self.staying: set[int] = set()

    def pack(self, tensor: Tensor) -> Tensor | PackedTensor:
        """Returns a handle of a saved tensor, or the tensor if it stays on the device."""
        if self._apart is not _nothing:  # At the first saved tensor, the parameters are gathered.
            known = (tensor_storage(one) for one in self._apart())
            self.staying.update(found._cdata for found in known if found is not None)
            self._apart = _nothing
        storage = tensor_storage(tensor) if type(tensor) is Tensor else None
        if storage is None or storage._cdata in self.staying or not storage.nbytes():
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor
        stored = self.storages.setdefault(storage._cdata, StoredStorage(storage))
        return PackedTensor(tensor, stored, self._link)

    def close(self) -> dict[int, StoredStorage]:
        """Returns the storages, and forgets them."""
        storages, self.storages, self._apart = self.storages, {}, _nothing
        return storages


def _nothing() -> Iterable[Tensor]:
    return ()


class OffloadedPass:
    """Copies of one forward and backward of a chain.

    Args:
        nodes: Nodes of the schedule, the head's last.
        transfers: Points of the copies.
        link: Link.
    """

    def __init__(self, nodes: Sequence[Node], transfers: Sequence[Transfer], link: HostLink) -> None:
        self._nodes, self._transfers, self._link = nodes, transfers, link
        self._storages: dict[int, list[StoredStorage]] = {}  # of each offloaded node, from its forward to its backward
        self._unreleased, self._unloaded = list(transfers), list(reversed(transfers))
        self._packer: _Packer | None = None  # of the running node
        self._input: StoredStorage | None = None  # of the next node, where the node before it saves its own output

    def before_forward(self, index: int) -> None:
        """Releases the memory that is needed from a node's forward on; the number of nodes stands for all of it."""
        while self._unreleased and self._unreleased[0].release <= index:
            for stored in self._storages.get(self._unreleased.pop(0).node, ()):
                stored.release()

    def saving(
        self, index: int, hidden: Tensor, apart: Callable[[], Iterable[Tensor]]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a node's forward.

        Args:
            index: Number of the node.
            hidden: Input of the node.
            apart: Function that returns the tensors that stay on the device: parameters, buffers, other arguments.
        """
        node = self._nodes[index]
        given, self._input = self._input, None
        if not node.offload and not (self._is_offloaded(index + 1) and isinstance(node, Keep) and node.mode == 0):
            return contextlib.nullcontext()
        self._packer = _Packer(self._link, apart)
        own = tensor_storage(hidden)
        if own is not None and node.offload and index:
            self._packer.storages[own._cdata] = given or StoredStorage(own)
        elif own is not None:
            self._packer.staying.add(own._cdata)
        return saved_tensors_hooks(self._packer.pack, _unpack)

    def after_forward(self, index: int, output: Tensor) -> None:
        """Starts the copies of a node to the host; what saves its output goes with the next node."""
        storage, storages = tensor_storage(output), {} if self._packer is None else self._packer.close()
        self._packer = None
        self._input = storages.pop(storage._cdata, None) if storage is not None else None
        if self._is_offloaded(index):
            self._storages[index] = list(storages.values())
            for stored in self._storages[index]:
                stored.start_store(self._link)
        if output.requires_grad:
            output.register_hook(functools.partial(self._before_backward, index))

    def begin_backward(self) -> None:
        """Begins the backward, with the head's."""
        self._load(len(self._nodes) - 1)

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        self._load(index)
        for stored in self._storages.pop(index, ()):
            stored.arrive()

    def _load(self, index: int) -> None:
        """Starts the copies to the device that begin before a node's backward or before that of a later one."""
        self.before_forward(len(self._nodes))
        while self._unloaded and self._unloaded[0].prefetch >= index:
            for stored in self._storages.get(self._unloaded.pop(0).node, ()):
                stored.start_load(self._link)

    def _is_offloaded(self, index: int) -> bool:
        return index < len(self._nodes) and self._nodes[index].offload


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unpack(held: Tensor | PackedTensor) -> Tensor:
    return held if isinstance(held, Tensor) else held.unpack()
