"""Reaches into torch's FSDP2: the state that it keeps during a step, and its two collectives.

FSDP2 reduces a unit's gradients together. :func:`complete_gradients` adds zeros for unused parameters, and makes the
dtype of all one. Otherwise ranks that use different parameters reduce buffers of different lengths, which aborts them.
And FSDP2 refuses to reduce gradients of two dtypes. They have two where gradients of earlier micro-batches have been
accumulated in the dtype of the reduction, and that of another parameter is still in the dtype in which it is gathered:
because a zero-bubble schedule has computed it after the unit's backward, or because no earlier micro-batch uses it.

On gloo, torch's own collectives are slower than an all-reduce of the same buffer:
:mod:`dlo_framework.distributed.collectives` implements them as exchanges between pairs of ranks. Other backends use
torch's own; complex gradients are summed through their real view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dlo_framework.distributed.collectives import Communicator


def state_of(module: Any) -> Any:
    """Returns FSDP2's ``FSDPState`` of a module that ``fully_shard`` was called with, as torch 2.11 to 2.15 has it."""
    return module._get_fsdp_state()


def drop_step_state(root: FSDPModule) -> None:
    """Resets FSDP2 to the beginning of a step: shards only, no gradients, no running collective.

    A reach into torch 2.11 to 2.15. Its ``FSDPModule.reset_iter_state`` (2.13) fails before the first forward, and
    before 2.15 leaves the gradients of gathered parameters, to which the next step would add. Where torch lacks the
    method, this function sets the same fields.

    Args:
        root: Outermost module that ``fully_shard`` was called with.
    """
    state = state_of(root)
    if state._is_root is None:  # No forward yet.
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset(state)
    for group in all_groups(state):
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad = None
            gathered = gathered_copy(parameter)
            if gathered is not None:
                gathered.grad = None
            # Before torch 2.15 there is a second gradient in the dtype of the reduction.
            if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                parameter.unsharded_accumulated_grad = None


def gathered_copy(parameter: Any) -> Any:
    """Returns the gathered tensor of an ``FSDPParam`` of torch 2.11 to 2.15; None before the first gather."""
    return getattr(parameter, "_unsharded_param", None)


def begin_root(root: FSDPModule) -> None:
    """Makes a module the root of those under it, as its first forward does; a step may call these alone.

    A reach into torch 2.11 to 2.15.
    """
    state = state_of(root)
    if state._is_root is None:
        state._lazy_init()


def resume_forward(root: FSDPModule) -> None:
    """Makes FSDP2 continue the forward of a root after backwards that ran inside it.

    At the end of each backward FSDP2 ends the passes of all units. So the root would free its parameters at the end of
    its forward, which it does not do between forward and backward, and gather them again in its own backward. A reach
    into torch 2.11 to 2.15.

    Args:
        root: Outermost module that ``fully_shard`` was called with, whose forward is running.
    """
    state = state_of(root)
    state._training_state = type(state._training_state).FORWARD
    for group in own_groups(state):
        group._training_state = type(group._training_state).FORWARD


def reduce_accumulated(root: FSDPModule) -> None:
    """Reduces the gradients that backwards have accumulated unreduced, as FSDP2 does at the end of a backward.

    A reach into torch 2.11 to 2.15, which ``torch.distributed.pipelining`` makes too: a schedule has no last backward,
    and the gradients of a zero-bubble schedule come after all of them.

    Args:
        root: Outermost module that ``fully_shard`` was called with.
    """
    state_of(root)._root_post_backward_final_callback()


def own_groups(unit: Any) -> list[Any]:
    """Returns FSDP2's parameter groups of a unit's ``FSDPState``; in torch 2.11 there is at most one."""
    groups = unit._fsdp_param_groups if hasattr(unit, "_fsdp_param_groups") else [unit._fsdp_param_group]
    return [group for group in groups if group is not None]


