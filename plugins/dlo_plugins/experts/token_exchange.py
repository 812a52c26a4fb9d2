"""Exchanges tokens between the ranks of `ep`: to the ranks with their experts, and back.

Shapes: T tokens of this rank, k experts of a token, E experts, S = rows that this rank sends (k T, without skipped
ones), R = rows that it gets, D features.

Gradients: each rank's loss is that of its own tokens, and a strategy averages gradients over all data ranks. The
gradient of an expert sums over the tokens of all ranks of `ep`, and is averaged only over the ranks that have the same
expert: the mean would be too large by the size of `ep`. So the gradient of the experts' outputs is divided by that
size, and the gradient of their inputs is multiplied by it again. Both are exact where the size is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.fake_kernels import FakeTensor

#: Function that computes rows `[R, D]` with this rank's experts, whose numbers are `[R]`.
Compute = Callable[[Tensor, Tensor], Tensor]


class TokenExchange:
    """All-to-all of tokens over `ep`, with a count of the elements that leave this rank.

    Args:
        group: Process group of `ep`.
        experts: Number of experts of all ranks, a multiple of the group's size. Each rank has consecutive ones.

    Attributes:
        size: Number of ranks.
        sent: Number of elements that this rank has sent to others so far, in forward and backward.
        sent_bytes: Bytes of these elements.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = self.sent_bytes = 0
        assert experts % self.size == 0

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.size

    def __call__(self, tokens: Tensor, index: Tensor, compute: Compute, dtype: torch.dtype | None = None) -> Tensor:
        """Computes tokens with their experts, wherever these are.

        Args:
            tokens: Tokens `[T, D]`.
            index: Experts of each token `[T, k]`; for a number outside of the experts, the result is zero.
            compute: Function of this rank's experts.
            dtype: Dtype in which tokens are sent; None for their own. Outputs are sent in the dtype of `compute`, and
                gradients in that of forward. The gradients of a token's k copies are summed in the token's dtype.

        Returns:
            Outputs `[T, k, D]`, in the order of `index`.
        """
        count, choices = tokens.shape[0], index.shape[-1]
        flat = index.reshape(-1)
        order, counts = self._sort(flat)
        sent, received, per_expert = self._agree(counts, len(flat))
        order = order[: sum(sent)]
        rows = _TakeRows.apply(tokens, order, choices, dtype or tokens.dtype, float(self.size))  # [S, D], by expert
        rows = _AllToAll.apply(rows, self, sent, received, 1.0)  # [R, D], by source and expert
        owned = self._expert_numbers(per_expert, sum(received), flat)
        out = _AllToAll.apply(compute(rows, owned), self, received, sent, 1.0 / self.size)  # [S, D]
        placed = _PlaceRows.apply(out, order, count * choices)
        return placed.view(count, choices, -1)

    def _sort(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of all choices by expert, skipped ones last `[T * k]`, and the experts' counts."""
        if has_no_values(flat):  # Balanced: each expert gets the same number.
            return flat.new_empty(len(flat), dtype=torch.long), flat.new_empty(self.experts, dtype=torch.long)
        routed = (flat >= 0) & (flat < self.experts)
        keys = torch.where(routed, flat, self.experts)
        counts = torch.bincount(keys, minlength=self.experts + 1)
        return torch.sort(keys, stable=True).indices, counts[: self.experts]

    def _agree(self, counts: Tensor, rows: int) -> tuple[list[int], list[int], Tensor]:
        """Returns the rows to each rank, those from each rank, and those from each rank for each expert `[ep, e]`."""
        if has_no_values(counts):
            even = [rows // self.size + (rank < rows % self.size) for rank in range(self.size)]
            return even, even, counts.view(self.size, self.local)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts.contiguous(), group=self.group)
        both = torch.stack([counts, theirs]).view(2, self.size, self.local)
        sent, received = both.sum(-1).tolist()  # The one wait for the device.
        return sent, received, both[1]

    def _expert_numbers(self, per_expert: Tensor, rows: int, like: Tensor) -> Tensor:
        """Returns the number of each received row's expert among this rank's own `[R]`."""
        if has_no_values(per_expert):
            return like.new_zeros(rows)
        numbers = torch.arange(self.local, device=like.device, dtype=like.dtype).repeat(self.size)
        return numbers.repeat_interleave(per_expert.flatten(), output_size=rows)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends rows to each rank, and returns those that this rank gets."""
        elements = (sum(sent) - sent[self.rank]) * rows.shape[1:].numel()
        self.sent += elements
        self.sent_bytes += elements * rows.element_size()
        out, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        dist.all_to_all_single(out, rows, list(received), list(sent), group=self.group)
        return out


def has_no_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape alone, as in a rehearsal."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class _AllToAll(torch.autograd.Function):
    """All-to-all whose backward sends gradients back, multiplied by a factor."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ranks: TokenExchange, sent: Sequence[int], received: Sequence[int], factor: float
    ) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received, ctx.factor = ranks, sent, received, factor
        return ranks.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        found = ctx.ranks.exchange(gradient, ctx.received, ctx.sent)
        return found if ctx.factor == 1 else found * ctx.factor, None, None, None, None


class _TakeRows(torch.autograd.Function):
    """Copies of tokens, in a dtype, in the order of their places among the choices `[T * k]`.

    Backward sums without atomics, in the tokens' dtype, and multiplies the sum by a factor.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, choices: int, dtype: torch.dtype, factor: float) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape, ctx.choices, ctx.dtype, ctx.factor = tokens.shape, choices, tokens.dtype, factor
        return tokens.to(dtype)[order // choices]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (order,) = ctx.saved_tensors
        count, features = ctx.shape
        full = gradient.new_zeros(count * ctx.choices, features, dtype=ctx.dtype)
        full.index_copy_(0, order, gradient.to(ctx.dtype))
        return full.view(count, ctx.choices, features).sum(1) * ctx.factor, None, None, None, None


class _PlaceRows(torch.autograd.Function):
    """Rows at their places among all choices, with zeros at the others."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(order)
        return rows.new_zeros(places, rows.shape[-1]).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None
