"""Wraps torch's PowerSGD hook with a memory by parameter, which can be saved in a checkpoint.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
(arXiv 1905.13727); ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. torch's batched variant is not
offered: it raises (torch 2.11 to 2.15), because it orthogonalises one matrix where a batch is required.

torch's hook keeps its errors and low-rank factors by the index of DDP's bucket. DDP rebuilds its buckets after the
first step of a run, also of a resumed one, so that the memory would be applied to other parameters. Here the memory is
split by parameter and reassembled whenever the parameters of a bucket change.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

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
