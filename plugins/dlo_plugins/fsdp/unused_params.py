"""Gradients of zeros for the parameters that a backward pass has not used, so that all ranks reduce the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dlo_plugins.fsdp.step_state import own_groups


def reduce_unused_params(unit: FSDPModule) -> None:
    """Has a unit reduce zeros for parameters without a gradient.

    Without, ranks that use different parameters reduce buffers of different lengths, which aborts them. torch has
    ``FSDPModule.set_reduce_scatter_unused_params`` for it since 2.13. Before (2.11, 2.12), the gradients are set just
    before FSDP2 collects them: a reach into ``FSDPParamGroup.post_backward``.

    Args:
        unit: Module that ``fully_shard`` was called with.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in own_groups(unit._get_fsdp_state()):
        group.post_backward = _ZerosFirst(group)


class _ZerosFirst:
    """Stands for a parameter group's ``post_backward``.

    Args:
        group: FSDP2's ``FSDPParamGroup``.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.post_backward = group, group.post_backward

    def __call__(self, *unused: Any) -> Any:
        for parameter in self.group.fsdp_params if self.group.reduce_grads else ():
            gathered = getattr(parameter, "_unsharded_param", None)
            used = parameter.unsharded_accumulated_grad is not None
            if gathered is not None and gathered.requires_grad and gathered.grad is None and not used:
                gathered.grad = torch.zeros_like(gathered, requires_grad=False)
        return self.post_backward(*unused)
