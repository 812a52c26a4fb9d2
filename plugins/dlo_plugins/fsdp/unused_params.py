"""Reduces zeros for the parameters that a backward pass has not used, so that all ranks reduce the same buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dlo_plugins.fsdp.step_state import own_groups


def reduce_unused_params(unit: FSDPModule) -> None:
    """Makes a unit reduce zeros for parameters without a gradient.

    Otherwise ranks that use different parameters reduce buffers of different lengths, which aborts them. torch 2.13 has
    ``FSDPModule.set_reduce_scatter_unused_params`` for it. In 2.11 and 2.12, this function sets the gradients just
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
    """Replacement of a parameter group's ``post_backward`` that first fills missing gradients with zeros.

    Args:
        group: Parameter group, an ``FSDPParamGroup``.
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
