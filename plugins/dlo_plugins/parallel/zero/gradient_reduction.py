"""Reduce-scatters ZeRO's gradients to their owners during backward, bucket by bucket.

Autograd calls Python once per bucket, at the gradient of the bucket's last parameter, and not once per parameter. That
parameter is found at run time: a hook that finds parameters without a gradient moves to these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dlo_framework.copy_streams import CopyHandle
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.gradient_check import check_backward_seen, unused_message
from dlo_framework.errors import DloError
from dlo_framework.optimizers import copy_all
from dlo_plugins.parallel.zero.flat_group import FlatGroup

#: Maximum number of concurrent reductions; each holds a buffer of a bucket's size.
IN_FLIGHT = 2


class GradientReducer:
    """Reduces each group's gradients in backward when they are complete.

    Args:
        groups: Groups roughly in the order in which backward completes them; all ranks reduce in exactly this order.
        communicator: Communicator of the ranks.
        find_unused: Whether a parameter may have no gradient; then groups without gradients are reduced as zeros, and
            an all-reduce of one byte per parameter finds the unused ones.
        on_reduced: Callback that gets each group whose gradients were moved from its parameters to a buffer.
        at_end: Whether groups are reduced after backward only, as ranks may gather parameters in different orders.
    """

    def __init__(
        self,
        groups: list[FlatGroup],
        communicator: Communicator,
        find_unused: bool,
        on_reduced: Callable[[FlatGroup], None] | None = None,
        at_end: bool = False,
    ) -> None:
        self.groups = groups
        self.communicator, self.find_unused, self.on_reduced = communicator, find_unused, on_reduced
        self._at_end = at_end
        self.used: set[str] = set()  # in this accumulation window, on any rank
        self.skipped: set[int] = set()  # ids of groups whose gradients are not wanted in this backward
        self._next = 0
        self._running: deque[FlatGroup] = deque()
        self._free: list[tuple[Tensor, CopyHandle | None]] = []
        self.enabled = True
        self.announced = False  # whether this backward was started through the strategy
        self.on_gradient: Callable[[FlatGroup], None] | None = None  # gets each group whose gradient shard is complete
        for group in groups:
            # Backward computes a group's gradients from its last parameter or from its first: watch both ends.
            self._watch(group, {0, len(group.parameters) - 1})

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for group in self.groups:
            self._watch(group, ())

    def begin(self, *, accumulated: bool) -> None:
        """Begins a backward that reduces; drops the reductions of a backward that raised.

        Args:
            accumulated: Whether gradients on the parameters are those of earlier micro-batches.
        """
        for group in self._running:  # Waits for the collectives, and discards their results.
            group.end_reduction()
        self._running.clear()
        for group in self.groups:
            parameters, hooks = group.parameters, group.hooks
            if [n for n in hooks if next(reversed(parameters[n]._post_accumulate_grad_hooks)) != hooks[n].id]:
                self._watch(group, list(hooks))  # After hooks that the user's code has added since.
            left = [p.grad for p in parameters]
            group.earlier, group.is_complete, group.is_launched = None, False, False
            if left.count(None) == len(left):
                continue
            if accumulated:
                group.earlier = [(g, -1 if g is None else g._version) for g in left]
            else:
                group.drop_parameter_grads()
        self._next = 0

    def _watch(self, group: FlatGroup, numbers: Iterable[int]) -> None:
        """Moves the hooks of a group to the parameters with these indices."""
        for handle in group.hooks.values():
            handle.remove()

        def arrived(_: Tensor) -> None:
            check_backward_seen(self.announced)
            if self.enabled:
                self._arrived(group)

        parameters = group.parameters
        group.hooks = {n: parameters[n].register_post_accumulate_grad_hook(arrived) for n in numbers}

    def _arrived(self, group: FlatGroup) -> None:
        """Reduces a group if its gradients are complete; otherwise moves the hooks to the missing ones."""
        if id(group) in self.skipped:
            group.drop_parameter_grads()
            return
        if self._at_end:
            return
        if group.is_launched:
            raise DloError(_second_gradient(group.names[0]))
        missing = group.missing_gradients()
        if missing:
            self._watch(group, missing)
            return
        group.is_complete = True
        while self._next < len(self.groups) and self.groups[self._next].is_complete:
            self._launch(self.groups[self._next])
            self._next += 1

    def _launch(self, group: FlatGroup) -> None:
        """Moves a group's gradients into a buffer, with zeros for missing ones, and starts the reduction."""
        if len(self._running) >= IN_FLIGHT:
            self._finish_oldest()
        buffer = self._get_buffer(group)
        places, gaps = group.cut(buffer)
        written, gradients = [], []
        for parameter, place in zip(group.parameters, places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                gaps.append(place)
                continue
            parameter.grad = None
            written.append(place)
            gradient = gradient.detach() if gradient.requires_grad else gradient
            gradients.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
        if gaps:
            torch._foreach_zero_(gaps)
        if written:
            copy_all(written, gradients)
        group.is_launched = True
        group.reduction = buffer, self.communicator.reduce_scatter(buffer, average=True)
        self._running.append(group)
        if self.on_reduced is not None:
            self.on_reduced(group)

    def _get_buffer(self, group: FlatGroup) -> Tensor:
        """Returns a free or new buffer for a group's gradients."""
        length = group.partition.padded
        for number, (spare, copied) in enumerate(self._free):
            if spare.numel() == length and spare.dtype == group.reduced_dtype:
                if copied is not None:
                    copied.wait()
                del self._free[number]
                return spare
        return torch.empty(length, dtype=group.reduced_dtype, device=group.device)

    def _finish_oldest(self) -> None:
        group = self._running.popleft()
        buffer, segment = group.end_reduction()
        copied = group.add_gradient(segment)
        if len(self._free) < IN_FLIGHT:
            self._free.append((buffer, copied))
        if self.on_gradient is not None:
            self.on_gradient(group)

    def finish(self, *, partial: bool) -> None:
        """Ends a backward: reduces the remaining groups, and adds the parameters that any rank used to :attr:`used`.

        Gradients of earlier micro-batches on parameters that this one did not use are reduced too.

        Args:
            partial: Whether a backward may leave whole groups without gradients, as with several optimizers in manual
                optimization.

        Raises:
            DloError: Parameters have no gradient, and ``find_unused`` is off.
        """
        wanted: list[tuple[FlatGroup, list[str]]] = []
        for group in self.groups:
            if id(group) in self.skipped:
                group.drop_parameter_grads()
                continue
            came = [name for name, p in zip(group.names, group.parameters, strict=True) if p.grad is not None]
            if group.is_launched and came:
                raise DloError(_second_gradient(came[0]))
            wanted.append((group, group.names if group.is_launched else came))
        if not self.find_unused:
            absent = [
                name
                for group, came in wanted
                if len(came) < len(group.names) and (came or not partial)
                for name in set(group.names).difference(came)
            ]
            if absent:
                raise DloError(unused_message(sorted(absent)))
            wanted = [(group, came) for group, came in wanted if came]
        idle = [group for group, came in wanted if not came and group.gradient is None]
        for group, _ in wanted:
            if not group.is_launched:
                self._launch(group)
        while self._running:
            self._finish_oldest()
        self._free.clear()
        self.communicator.release()
        used = {name for _, came in wanted for name in came}
        names = [name for group, _ in wanted for name in group.names]
        if self.find_unused and names:
            # After all reductions, in which every rank takes part whether it used the group or not. So all ranks call
            # the same collectives in the same order, also where a group completes during backward on one rank alone.
            flags = torch.tensor([name in used for name in names], dtype=torch.uint8, device=self.groups[0].device)
            agreed = self.communicator.maximum(flags).tolist()
            used = {name for name, flag in zip(names, agreed, strict=True) if flag}
        for group in idle:
            if not used.intersection(group.names):
                group.drop_gradient()
        self.used |= used


def _second_gradient(name: str) -> str:
    """Returns the error message for a parameter that gets another gradient after its reduction."""
    return (
        f"parameters under ZeRO must get one gradient in a backward, got a second one of {name} after the first was"
        " reduced, as reentrant recomputation causes; use torch.utils.checkpoint with use_reentrant=False"
    )
