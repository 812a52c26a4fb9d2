"""Seconds of operators by arithmetic: FLOPs and bytes moved, for chains of models that are not there to be timed.

Only ratios between blocks matter to a schedule. The rates are those of an H100 by its data sheet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

#: FLOP/s by bytes of an element (half precision; TF32), and bytes per second of the memory.
_FLOP_RATES = {2: 989e12, 4: 495e12}
_BYTE_RATE = 3.35e12


class OperatorCosts(TorchDispatchMode):
    """Mode that adds up the seconds of operators: the longer of their arithmetic and their traffic with the memory.

    Attributes:
        seconds: Sum since the mode was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and adds its seconds."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten.detach or func.is_view:
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if tensors:
            size = min(leaf.element_size() for leaf in tensors if leaf.is_floating_point()) if _floats(tensors) else 4
            rate = _FLOP_RATES.get(size, _FLOP_RATES[4])
            moved = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
            self.seconds += max(_flops(func, args, kwargs, result) / rate, moved / _BYTE_RATE)
        return result


def _floats(tensors: list[Tensor]) -> bool:
    return any(leaf.is_floating_point() for leaf in tensors)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns the FLOPs of an operator; 0 for those of which only the traffic counts."""
    packet = func._overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 2.5 * float(sdpa_flop_count(*(tensor.shape for tensor in args[1:4])))
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
