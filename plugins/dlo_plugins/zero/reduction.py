"""Gradients on their way to their owners, during backward: the reduce-scatter of ZeRO, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.distributed.unused import unused_message
from dlo_framework.errors import DloError
from dlo_plugins.zero.group import FlatGroup

#: Reductions under way at once; each holds a buffer of a bucket's size.
IN_FLIGHT = 2


@dataclass
class Reduction:
    """A flat group's gradients on their way to their owners, in one backward.

    Attributes:
        buffer: the ranks' gradients, flat; None until the first one comes.
        missing: parameters whose gradient has not come yet.
        pending: the collective, once it has started.
    """

    group: FlatGroup
    buffer: Tensor | None = None
    missing: set[int] = field(default_factory=set)
    pending: Pending | None = None

    @property
    def begun(self) -> bool:
        """Whether any gradient has come."""
        return len(self.missing) < len(self.group.parameters)


class GradientReducer:
    """Collects gradients as backward makes them, and reduces each group's when they are complete.

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
        self.reductions = [Reduction(group, missing=set(range(len(group.parameters)))) for group in groups]
        self.communicator, self.find_unused, self.on_reduced = communicator, find_unused, on_reduced
        self.used: set[str] = set()  # in this accumulation window, on any rank
        self.skipped: set[int] = set()  # ids of groups whose gradients are not wanted in this backward
        self._next = 0
        self._under_way: deque[Reduction] = deque()
        self._free: list[Tensor] = []
        self.enabled = True
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(reduction, number))
            for reduction in self.reductions
            for number, parameter in enumerate(reduction.group.parameters)
        ]

    def _hook(self, reduction: Reduction, number: int) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            if id(reduction.group) in self.skipped:
                parameter.grad = None
            elif self.enabled:
                self._collect(reduction, number, parameter)

        return collect

    @torch.no_grad()
    def _collect(self, reduction: Reduction, number: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise DloError(
                f"ZeRO: the gradient of {reduction.group.names[number]} is sparse; set sparse=False in its Embedding"
            )
        if reduction.pending is not None:
            raise DloError(
                f"ZeRO: {reduction.group.names[number]} got a second gradient in one backward, after the first was"
                " reduced: reentrant recomputation does that; use torch.utils.checkpoint with use_reentrant=False"
            )
        if reduction.buffer is None:
            reduction.buffer = self._take_buffer(reduction.group)
        place = reduction.group.views(reduction.buffer)[number]
        if number in reduction.missing:
            torch.mul(gradient, 1 / self.communicator.size, out=place)
            reduction.missing.discard(number)
        else:
            place.add_(gradient, alpha=1 / self.communicator.size)
        if not reduction.missing:
            self._launch_complete()

    def _take_buffer(self, group: FlatGroup) -> Tensor:
        """Returns a buffer for a group's gradients, its padding zero."""
        length = group.partition.padded
        for number, spare in enumerate(self._free):
            if spare.numel() == length and spare.dtype == group.dtype:
                buffer = self._free.pop(number)
                break
        else:
            buffer = torch.empty(length, dtype=group.dtype, device=group.device)
        for start, end in group.partition.gaps:
            buffer[start:end].zero_()
        return buffer

    def _launch_complete(self) -> None:
        """Starts the reductions that are complete and whose turn it is."""
        while self._next < len(self.reductions) and not self.reductions[self._next].missing:
            self._launch(self.reductions[self._next])
            self._next += 1

    def _launch(self, reduction: Reduction) -> None:
        assert reduction.buffer is not None
        if len(self._under_way) >= IN_FLIGHT:
            self._finish_oldest()
        reduction.pending = self.communicator.reduce_scatter(reduction.buffer)
        self._under_way.append(reduction)
        if self.on_reduced is not None:
            self.on_reduced(reduction.group)

    def _finish_oldest(self) -> None:
        reduction = self._under_way.popleft()
        assert reduction.pending is not None
        assert reduction.buffer is not None
        reduction.group.take_gradient(reduction.pending.wait())
        if len(self._free) < IN_FLIGHT:
            self._free.append(reduction.buffer)
        reduction.buffer = None

    def finish(self, *, partial: bool) -> set[str]:
        """Ends a backward: reduces what is left, and returns the parameters that any rank used in it.

        Args:
            partial: whether groups that got no gradient at all are none of this backward's business, as with
                several optimizers in manual optimization.

        Raises:
            DloError: if parameters went without a gradient, and ``find_unused`` is off.
        """
        wanted = [r for r in self.reductions if id(r.group) not in self.skipped]
        self._collect_earlier(wanted)
        if not self.find_unused:
            absent = [
                reduction.group.names[number]
                for reduction in wanted
                if reduction.begun or not partial
                for number in sorted(reduction.missing)
            ]
            if absent:
                raise DloError(unused_message(sorted(absent)))
            wanted = [r for r in wanted if r.begun]
        idle = [r.group for r in wanted if not r.begun and r.group.gradient is None]
        came = {name: number not in r.missing for r in wanted for number, name in enumerate(r.group.names)}
        for reduction in self.reductions[self._next :]:
            if not any(reduction is one for one in wanted):
                continue
            if reduction.buffer is None:
                reduction.buffer = self._take_buffer(reduction.group)
            places = reduction.group.views(reduction.buffer)
            for number in reduction.missing:
                places[number].zero_()
            self._launch(reduction)
        while self._under_way:
            self._finish_oldest()
        self._free.clear()
        self.communicator.release()
        for reduction in self.reductions:
            reduction.pending = None
            reduction.missing = set(range(len(reduction.group.parameters)))
        self._next = 0
        used = self._agree_on_used(came) if self.find_unused else set(came)
        for group in idle:
            if not used.intersection(group.names):
                group.drop_gradient()
        self.used |= used
        return used

    def _collect_earlier(self, reductions: list[Reduction]) -> None:
        """Collects what earlier micro-batches of the accumulation have left on parameters that this one did not use."""
        for reduction in reductions:
            for number in sorted(reduction.missing):
                parameter = reduction.group.parameters[number]
                if parameter.grad is not None:
                    self._collect(reduction, number, parameter)

    def _agree_on_used(self, came: dict[str, bool]) -> set[str]:
        """Returns the parameters that any rank used.

        It comes after all reductions, in which each rank takes part whatever it used: so all ranks do the same in the
        same order, also where one has a group's gradients amid backward and another only at its end.
        """
        if not came:
            return set()
        bits = torch.tensor(list(came.values()), dtype=torch.uint8, device=self.reductions[0].group.device)
        agreed = self.communicator.maximum(bits).tolist()
        return {name for name, bit in zip(came, agreed, strict=True) if bit}

    def forget(self) -> None:
        """Drops what a backward that raised has left."""
        for reduction in self._under_way:
            assert reduction.pending is not None
            reduction.pending.wait()
        self._under_way.clear()
        for reduction in self.reductions:
            reduction.pending = reduction.buffer = None
            reduction.missing = set(range(len(reduction.group.parameters)))
        self._next = 0
