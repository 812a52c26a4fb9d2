"""Gradients of replicated parameters, averaged in backward bucket by bucket and handed over as soon as they are.

DistributedDataParallel keeps buckets for all gradients during the run. Here a bucket exists from its last gradient to
its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.gradient_check import unused_message
from dlo_framework.errors import DloError
from dlo_framework.strategy_contract import with_strides_of

#: Maximum bytes of a bucket, those of DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


class BackwardBuckets:
    """Averages gradients over the ranks in buckets, in the order of backward, which is the same on all ranks.

    Args:
        module: Module whose trainable parameters are equal on all ranks; its buffers are broadcast by :meth:`begin`.
        ready: Function of the parameters of a bucket, called when their gradients are averaged. It must drop them.
        size: Number of ranks.
        bucket_bytes: Maximum bytes of a bucket, unless one parameter has more.
    """

    def __init__(
        self,
        module: nn.Module,
        ready: Callable[[list[Tensor]], None],
        size: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._module, self._ready, self._size = module, ready, size
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in named}
        self.buckets = _fill_buckets([parameter for _, parameter in reversed(named)], bucket_bytes)
        self._missing = [len(bucket) for bucket in self.buckets]
        self._next = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._count(number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket
        ]

    def begin(self) -> None:
        """Prepares a backward: rank 0's buffers go to all ranks, as DistributedDataParallel does before a forward."""
        self._missing, self._next = [len(bucket) for bucket in self.buckets], 0
        for buffer in self._module.buffers() if self._size > 1 else ():
            broadcast_values(buffer)

    def finish(self) -> None:
        """Ends a backward.

        Raises:
            DloError: Parameters have no gradient.
        """
        absent = [self._names[id(p)] for bucket in self.buckets[self._next :] for p in bucket if p.grad is None]
        if self._next < len(self.buckets):
            raise DloError(unused_message(sorted(absent), "step at the end of backward"))

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _count(self, number: int) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            self._missing[number] -= 1
            while self._next < len(self.buckets) and self._missing[self._next] <= 0:
                self._average(self.buckets[self._next])
                self._next += 1

        return count

    @torch.no_grad()
    def _average(self, bucket: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        if self._size > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            for parameter in bucket:
                parameter.grad = None
            dist.all_reduce(flat.div_(self._size))
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = with_strides_of(parameter, part.view_as(parameter))
        self._ready(bucket)


def _fill_buckets(parameters: Iterable[Tensor], most: int) -> list[list[Tensor]]:
    """Returns parameters in buckets of one dtype, in order."""
    buckets: list[list[Tensor]] = []
    for parameter in parameters:
        last = buckets[-1] if buckets else []
        held = sum(one.nbytes for one in last)
        if last and last[0].dtype == parameter.dtype and held + parameter.nbytes <= most:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return buckets
