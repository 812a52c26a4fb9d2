"""PowerSGD as torch has it, with a memory that goes by parameters, so that it outlives a checkpoint.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
(arXiv 1905.13727); ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. Its batched sibling is not offered:
it cannot run (torch 2.11 to 2.15), for it orthogonalises a matrix where a batch of matrices is asked for.

torch's hook keeps its errors and low-rank factors by the number of DDP's bucket. DDP lays buckets out anew after the
first step of a run, a resumed one too, so that what was kept would meet other parameters. Here it is taken apart and
put together again whenever a bucket holds other parameters than it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

#: Of a bucket: names and shapes of its parameters, in order.
BucketLayout = list[tuple[str, torch.Size]]


class PowerSGD:
    """Reduces DDP's buckets.

    Args:
        names: of the parameters, by id.
        matrix_rank: columns of the low-rank factors.
        start_step: steps of plain all-reduce before, at least 2.

    Attributes:
        state: torch's.
        errors: what was not sent of each parameter's gradient, [numel], by name, where buckets have been taken apart.
        factors: each matrix's right factor, [columns, rank], likewise.
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
            bucket: DDP's.
            step: how many steps were taken before; torch's own count starts again with a resumed run.
        """
        self.state.iter = step
        layout = [(self.names[id(p)], p.shape) for p in bucket.parameters()]
        known = self._layouts.get(bucket.index())
        if known != layout:
            if known is not None:
                self._take_apart()
            self._put_together(bucket.index(), layout, bucket.buffer())
        return torch_powersgd.powerSGD_hook(self.state, bucket)

    def share(self, bucket: GradBucket, step: int) -> float:
        """Returns the part of a bucket's elements that is sent; 1 before compression begins."""
        elements = bucket.buffer().numel()
        if step < self.state.start_powerSGD_iter:
            return 1.0
        matrices = self._matrices([(self.names[id(p)], p.shape) for p in bucket.parameters()])
        saved = sum(rows * columns - (rows + columns) * rank for _, rows, columns, rank in matrices)
        return (elements - saved) / elements

    def by_parameter(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns errors and factors by parameter name, in new memory; see the attributes."""
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

    def _take_apart(self) -> None:
        """Moves what is kept by bucket to :attr:`errors` and :attr:`factors`."""
        self.errors, self.factors = self.by_parameter()
        for kept in (self._layouts, self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            kept.clear()

    def _put_together(self, index: int, layout: BucketLayout, buffer: Tensor) -> None:
        """Makes what torch keeps for a bucket out of what is known of its parameters."""
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

        As torch (2.11 to 2.15) has it: matrices of one shape stand together, in the order in which shapes occur.
        """
        by_shape: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
        for name, shape in layout:
            rows, columns = shape[0], shape[1:].numel()
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if (rows + columns) * rank * self.state.min_compression_rate < rows * columns:
                by_shape.setdefault((rows, columns), []).append((name, rows, columns, rank))
        return [matrix for matrices in by_shape.values() for matrix in matrices]
