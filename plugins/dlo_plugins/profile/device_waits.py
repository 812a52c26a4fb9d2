"""Finds the source lines at which the host waits for the device: values that Python reads, and blocking copies.

A mode sees each operator of one step, so lines are exact. It times the host's wait too; a CPU has nothing to wait for,
so there the count matters. Memory that operators outside torch's dispatcher read, and `torch.cuda.synchronize`, are not
seen.
"""

from __future__ import annotations

import linecache
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework import finite
from dlo_framework.batches import tree_leaves

#: Operators whose result, or its size, depends on values on the device, with the words that a user knows.
_READS = {
    "_local_scalar_dense": "item", "nonzero": "nonzero", "equal": "equal", "masked_select": "masked_select",
    "_unique2": "unique", "unique_dim": "unique", "unique_consecutive": "unique_consecutive", "bincount": "bincount",
    "repeat_interleave": "repeat_interleave", "is_nonzero": "bool", "_linalg_check_errors": "a check of linalg",
}  # fmt: skip
_COPIES = ("_to_copy", "copy_")
_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
#: dlo's check of losses reads a copy in host memory, whatever the device.
_LOSS_CHECK = finite.__file__


@dataclass
class DeviceWait:
    """Line that waits for the device.

    Attributes:
        place: File and line.
        function: Function of the line.
        source: Text of the line.
        operation: Name of what waits: `item`, `nonzero`, `copy to the host`.
        count: Number of times in the step.
        seconds: Time that the host spent in it.
    """

    place: str
    function: str
    source: str
    operation: str
    count: int = 0
    seconds: float = 0.0


class WaitRecorder(TorchDispatchMode):
    """Mode that records where the host waits for the device.

    Args:
        device: Device of the run; on a CPU every tensor counts as one of the device's.

    Attributes:
        found: Waits by place and operation.
        stopped: Whether to record nothing more.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: dict[tuple[str, str], DeviceWait] = {}
        self.stopped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and records it if it waits."""
        if any(kind.__torch_dispatch__ != Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # A subclass such as DTensor calls operators of plain tensors, which come here too.
        kwargs = kwargs or {}
        operation = None if self.stopped else self._operation(func, args, kwargs)
        if operation is None:
            return func(*args, **kwargs)
        began = time.perf_counter()
        result = func(*args, **kwargs)
        self._add(operation, time.perf_counter() - began)
        return result

    def _operation(self, func: Any, args: Any, kwargs: Any) -> str | None:
        name = func.overloadpacket.__name__
        if func.namespace != "aten":
            return None
        if name in _READS:
            sized = name == "repeat_interleave" and kwargs.get("output_size") is not None
            return _READS[name] if not sized and self._has_values(args) else None
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            fills = name != "index" and args[2].numel() == 1
            return "indexing by a mask" if masks and not fills and self._has_values(masks) else None
        if name in _COPIES and self._device.type != "cpu":
            return self._copy(name, args, kwargs)
        return None

    def _has_values(self, args: Any) -> bool:
        return any(leaf.device.type == self._device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor))

    def _copy(self, name: str, args: Any, kwargs: Any) -> str | None:
        """Returns a blocking copy between device and host; None for others."""
        if name == "copy_":
            target, source, waits = args[0].device, args[1].device, not (args[2] if len(args) > 2 else False)
        else:
            target = torch.device(kwargs.get("device") or args[0].device)
            source, waits = args[0].device, not kwargs.get("non_blocking", False)
        if not waits or target.type == source.type:
            return None
        return "copy to the host" if target.type == "cpu" else "copy from the host"

    def _add(self, operation: str, seconds: float) -> None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back  # type: ignore[assignment]
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_OPTIMIZERS) and self._device.type == "cpu":
                return  # The optimizer's count of steps, which is the host's on every machine.
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or (frame.f_code.co_filename == _LOSS_CHECK and self._device.type == "cpu"):
            return
        code, line = frame.f_code, frame.f_lineno
        place = f"{code.co_filename}:{line}"
        key = place, operation
        if key not in self.found:
            text = linecache.getline(code.co_filename, line).strip()
            self.found[key] = DeviceWait(place, code.co_qualname, text, operation)
        wait = self.found[key]
        wait.count += 1
        wait.seconds += seconds

    def waits(self) -> list[DeviceWait]:
        """Returns the waits, the longest first."""
        return sorted(self.found.values(), key=lambda wait: (-wait.seconds, -wait.count))
