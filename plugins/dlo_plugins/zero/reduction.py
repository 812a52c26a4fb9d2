"""Gradients on their way to their owners, during backward: the reduce-scatter of ZeRO, bucket by bucket.

Autograd calls Python once a bucket, when the gradient of the bucket's last parameter has come, and not once a
parameter. Which parameter that is, is found out: a hook that meets parameters without a gradient moves to those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.distributed.unused import check_announced, unused_message
from dlo_framework.errors import DloError
from dlo_plugins.copy_streams import Copied
from dlo_plugins.zero.group import FlatGroup

#: Reductions under way at once; each holds a buffer of a bucket's size.
IN_FLIGHT = 2


@dataclass
class Reduction:
    """A flat group's gradients on their way to their owners, in one backward.

    Attributes:
        buffer: the ranks' gradients, flat; None until all have come.
        pending: the collective, once it has started.
        complete: whether all gradients of this backward have come.
        launched: whether the collective has been started in this backward.
        hooks: handles of the hooks on parameters, by the parameter's number.
        earlier: gradients that earlier micro-batches have left on the parameters, and their version counters: what
            this backward adds to a gradient raises its counter. None where there are none.
    """

    group: FlatGroup
    buffer: Tensor | None = None
    pending: Pending | None = None
    complete: bool = False
    launched: bool = False
    hooks: dict[int, RemovableHandle] = field(default_factory=dict)
    earlier: list[tuple[Tensor | None, int]] | None = None

    def missing(self) -> list[int]:
        """Returns the numbers of the parameters whose gradient has not come in this backward."""
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
        groups: in the order in which backward completes them, roughly; all ranks reduce in exactly this order.
        communicator: the ranks.
        find_unused: whether a parameter may go without a gradient; then groups without any are reduced like the others,
            and an all-reduce of a byte a parameter tells which those were.
        on_reduced: called with each group whose gradients have left their parameters.
    """

    def __init__(
        self,
        groups: list[FlatGroup],
        communicator: Communicator,
        find_unused: bool,
        on_reduced: Callable[[FlatGroup], None] | None = None,
    ) -> None:
        self.reductions = [Reduction(group) for group in groups]
        self.communicator, self.find_unused, self.on_reduced = communicator, find_unused, on_reduced
        self.used: set[str] = set()  # in this accumulation window, on any rank
        self.skipped: set[int] = set()  # ids of groups whose gradients are not wanted in this backward
        self._next = 0
        self._under_way: deque[Reduction] = deque()
        self._free: list[tuple[Tensor, Copied | None]] = []
        self.enabled = True
        self.announced = False  # whether the strategy has been told of the backward under way
        for reduction in self.reductions:
            # Backward comes to a group's parameters last first, or first first: one of the ends is last.
            self._watch(reduction, {0, len(reduction.group.parameters) - 1})

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for reduction in self.reductions:
            self._watch(reduction, ())

    def begin(self, *, accumulated: bool) -> None:
        """Begins a backward that reduces; drops what one that raised has left.

        Args:
            accumulated: whether gradients on the parameters are those of earlier micro-batches.
        """
        if self._under_way:
            self._drop_under_way()
        for reduction in self.reductions:
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
        """Has the hook run at these parameters of a group, and at no others."""
        for handle in reduction.hooks.values():
            handle.remove()

        def arrived(_: Tensor) -> None:
            check_announced(self.announced)
            if self.enabled:
                self._arrived(reduction)

        parameters = reduction.group.parameters
        reduction.hooks = {n: parameters[n].register_post_accumulate_grad_hook(arrived) for n in numbers}

    def _arrived(self, reduction: Reduction) -> None:
        """Reduces a group if its gradients are complete; otherwise waits for those that are missing."""
        if id(reduction.group) in self.skipped:
            for parameter in reduction.group.parameters:
                parameter.grad = None
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
        """Moves a group's gradients into a buffer, zeros where there are none, and starts the reduction."""
        group = reduction.group
        if len(self._under_way) >= IN_FLIGHT:
            self._finish_oldest()
        reduction.buffer = buffer = self._take_buffer(group)
        places, gaps = group.cut(buffer)
        written, gradients = [], []
        for parameter, place in zip(group.parameters, places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                gaps.append(place)
                continue
            if gradient.layout is not torch.strided:
                name = group.names[group.parameters.index(parameter)]
                raise DloError(f"ZeRO: the gradient of {name} is sparse; set sparse=False in its Embedding")
            parameter.grad = None
            written.append(place)
            gradients.append(gradient.detach() if gradient.requires_grad else gradient)
        if gaps:
            torch._foreach_zero_(gaps)
        if written:
            torch._foreach_copy_(written, gradients)
        reduction.launched = True
        reduction.pending = self.communicator.reduce_scatter(buffer, average=True)
        self._under_way.append(reduction)
        if self.on_reduced is not None:
            self.on_reduced(group)

    def _take_buffer(self, group: FlatGroup) -> Tensor:
        """Returns a buffer for a group's gradients."""
        length = group.partition.padded
        for number, (spare, copied) in enumerate(self._free):
            if spare.numel() == length and spare.dtype == group.reduced_dtype:
                if copied is not None:
                    copied.wait()
                del self._free[number]
                return spare
        return torch.empty(length, dtype=group.reduced_dtype, device=group.device)

    def _finish_oldest(self) -> None:
        reduction = self._under_way.popleft()
        assert reduction.pending is not None
        assert reduction.buffer is not None
        copied = reduction.group.take_gradient(reduction.pending.wait())
        if len(self._free) < IN_FLIGHT:
            self._free.append((reduction.buffer, copied))
        reduction.pending = reduction.buffer = None

    def finish(self, *, partial: bool) -> set[str]:
        """Ends a backward: reduces what is left, and returns the parameters that any rank used in it.

        What earlier micro-batches of the accumulation have left on parameters that this one did not use is reduced too.

        Args:
            partial: whether groups that got no gradient at all are none of this backward's business, as with
                several optimizers in manual optimization.

        Raises:
            DloError: if parameters went without a gradient, and ``find_unused`` is off.
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
        while self._under_way:
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

        It comes after all reductions, in which each rank takes part whatever it used: so all ranks do the same in the
        same order, also where one has a group's gradients amid backward and another only at its end.
        """
        if not names:
            return set()
        flags = [name in mine for name in names]
        bits = torch.tensor(flags, dtype=torch.uint8, device=self.reductions[0].group.device)
        agreed = self.communicator.maximum(bits).tolist()
        return {name for name, bit in zip(names, agreed, strict=True) if bit}

    def _drop_under_way(self) -> None:
        """Waits for the collectives of a backward that raised, and drops their results."""
        for reduction in self._under_way:
            assert reduction.pending is not None
            reduction.pending.wait()
            reduction.pending = reduction.buffer = None
        self._under_way.clear()


def _second_gradient(group: FlatGroup, name: str | None = None) -> str:
    """Returns what to say of a parameter whose gradient has been reduced, and that gets another."""
    return (
        f"ZeRO: {name or group.names[0]} got a second gradient in one backward, after the first was reduced: reentrant"
        " recomputation does that; use torch.utils.checkpoint with use_reentrant=False"
    )
