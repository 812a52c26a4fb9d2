"""Communication hooks that reduce DDP's buckets of gradients, and count the bytes sent.

The hooks for fp16, bf16, PowerSGD and post-local SGD use torch's (``torch.distributed.algorithms.ddp_comm_hooks``).
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
from dlo_plugins.compression.compressed_all_reduce import all_reduce_bytes
from dlo_plugins.compression.one_bit import OneBitOptimizer
from dlo_plugins.compression.powersgd import PowerSGD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

#: Result of a hook: a future of the bucket's reduced gradients.
Reduced = Any


class GradientHook:
    """Hook that reduces buckets by a plain all-reduce; the base of the others.

    Attributes:
        ranks: Number of ranks.
        bytes_sent: Number of bytes that this rank has sent so far.
        plain_bytes: Number of bytes that plain all-reduces would have sent.
    """

    def __init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.bytes_sent = self.plain_bytes = 0.0

    def register(self, model: DistributedDataParallel) -> None:
        """Registers the hook with DDP; once per model."""
        # torch checks a hook's annotations, and accepts a hook without any.
        model.register_comm_hook(None, lambda state, bucket: self._counted(bucket))

    def count(self, nbytes: float) -> None:
        """Counts a plain all-reduce of this number of bytes, in addition to those of gradients."""
        self.bytes_sent += all_reduce_bytes(nbytes, self.ranks)

    def _counted(self, bucket: GradBucket) -> Reduced:
        whole = all_reduce_bytes(bucket.buffer().nbytes, self.ranks)
        self.plain_bytes += whole
        self.bytes_sent += whole * self.share(bucket)
        return self.reduce(bucket)

    def share(self, bucket: GradBucket) -> float:
        """Returns the fraction of a plain all-reduce's bytes that the hook sends for a bucket."""
        return 1.0

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Reduces a bucket to the mean over the ranks."""
        return default_hooks.allreduce_hook(_WORLD, bucket)


class HalfHook(GradientHook):
    """Hook that sends gradients in half precision.

    Args:
        dtype: Half-precision dtype, float16 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def share(self, bucket: GradBucket) -> float:
        """Returns the ratio of the dtypes' sizes, one half of single precision."""
        return self.dtype.itemsize / bucket.buffer().element_size()

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Converts to half precision, reduces and converts back."""
        if self.dtype == torch.float16:
            return default_hooks.fp16_compress_hook(_WORLD, bucket)
        return default_hooks.bf16_compress_hook(_WORLD, bucket)


class PowerSGDHook(GradientHook):
    """Hook that sends matrices as two low-rank factors.

    Args:
        powersgd: PowerSGD that compresses the buckets.
        step: Function that returns the number of steps taken.
        device: Device of the gradients.
    """

    def __init__(self, powersgd: PowerSGD, step: Callable[[], int], device: torch.device) -> None:
        super().__init__()
        self.powersgd, self.step = powersgd, step
        # torch (2.11 to 2.15) sends the second and third message of a bucket from the thread that received the one
        # before. gloo matches messages by order, so that two concurrent buckets would mix theirs.
        self.one_at_a_time = backend_of(None, device) != "nccl"

    def share(self, bucket: GradBucket) -> float:
        """Returns the fraction of the bucket's elements that the factors have."""
        return self.powersgd.share(bucket, self.step())

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Compresses, reduces and decompresses a bucket."""
        reduced = self.powersgd(bucket, self.step())
        if self.one_at_a_time:
            reduced.wait()
        return reduced


class OneBitHook(GradientHook):
    """Hook that averages gradients in the optimizer's first stage, and leaves them local in the second.

    Args:
        optimizer: Optimizer, which averages its momenta itself in the second stage.
    """

    def __init__(self, optimizer: OneBitOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def share(self, bucket: GradBucket) -> float:
        """Returns 1 if gradients are averaged, else 0."""
        return 1.0 if self.optimizer.takes_mean_gradients else 0.0

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Averages a bucket, or returns it unchanged."""
        return super().reduce(bucket) if self.optimizer.takes_mean_gradients else _done(bucket.buffer())


class PostLocalHook(GradientHook):
    """Hook that averages gradients over all ranks first, and later over the ranks of a node or not at all.

    Args:
        start_step: Number of steps that average over all ranks.
        step: Function that returns the number of steps taken.
        node_group: Group that averages after them; None for no averaging.
    """

    def __init__(self, start_step: int, step: Callable[[], int], node_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.start_step, self.step, self.node_group = start_step, step, node_group
        self.state = post_localSGD_hook.PostLocalSGDState(None, node_group, start_step, node_group is not None)

    @property
    def local(self) -> bool:
        """Whether gradients are no longer averaged over all ranks."""
        return self.step() >= self.start_step

    def is_averaged(self, steps: int, period: int) -> bool:
        """Returns whether weights are averaged after this number of steps."""
        return steps > self.start_step and (steps - self.start_step) % period == 0

    def share(self, bucket: GradBucket) -> float:
        """Returns the fraction that the node's ranks send, 0 without a group."""
        if not self.local:
            return 1.0
        size = 1 if self.node_group is None else self.node_group.size()
        return all_reduce_bytes(1, size) / all_reduce_bytes(1, self.ranks)

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Averages a bucket over all ranks, over a node's, or not at all."""
        # Set to the run's count, because torch's restarts with a resumed run.
        self.state.iter = self.step()
        return post_localSGD_hook.post_localSGD_hook(self.state, bucket)


def average_tensors(tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Replaces tensors by their mean over the ranks, in one all-reduce per device and dtype.

    Args:
        tensors: Tensors, which need not be on ``device``, such as Adam's step counts.
        device: Device whose tensors the ranks can all-reduce.
        group: Group of the ranks; None for all.
    """
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in by_type.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike]).to(device)
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = flat.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(alike, [part.view_as(tensor) for part, tensor in zip(parts, alike, strict=True)])


_WORLD: Any = None  # torch's hooks take None for all ranks.


def _done(tensor: Tensor) -> Reduced:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
