"""The largest tensor that some code makes."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor made in it has; with `floats=False` of those of other dtypes alone."""

    def __init__(self, floats: bool = True) -> None:
        super().__init__()
        self.floats, self.elements = floats, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and (self.floats or not tensor.is_floating_point()):
                self.elements = max(self.elements, tensor.numel())
        return out
