"""The hooks that DDP calls with each bucket of gradients, and the bytes that they send.

Those for fp16, bf16, PowerSGD and post-local SGD are torch's (``torch.distributed.algorithms.ddp_comm_hooks``).
Post-local SGD: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", 2018 (arXiv 1808.07217).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.distributed.collectives import backend_of
from dlo_plugins.compression.all_reduce import all_reduce_bytes
from dlo_plugins.compression.one_bit import OneBitOptimizer
from dlo_plugins.compression.powersgd import PowerSGD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

#: What a hook gives back: the bucket's reduced gradients, once they are there.
Reduced = Any


class GradientHook:
    """What reduces a run's buckets.

    Attributes:
        ranks: how many there are.
        bytes_sent: what this rank has sent to others so far.
        plain_bytes: what it would have sent in plain all-reduces.
    """

    def __init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.bytes_sent = self.plain_bytes = 0.0

    def register(self, model: DistributedDataParallel) -> None:
        """Has DDP call this; once a model."""
        # torch looks at a hook's annotations, and takes none for right.
        model.register_comm_hook(None, lambda state, bucket: self._counted(bucket))

    def count(self, nbytes: float) -> None:
        """Counts a plain all-reduce of so many bytes, beside those of gradients."""
        self.bytes_sent += all_reduce_bytes(nbytes, self.ranks)

    def _counted(self, bucket: GradBucket) -> Reduced:
        whole = all_reduce_bytes(bucket.buffer().nbytes, self.ranks)
        self.plain_bytes += whole
        self.bytes_sent += whole * self.share(bucket)
        return self.reduce(bucket)

    def share(self, bucket: GradBucket) -> float:
        """Returns the part of a plain all-reduce's bytes that a bucket takes."""
        return 1.0

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Reduces a bucket to the mean over the ranks."""
        return default_hooks.allreduce_hook(_WORLD, bucket)


class HalfHook(GradientHook):
    """Gradients travel in half precision.

    Args:
        dtype: float16 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def share(self, bucket: GradBucket) -> float:
        """Half, of single precision."""
        return self.dtype.itemsize / bucket.buffer().element_size()

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Converts, reduces and converts back."""
        if self.dtype == torch.float16:
            return default_hooks.fp16_compress_hook(_WORLD, bucket)
        return default_hooks.bf16_compress_hook(_WORLD, bucket)


class PowerSGDHook(GradientHook):
    """Matrices travel as two low-rank factors.

    Args:
        powersgd: see there.
        step: returns how many steps were taken.
        device: of the gradients.
    """

    def __init__(self, powersgd: PowerSGD, step: Callable[[], int], device: torch.device) -> None:
        super().__init__()
        self.powersgd, self.step = powersgd, step
        # torch sends the second and third message of a bucket from the thread on which the one before has arrived
        # (2.11 to 2.15). gloo matches messages by their order, so that two buckets under way would mix theirs.
        self.one_at_a_time = backend_of(None, device) != "nccl"

    def share(self, bucket: GradBucket) -> float:
        """What the factors have of the matrices' elements."""
        return self.powersgd.share(bucket, self.step())

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Compresses, reduces and decompresses."""
        reduced = self.powersgd(bucket, self.step())
        if self.one_at_a_time:
            reduced.wait()
        return reduced


class OneBitHook(GradientHook):
    """Averages gradients while the optimizer wants that; else leaves them as each rank has them.

    Args:
        optimizer: averages its momenta itself in the second stage.
    """

    def __init__(self, optimizer: OneBitOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def share(self, bucket: GradBucket) -> float:
        """All or nothing."""
        return 1.0 if self.optimizer.takes_mean_gradients else 0.0

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Averages, or not."""
        return super().reduce(bucket) if self.optimizer.takes_mean_gradients else _done(bucket.buffer())


class PostLocalHook(GradientHook):
    """Averages gradients over all ranks for some steps, and then over the ranks of a node, if at all.

    Args:
        start_step: steps of the first kind.
        step: returns how many steps were taken.
        node_group: the ranks that go on averaging; None for none.
    """

    def __init__(self, start_step: int, step: Callable[[], int], node_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.start_step, self.step, self.node_group = start_step, step, node_group
        self.state = post_localSGD_hook.PostLocalSGDState(None, node_group, start_step, node_group is not None)

    @property
    def local(self) -> bool:
        """Whether gradients stay where they are."""
        return self.step() >= self.start_step

    def is_averaged(self, steps: int, period: int) -> bool:
        """Returns whether weights are averaged after so many steps."""
        return steps > self.start_step and (steps - self.start_step) % period == 0

    def share(self, bucket: GradBucket) -> float:
        """Nothing, or what a node's ranks send."""
        if not self.local:
            return 1.0
        size = 1 if self.node_group is None else self.node_group.size()
        return all_reduce_bytes(1, size) / all_reduce_bytes(1, self.ranks)

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Averages over all ranks, a node's, or none."""
        # The run's own count: torch's starts again with a resumed run.
        self.state.iter = self.step()
        return post_localSGD_hook.post_localSGD_hook(self.state, bucket)


def average_tensors(tensors: list[Tensor], device: torch.device) -> None:
    """Replaces tensors by their mean over the ranks, in one all-reduce a type.

    Args:
        tensors: also such as are not on ``device``, as Adam's count of steps.
        device: whose tensors the ranks can exchange.
    """
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in by_type.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group]).to(device)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([tensor.numel() for tensor in group])
        torch._foreach_copy_(group, [part.view_as(tensor) for part, tensor in zip(parts, group, strict=True)])


_WORLD: Any = None  # torch's hooks take None for all ranks.


def _done(tensor: Tensor) -> Reduced:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