def all_groups(root: Any) -> Iterator[Any]:
    """Yields FSDP2's parameter groups of all units under a root, given its ``FSDPState``."""
    for unit in root._state_ctx.all_states:
        yield from own_groups(unit)


def _reset(state: Any) -> None:
    """Resets the fields that torch 2.14's ``FSDPState._reset_iter_state`` does, for versions without it."""
    context, shared = state._comm_ctx, state._state_ctx
    idle = type(state._training_state).IDLE
    stream = state._device_handle.current_stream()
    if hasattr(context, "reduce_scatter_states"):
        reductions = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
    else:  # torch 2.11 keeps one.
        reductions, context.reduce_scatter_state = [context.reduce_scatter_state], None
    for pending in [context.all_gather_state, *reductions]:
        _wait(stream, pending)
    context.all_gather_state = None
    context.post_forward_order.clear()
    for unit in shared.all_states:
        unit._modules_to_run_forward.clear()
        unit._training_state = idle
    for group in all_groups(state):
        gathering, group._all_gather_result = group._all_gather_result, None
        if gathering is not None:
            if gathering.all_gather_event is not None:
                stream.wait_event(gathering.all_gather_event)
            if isinstance(gathering.all_gather_work, torch.distributed.Work):
                gathering.all_gather_work.wait()
        for event in (group._post_reduce_event, group._reshard_after_forward_event):
            if event is not None:
                stream.wait_event(event)
        _wait(stream, group._all_reduce_state)
        group._post_reduce_event = group._reshard_after_forward_event = group._all_reduce_state = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _wait(stream: Any, pending: Any) -> None:
    if pending is not None and pending.event is not None:
        stream.wait_event(pending.event)


def complete_gradients(unit: FSDPModule) -> None:
    """Makes a unit reduce zeros for parameters without a gradient, and all gradients in one dtype.

    torch 2.13 has ``FSDPModule.set_reduce_scatter_unused_params`` for the zeros; but they have the dtype in which
    parameters are gathered. Before 2.15, where FSDP2 has a second gradient in the dtype of the reduction, this function
    therefore completes the gradients just before FSDP2 collects them: a reach into ``FSDPParamGroup.post_backward``.

    Args:
        unit: Module that ``fully_shard`` was called with.
    """
    for group in own_groups(state_of(unit)):
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
    for group in all_groups(state_of(root)):
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
        gathered = gathered_copy(parameter)
        if gathered is not None and gathered.requires_grad:
            yield parameter


class _Collective:
    """Custom collective of FSDP2; torch (2.11 to 2.15) calls ``allocate`` and the object itself."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Pairwise(_Collective):
    def __init__(self, sharers: Communicator) -> None:
        self.sharers = sharers


class PairwiseAllGather(_Pairwise):
    """All-gather of a unit's parameters, between pairs of ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fills the output with all ranks' inputs; FSDP2 has already copied this rank's input there."""
        if group.size() == self.sharers.size:
            own = self.sharers.segment(output_tensor)
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor)
            self.sharers.all_gather(output_tensor).wait()
        else:  # After forward, parameters may be sharded over fewer ranks.
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


class PairwiseReduceScatter(_Pairwise):
    """Reduce-scatter of a unit's gradients, between pairs of ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fills the output with this rank's shard of the inputs' sum or mean; the input is overwritten."""
        part = self.sharers.reduce_scatter(input_tensor).wait()
        if op == dist.ReduceOp.AVG:
            torch.div(part, self.sharers.size, out=output_tensor)
        else:
            assert op == dist.ReduceOp.SUM
            output_tensor.copy_(part)


class ComplexReduceScatter(_Collective):
    """Reduce-scatter of a unit's complex gradients; torch's (2.11 to 2.15) supports real numbers only."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fills the output with this rank's shard of the inputs' sum."""
        real, parts = torch.view_as_real(output_tensor), torch.view_as_real(input_tensor)
        return dist.reduce_scatter_tensor(real, parts, group=group, op=op, async_op=async_op)
