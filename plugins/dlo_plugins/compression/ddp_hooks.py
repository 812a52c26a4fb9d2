"""Communication hooks that reduce DDP's buckets of gradients, and count the bytes sent.

The hooks for fp16, bf16, PowerSGD and post-local SGD use torch's (``torch.distributed.algorithms.ddp_comm_hooks``).
Post-local SGD: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", 2018 (arXiv 1808.07217).

PowerSGD: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
2019 (arXiv 1905.13727). torch's batched variant is not offered: it raises (torch 2.11 to 2.15), because it
orthogonalises one matrix where a batch is required. torch's hook keeps its errors and low-rank factors by the index of
DDP's bucket. DDP rebuilds its buckets after the first step of a run, also of a resumed one, so that the memory would be
applied to other parameters. Here the memory is split by parameter, which a checkpoint can hold, and reassembled
whenever the parameters of a bucket change.

The error memory of compression differs on each rank, and is as large as the model. It is stored as sharded tensors, so
that each rank reads and writes its own memory only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.distributed.collectives import backend_of
from dlo_framework.optimizers import copy_all
from dlo_plugins.compression.compressed_all_reduce import all_reduce_bytes
from dlo_plugins.compression.one_bit import OneBitOptimizer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.shards import FlatShard
from dlo_plugins.compression.compressed_all_reduce import CompressedAllReduce

#: Names and shapes of a bucket's parameters, in order.
BucketLayout = list[tuple[str, torch.Size]]


class PowerSGD:
    """PowerSGD that reduces DDP's buckets.

    Args:
        names: Names of the parameters, by id.
        matrix_rank: Number of columns of the low-rank factors.
        start_step: Number of steps of plain all-reduce before compression begins, at least 2.

    Attributes:
        state: State of torch's hook.
        errors: Unsent part of each parameter's gradient, [numel], by name, for parameters whose bucket was split.
        factors: Right factor of each matrix, [columns, rank], by name, for parameters whose bucket was split.
    """

    def __init__(self, names: Mapping[int, str], matrix_rank: int, start_step: int) -> None:
        self.names = names
        self.state = torch_powersgd.PowerSGDState(None, matrix_rank, start_step)
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._layouts: dict[int, BucketLayout] = {}

    def __call__(self, bucket: GradBucket, step: int) -> Any:
        """Reduces a bucket.

        Args:
            bucket: Bucket of DDP.
            step: Number of steps taken before; torch's own count restarts with a resumed run.
        """
        self.state.iter = step
        layout = [(self.names[id(p)], p.shape) for p in bucket.parameters()]
        known = self._layouts.get(bucket.index())
        if known != layout:
            if known is not None:
                self._split_buckets()
            self._assemble_bucket(bucket.index(), layout, bucket.buffer())
        on_cpu = bucket.buffer().device.type == "cpu"
        hook = _hook_of_cpu() if on_cpu and torch.cuda.is_available() else torch_powersgd.powerSGD_hook
        return hook(self.state, bucket)

    def share(self, bucket: GradBucket, step: int) -> float:
        """Returns the fraction of a bucket's elements that is sent; 1 before compression begins."""
        elements = bucket.buffer().numel()
        if step < self.state.start_powerSGD_iter:
            return 1.0
        matrices = self._matrices([(self.names[id(p)], p.shape) for p in bucket.parameters()])
        saved = sum(rows * columns - (rows + columns) * rank for _, rows, columns, rank in matrices)
        return (elements - saved) / elements

    def by_parameter(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns copies of errors and factors by parameter name; see the attributes."""
        errors, factors = dict(self.errors), dict(self.factors)
        for index, layout in self._layouts.items():
            if index in self.state.error_dict:
                sizes = [shape.numel() for _, shape in layout]
                parts = self.state.error_dict[index].split(sizes)
                errors.update({name: part.clone() for (name, _), part in zip(layout, parts, strict=True)})
            if index in self.state.q_memory_dict:
                matrices = self._matrices(layout)
                parts = self.state.q_memory_dict[index].split([columns * rank for _, _, columns, rank in matrices])
                for (name, _, columns, rank), part in zip(matrices, parts, strict=True):
                    factors[name] = part.view(columns, rank).clone()
        return errors, factors

    def _split_buckets(self) -> None:
        """Moves the state of all buckets to :attr:`errors` and :attr:`factors`."""
        self.errors, self.factors = self.by_parameter()
        for kept in (self._layouts, self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            kept.clear()

    def _assemble_bucket(self, index: int, layout: BucketLayout, buffer: Tensor) -> None:
        """Assembles torch's state of a bucket from the errors and factors of its parameters."""
        self._layouts[index] = layout
        if any(name in self.errors for name, _ in layout):
            parts = [self.errors.pop(name, buffer.new_zeros(shape.numel())) for name, shape in layout]
            self.state.error_dict[index] = torch.cat([part.to(buffer) for part in parts])
        matrices = self._matrices(layout)
        if matrices and all(name in self.factors for name, *_ in matrices):
            factors = [self.factors.pop(name) for name, *_ in matrices]
            self.state.q_memory_dict[index] = torch.cat([factor.to(buffer).view(-1) for factor in factors])
            self.state.p_memory_dict[index] = buffer.new_empty(sum(rows * rank for _, rows, _, rank in matrices))

    def _matrices(self, layout: BucketLayout) -> list[tuple[str, int, int, int]]:
        """Returns name, rows, columns and rank of a bucket's matrices that are compressed, in the order of factors.

        torch (2.11 to 2.15) groups matrices of one shape, in the order in which shapes occur.
        """
        by_shape: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
        for name, shape in layout:
            rows, columns = shape[0], shape[1:].numel()
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if (rows + columns) * rank * self.state.min_compression_rate < rows * columns:
                by_shape.setdefault((rows, columns), []).append((name, rows, columns, rank))
        return [matrix for matrices in by_shape.values() for matrix in matrices]


class _WithoutCuda:
    """The module ``torch`` of a machine without a CUDA device."""

    cuda = SimpleNamespace(is_available=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def _hook_of_cpu() -> Any:
    """Returns torch's hook for buckets in CPU memory on a machine with a CUDA device.

    torch's own (2.11 to 2.15) waits for the bucket's device wherever the machine has a CUDA device, and raises if that
    is the CPU. This is the same function, for which there is none.
    """
    hook: Any = torch_powersgd.powerSGD_hook
    known = {**vars(torch_powersgd), "torch": _WithoutCuda()}
    return FunctionType(hook.__code__, known, hook.__name__, hook.__defaults__, hook.__closure__)


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
        is_fp16 = self.dtype == torch.float16
        return (default_hooks.fp16_compress_hook if is_fp16 else default_hooks.bf16_compress_hook)(_WORLD, bucket)


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
        if self.optimizer.takes_mean_gradients:
            return super().reduce(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


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
        copy_all(alike, [part.view_as(tensor) for part, tensor in zip(parts, alike, strict=True)])


_WORLD: Any = None  # torch's hooks take None for all ranks.


#: Key of the memory in a checkpoint.
KEY = "gradient_compression"


def row_of_rank(own: Tensor) -> FlatShard:
    """Returns a rank's 1-D tensor [n] as its row of one [ranks, n]."""
    return FlatShard(own, torch.Size((dist.get_world_size(), own.numel())), dist.get_rank() * own.numel())


def chunk_of_rank(own: Tensor) -> FlatShard:
    """Returns a rank's 1-D tensor [n] as its chunk of one [ranks * n]."""
    return FlatShard(own, torch.Size((dist.get_world_size() * own.numel(),)), dist.get_rank() * own.numel())


def one_bit_state(all_reduce: CompressedAllReduce, optimizer: OneBitOptimizer) -> dict[str, Any]:
    """Returns the errors of a compressed all-reduce and the rank's local momenta, for a checkpoint."""
    layout = all_reduce.layout
    assert layout is not None
    return {
        "method": "one_bit",
        "ranks": layout.ranks,
        "block": layout.block,
        "sizes": list(layout.sizes),
        "errors": {
            "worker": row_of_rank(all_reduce.worker_error),
            "server": chunk_of_rank(all_reduce.server_error),
            "momentum": row_of_rank(torch.cat([own.reshape(-1) for own in optimizer.own_momenta()])),
        },
    }


def restore_one_bit(all_reduce: CompressedAllReduce, optimizer: OneBitOptimizer, saved: Mapping[str, Any]) -> str:
    """Restores the state that :func:`one_bit_state` returned.

    Returns:
        Reason why it cannot be restored; empty where it was.
    """
    momenta = optimizer.momenta()
    sizes = [momentum.numel() for momentum in momenta]
    problem = _mismatch(saved, method="one_bit", ranks=all_reduce.size, block=all_reduce.block, sizes=sizes)
    if problem or not optimizer.compressing:
        return problem or f"freeze_step={optimizer.freeze_step} is not reached"
    all_reduce.prepare(momenta)
    errors = as_lazy_state_dict(saved["errors"])
    errors.read_into("worker", row_of_rank(all_reduce.worker_error))
    errors.read_into("server", chunk_of_rank(all_reduce.server_error))
    own = optimizer.own_momenta()
    flat = torch.empty(sum(sizes), dtype=own[0].dtype)
    errors.read_into("momentum", row_of_rank(flat))
    for momentum, part in zip(own, flat.split(sizes), strict=True):
        momentum.copy_(part.view_as(momentum))
    return ""


def powersgd_state(powersgd: PowerSGD) -> dict[str, Any]:
    """Returns PowerSGD's errors and factors, for a checkpoint."""
    errors, factors = powersgd.by_parameter()
    return {
        "method": "powersgd",
        "ranks": dist.get_world_size(),
        "matrix_rank": powersgd.state.matrix_approximation_rank,
        "errors": {f"error.{name}": row_of_rank(error) for name, error in errors.items()},
        # Factors are the same on all ranks.
        "factors": {f"factor.{name}": factor for name, factor in factors.items()},
    }


def restore_powersgd(powersgd: PowerSGD, saved: Mapping[str, Any]) -> str:
    """Restores the state that :func:`powersgd_state` returned.

    Returns:
        Reason why it cannot be restored; empty where it was.
    """
    rank = powersgd.state.matrix_approximation_rank
    problem = _mismatch(saved, method="powersgd", ranks=dist.get_world_size(), matrix_rank=rank)
    if problem:
        return problem
    errors = as_lazy_state_dict(saved["errors"])
    for key in errors:
        ranks, elements = errors.shape(key)
        assert ranks == dist.get_world_size()
        own = torch.empty(elements, dtype=errors.dtype(key))
        errors.read_into(key, row_of_rank(own))
        powersgd.errors[key.removeprefix("error.")] = own
    for key, factor in saved["factors"].items():
        powersgd.factors[key.removeprefix("factor.")] = factor
    return ""


def _mismatch(saved: Mapping[str, Any], **wanted: Any) -> str:
    """Returns the setting in which a checkpoint differs, as text; empty where there is none."""
    for key, value in wanted.items():
        if saved.get(key) != value:
            return "it has other parameters" if key == "sizes" else f"{key} was {saved.get(key)} and is {value}"
    return ""
