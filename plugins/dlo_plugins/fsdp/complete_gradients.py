"""Completes the gradients that FSDP2 reduces together: zeros for unused parameters, and one dtype for all.

Otherwise ranks that use different parameters reduce buffers of different lengths, which aborts them. And FSDP2 refuses
to reduce gradients of two dtypes. They have two where gradients of earlier micro-batches have been accumulated in the
dtype of the reduction, and that of another parameter is still in the dtype in which it is gathered: because a
zero-bubble schedule has computed it after the unit's backward, or because no earlier micro-batch uses the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dlo_plugins.fsdp.step_state import all_groups, own_groups


def complete_gradients(unit: FSDPModule) -> None:
    """Makes a unit reduce zeros for parameters without a gradient, and all gradients in one dtype.

    torch 2.13 has ``FSDPModule.set_reduce_scatter_unused_params`` for the zeros; but they have the dtype in which
    parameters are gathered. Before 2.15, where FSDP2 has a second gradient in the dtype of the reduction, this function
    therefore completes the gradients just before FSDP2 collects them: a reach into ``FSDPParamGroup.post_backward``.

    Args:
        unit: Module that ``fully_shard`` was called with.
    """
    for group in own_groups(unit._get_fsdp_state()):
        if any(_has_second_gradient(parameter) for parameter in group.fsdp_params):
            group.post_backward = _CompleteFirst(group)
        elif hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)


def accumulate_gradients(root: FSDPModule) -> None:
    """Adds the gradients of gathered parameters to those of the step, in the dtype of the reduction.

    FSDP2 does so at the end of a unit's backward, and so too early for gradients that are computed later. From torch
    2.15 on, autograd itself accumulates in that dtype, and this function does nothing.

    Args:
        root: Outermost module that ``fully_shard`` was called with.
    """
    for group in all_groups(root._get_fsdp_state()):
        for parameter in _trained(group):
            if _has_second_gradient(parameter):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


class _CompleteFirst:
    """Replacement of a parameter group's ``post_backward`` that first completes the gradients that it reduces.

    Args:
        group: Parameter group, an ``FSDPParamGroup``.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.post_backward = group, group.post_backward

    def __call__(self, *unused: Any) -> Any:
        trained = list(_trained(self.group)) if self.group.reduce_grads else []
        accumulated = any(parameter.unsharded_accumulated_grad is not None for parameter in trained)
        for parameter in trained:
            if parameter.unsharded_accumulated_grad is not None:
                continue
            gathered = parameter._unsharded_param
            if gathered.grad is None:
                gathered.grad = torch.zeros_like(gathered, requires_grad=False)
            if accumulated:
                parameter.to_accumulated_grad_if_needed()
        return self.post_backward(*unused)


def _has_second_gradient(parameter: Any) -> bool:
    """Returns whether FSDP2 adds gradients to one of its own, before torch 2.15, where it has the attribute too."""
    return hasattr(parameter, "accumulate_unsharded_grad_if_needed")


def _trained(group: Any) -> Iterator[Any]:
    """Yields the trainable parameters of a group, as ``FSDPParam``, that have been gathered before."""
    for parameter in group.fsdp_params:
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None and gathered.requires_grad:
            yield parameter
