"""Reduce-scatters ZeRO's gradients to their owners during backward, bucket by bucket.

Autograd calls Python once per bucket, at the gradient of the bucket's last parameter, and not once per parameter. That
parameter is found at run time: a hook that finds parameters without a gradient moves to these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlo_framework.copy_streams import CopyHandle
from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.distributed.gradient_check import check_backward_seen, unused_message
from dlo_framework.errors import DloError
from dlo_plugins.zero.flat_group import FlatGroup

#: Maximum number of concurrent reductions; each holds a buffer of a bucket's size.
IN_FLIGHT = 2


@dataclass
class Reduction:
    """Reduction of a flat group's gradients in one backward.

    Attributes:
        group: Flat group.
        buffer: Flat gradients of this rank; None until all are computed.
        pending: Collective, once it has started.
        complete: Whether all gradients of this backward are computed.
        launched: Whether the collective has been started in this backward.
        hooks: Handles of the hooks on parameters, by the parameter's index.
        earlier: Gradients that earlier micro-batches have left on the parameters, and their version counters, which
            rise when this backward adds to a gradient. None where there are none.
    """

    group: FlatGroup
    buffer: Tensor | None = None
    pending: Pending | None = None
    complete: bool = False
    launched: bool = False
    hooks: dict[int, RemovableHandle] = field(default_factory=dict)
    earlier: list[tuple[Tensor | None, int]] | None = None

    def missing(self) -> list[int]:
        """Returns the indices of the parameters whose gradient this backward has not computed yet."""
        if self.earlier is None:
            return [number for number, p in enumerate(self.group.parameters) if p.grad is None]
        return [
            number
            for number, (p, (gradient, version)) in enumerate(zip(self.group.parameters, self.earlier, strict=True))
            if p.grad is None or (p.grad is gradient and p.grad._version == version)
        ]


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
        self.reductions = [Reduction(group) for group in groups]
        self.communicator, self.find_unused, self.on_reduced = communicator, find_unused, on_reduced
        self._at_end = at_end
        self.used: set[str] = set()  # in this accumulation window, on any rank
        self.skipped: set[int] = set()  # ids of groups whose gradients are not wanted in this backward
        self._next = 0
        self._running: deque[Reduction] = deque()
        self._free: list[tuple[Tensor, CopyHandle | None]] = []
        self.enabled = True
        self.announced = False  # whether this backward was started through the strategy
        self.on_gradient: Callable[[FlatGroup], None] | None = None  # gets each group whose gradient shard is complete
        for reduction in self.reductions:
            # Backward computes a group's gradients from its last parameter or from its first: watch both ends.
            self._watch(reduction, {0, len(reduction.group.parameters) - 1})

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for reduction in self.reductions:
            self._watch(reduction, ())

    def begin(self, *, accumulated: bool) -> None:
        """Begins a backward that reduces; drops the reductions of a backward that raised.

        Args:
            accumulated: Whether gradients on the parameters are those of earlier micro-batches.
        """
        if self._running:
            self._drop_running()
        for reduction in self.reductions:
            parameters, hooks = reduction.group.parameters, reduction.hooks
            if [n for n in hooks if next(reversed(parameters[n]._post_accumulate_grad_hooks)) != hooks[n].id]:
                self._watch(reduction, list(hooks))  # After hooks that the user's code has added since.
            left = [p.grad for p in reduction.group.parameters]
            reduction.earlier, reduction.complete, reduction.launched = None, False, False
            if left.count(None) == len(left):
                continue
            if accumulated:
                reduction.earlier = [(g, -1 if g is None else g._version) for g in left]
            else:
                for parameter in reduction.group.parameters:
                    parameter.grad = None
        self._next = 0

    def _watch(self, reduction: Reduction, numbers: Iterable[int]) -> None:
        """Moves the hooks of a group to the parameters with these indices."""
        for handle in reduction.hooks.values():
            handle.remove()

        def arrived(_: Tensor) -> None:
            check_backward_seen(self.announced)
            if self.enabled:
                self._arrived(reduction)

        parameters = reduction.group.parameters
        reduction.hooks = {n: parameters[n].register_post_accumulate_grad_hook(arrived) for n in numbers}

    def _arrived(self, reduction: Reduction) -> None:
        """Reduces a group if its gradients are complete; otherwise moves the hooks to the missing ones."""
        if id(reduction.group) in self.skipped:
            for parameter in reduction.group.parameters:
                parameter.grad = None
            return
        if self._at_end:
            return
        if reduction.launched:
            raise DloError(_second_gradient(reduction.group))
        missing = reduction.missing()
        if missing:
            self._watch(reduction, missing)
            return
        reduction.complete = True
        while self._next < len(self.reductions) and self.reductions[self._next].complete:
            self._launch(self.reductions[self._next])
            self._next += 1

    def _launch(self, reduction: Reduction) -> None:
        """Moves a group's gradients into a buffer, with zeros for missing ones, and starts the reduction."""
        group = reduction.group
        if len(self._running) >= IN_FLIGHT:
            self._finish_oldest()
        reduction.buffer = buffer = self._get_buffer(group)
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
            torch._foreach_copy_(written, gradients)
        reduction.launched = True
        reduction.pending = self.communicator.reduce_scatter(buffer, average=True)
        self._running.append(reduction)
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
        reduction = self._running.popleft()
        assert reduction.pending is not None
        assert reduction.buffer is not None
        copied = reduction.group.add_gradient(reduction.pending.wait())
        if len(self._free) < IN_FLIGHT:
            self._free.append((reduction.buffer, copied))
        if self.on_gradient is not None:
            self.on_gradient(reduction.group)
        reduction.pending = reduction.buffer = None

    def finish(self, *, partial: bool) -> set[str]:
        """Ends a backward: reduces the remaining groups, and returns the parameters that any rank used in it.

        Gradients of earlier micro-batches on parameters that this one did not use are reduced too.

        Args:
            partial: Whether a backward may leave whole groups without gradients, as with several optimizers in manual
                optimization.

        Raises:
            DloError: Parameters have no gradient, and ``find_unused`` is off.
        """
        wanted = []
        for reduction in self.reductions:
            if id(reduction.group) in self.skipped:
                for parameter in reduction.group.parameters:
                    parameter.grad = None
                continue
            names, parameters = reduction.group.names, reduction.group.parameters
            came = [name for name, p in zip(names, parameters, strict=True) if p.grad is not None]
            if reduction.launched and came:
                raise DloError(_second_gradient(reduction.group, came[0]))
            wanted.append((reduction, names if reduction.launched else came))
        if not self.find_unused:
            absent = [
                name
                for reduction, came in wanted
                if len(came) < len(reduction.group.names) and (came or not partial)
                for name in set(reduction.group.names).difference(came)
            ]
            if absent:
                raise DloError(unused_message(sorted(absent)))
            wanted = [(reduction, came) for reduction, came in wanted if came]
        idle = [r.group for r, came in wanted if not came and r.group.gradient is None]
        for reduction, _ in wanted:
            if not reduction.launched:
                self._launch(reduction)
        while self._running:
            self._finish_oldest()
        self._free.clear()
        self.communicator.release()
        used = {name for _, came in wanted for name in came}
        if self.find_unused:
            used = self._agree_on_used([name for reduction, _ in wanted for name in reduction.group.names], used)
        for group in idle:
            if not used.intersection(group.names):
                group.drop_gradient()
        self.used |= used
        return used

    def _agree_on_used(self, names: list[str], mine: set[str]) -> set[str]:
        """Returns the parameters that any rank used.

        Call it after all reductions, in which every rank takes part whether it used the group or not. So all ranks call
        the same collectives in the same order, also where a group completes during backward on one rank and at its end
        on another.
        """
        if not names:
            return set()
        flags = [name in mine for name in names]
        bits = torch.tensor(flags, dtype=torch.uint8, device=self.reductions[0].group.device)
        agreed = self.communicator.maximum(bits).tolist()
        return {name for name, bit in zip(names, agreed, strict=True) if bit}

    def _drop_running(self) -> None:
        """Waits for the collectives of a backward that raised, and discards their results."""
        for reduction in self._running:
            assert reduction.pending is not None
            reduction.pending.wait()
            reduction.pending = reduction.buffer = None
        self._running.clear()


def _second_gradient(group: FlatGroup, name: str | None = None) -> str:
    """Returns the error message for a parameter that gets another gradient after its reduction."""
    return (
        f"parameters under ZeRO must get one gradient in a backward, got a second one of {name or group.names[0]} after"
        " the first was reduced, as reentrant recomputation causes; use torch.utils.checkpoint with use_reentrant=False"
    )
