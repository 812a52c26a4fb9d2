"""What a host that runs an accelerator waits for, noted on a CPU, where nothing has to be waited for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Calls that bring a value of the device's to the host, or whose result is as large as the device's values say.
_ASKED = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "__bool__", "__int__", "__float__"}


class Waits(TorchFunctionMode):
    """Notes the calls from Python inside a block that would wait for a device.

    Attributes:
        calls: their names. Indexing by a mask is `nonzero`; a tensor made of numbers is copied to its device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ASKED:
            self.calls.append(name)
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            self.calls.append("nonzero")
        if name in ("tensor", "as_tensor") and not isinstance(args[0], Tensor):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))
