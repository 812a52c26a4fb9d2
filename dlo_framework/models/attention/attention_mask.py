"""Mask of a model's attention: a sparsity pattern bound to the model's direction and heads.

Shapes: h layouts (1 where all heads have the same, or the number of local heads), N blocks of b positions, L positions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dlo_framework.batches import tree_leaves
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import unset_fake_temporarily
from dlo_framework.models.attention.sparsity_patterns import SparsityPattern

#: Attribute in which an attention module keeps its mask, and the one for the heads of it that this rank has.
_MASK, _HEADS = "_dlo_attention_mask", "_dlo_local_heads"
#: Largest number of elements of cached tables of one mask; others are made again for each call.
_CACHED = 2**28
_T = TypeVar("_T")


class LocalHeads(NamedTuple):
    """Consecutive heads of queries on this rank.

    Attributes:
        first: First head, counted in the full model.
        number: Number of heads.
    """

    first: int
    number: int


class BlockRows(NamedTuple):
    """Block rows that see about the same number of key blocks, padded to one number C.

    Attributes:
        rows: Numbers of the rows, int64 `[R]`.
        columns: Key blocks of each row, int64 `[h, R, C]`; 0 where unused.
        seen: Mask of positions, bool `[h, R, b, C * b]`.
    """

    rows: Tensor
    columns: Tensor
    seen: Tensor


@dataclass(frozen=True)
class BlockTable:
    """Block rows of a mask for one length, on one device.

    Attributes:
        groups: Groups of rows.
        order: Positions of all rows in the concatenated groups, int64 `[N]`.
    """

    groups: tuple[BlockRows, ...]
    order: Tensor


class AttentionMask:
    """A pattern for the attention of a model.

    Args:
        pattern: Sparsity pattern.
        causal: Whether the model is causal.
        num_heads: Number of heads of queries of the full model.
        longest: Number of positions whose layout shorter sequences take the first blocks of, so that a generated text
            has the pattern of the training's windows; None for a layout of each length.

    Raises:
        DloError: If the pattern contradicts the model's direction.
    """

    def __init__(self, pattern: SparsityPattern, *, causal: bool, num_heads: int, longest: int | None = None) -> None:
        if pattern.prefix and not causal:
            raise DloError(
                "attention.mask must be for both directions in a model that is not causal, got Prefix; remove it"
            )
        self.pattern, self.causal, self.num_heads = pattern.directed(causal), causal, num_heads
        self.longest = longest
        self._cache: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionMask:
        return self  # A copy of the model has the same mask.

    def __reduce__(self) -> tuple[Any, ...]:
        options: dict[str, Any] = {"causal": self.causal, "num_heads": self.num_heads, "longest": self.longest}
        return functools.partial(AttentionMask, **options), (self.pattern,)

    def blocks(self, length: int) -> int:
        """Returns the number of blocks of a sequence, N."""
        return -(-length // self.pattern.block)

    def layout(self, length: int, heads: LocalHeads | None = None) -> Tensor:
        """Returns the visible blocks, bool `[h, N, N]` on the CPU; without blocks after the query's in a causal model.

        Args:
            length: Number of positions.
            heads: Heads of this rank; None for all.

        Raises:
            DloError: If the pattern's layout has another shape, or a block does not see itself.
        """
        heads = heads or LocalHeads(0, self.num_heads)
        return self.cached(("layout", self.blocks(length), heads), lambda: self._make_layout(length, heads))

    def _make_layout(self, length: int, heads: LocalHeads) -> Tensor:
        if self.longest is not None and length < self.longest:
            count = self.blocks(length)
            layout = self.layout(self.longest, heads)[:, :count, :count]
            return layout[:1].clone() if bool((layout == layout[:1]).all()) else layout.clone()
        count, kind = self.blocks(length), type(self.pattern).__name__
        layout = self.pattern.layout(self.num_heads, count).bool()
        if tuple(layout.shape) != (self.num_heads, count, count):
            raise DloError(
                f"layout() of {kind} must be [heads, blocks, blocks] = {[self.num_heads, count, count]}, got"
                f" {list(layout.shape)}; return one layout per head"
            )
        if self.causal:
            seen = torch.ones(count, count, dtype=torch.bool).tril()
            seen[:, : -(-self.pattern.prefix // self.pattern.block)] = True
            layout = layout & seen
        if not layout.diagonal(dim1=1, dim2=2).all():
            raise DloError(
                f"layout() of {kind} must be true on its diagonal, so that each position sees itself, got false;"
                " add torch.eye(num_blocks, dtype=torch.bool)"
            )
        if bool((layout == layout[:1]).all()):
            return layout[:1].clone()
        return layout[heads.first : heads.first + heads.number].clone()

    def visible(self, query: Tensor, key: Tensor, heads: LocalHeads | None = None, length: int | None = None) -> Tensor:
        """Returns which keys queries see, bool `[h, q, k]`.

        Args:
            query: Positions of queries, int64 `[q]`.
            key: Positions of keys, int64 `[k]`.
            heads: Heads of this rank; None for all.
            length: Number of positions of the full sequence; by default up to the last key.
        """
        length = int(key.max()) + 1 if length is None else length
        layout = self.layout(length, heads).to(query.device)
        size = self.pattern.block
        in_layout = layout[:, query // size][:, :, key // size]
        return in_layout & self._rules(query[:, None], key[None])

    def _rules(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns which positions see each other inside visible blocks, of a shape that broadcasts to both."""
        visible = torch.ones((), dtype=torch.bool, device=query.device)
        if self.causal:
            visible = key <= query
            if self.pattern.prefix:
                visible = visible | (key < self.pattern.prefix)
        inside = self.pattern.visible(query, key)
        return visible if inside is None else visible & inside

    def density(self, length: int) -> float:
        """Returns the fraction of all pairs of blocks that are visible."""
        return float(self.layout(length).float().mean())

    # --- tables of the block kernel --------------------------------------------------------------------------

    def table(self, length: int, heads: LocalHeads | None, device: torch.device) -> BlockTable:
        """Returns the block rows for :func:`~dlo_framework.models.attention.masked_attention.attend_blocks`.

        Args:
            length: Number of positions.
            heads: Heads of this rank; None for all.
            device: Device of the tables.
        """
        return self.cached(("table", length, heads, device), lambda: self._make_table(length, heads, device))

    def _make_table(self, length: int, heads: LocalHeads | None, device: torch.device) -> BlockTable:
        layout, size = self.layout(length, heads), self.pattern.block
        counts = layout.sum(-1).amax(0).tolist()
        # Rows of up to twice the least number of blocks of a group share it: few groups, and little padding.
        groups: list[list[int]] = []
        least = 0
        for row in sorted(range(len(counts)), key=counts.__getitem__):
            if not groups or counts[row] > max(2 * least, 4):
                groups.append([])
                least = counts[row]
            groups[-1].append(row)
        rows_of, block_rows = [], []
        for group in groups:
            rows = torch.tensor(sorted(group))
            most = max(counts[row] for row in group)
            seen = layout[:, rows]  # [h, R, N]
            order = seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
            used = seen.gather(-1, order)
            columns = order.where(used, 0)
            inside = torch.arange(size)
            query = (rows[:, None] * size + inside)[None, :, :, None]  # [1, R, b, 1]
            key = (columns[..., None] * size + inside).flatten(2)[:, :, None]  # [h, R, 1, C * b]
            mask = self._rules(query, key) & used.repeat_interleave(size, -1)[:, :, None] & (key < length)
            mask = (mask | (query >= length)).expand(len(layout), len(rows), size, -1)  # padding: any key will do
            block_rows.append(BlockRows(rows.to(device), columns.to(device), mask.contiguous().to(device)))
            rows_of.append(rows)
        return BlockTable(tuple(block_rows), torch.cat(rows_of).argsort().to(device))

    def cached(self, key: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """Returns what a function makes: tensors that depend on the mask and the key only; the oldest are dropped.

        Args:
            key: Name of the tensors, and what they depend on.
            make: Function that makes them, called without fake tensors.
        """
        with self._lock:
            if key in self._cache:
                return self._cache[key][1]
        with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
            cached = make()
        groups = cached.groups if isinstance(cached, BlockTable) else ()
        tensors = [group.seen for group in groups] or [one for one in tree_leaves(cached) if isinstance(one, Tensor)]
        elements = sum(tensor.numel() for tensor in tensors)
        with self._lock:
            while self._cache and elements + sum(size for size, _ in self._cache.values()) > _CACHED:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = (elements, cached)
        return cached


def bind_mask(module: nn.Module, mask: AttentionMask) -> None:
    """Attaches a mask to an attention module, for kernels, context parallelism and tensor parallelism."""
    module.__dict__[_MASK] = mask


def find_mask(module: nn.Module) -> AttentionMask | None:
    """Returns the mask of an attention module; None without one."""
    return module.__dict__.get(_MASK)


def bind_heads(attention: nn.Module, heads: LocalHeads) -> None:
    """Records the heads of queries that this rank has, for masks with a layout per head.

    Args:
        attention: Attention module, or one with such a module inside.
        heads: Heads of this rank.
    """
    for module in attention.modules():
        module.__dict__[_HEADS] = heads


def find_heads(module: nn.Module) -> LocalHeads | None:
    """Returns the heads of an attention module that this rank has; None for all."""
    return module.__dict__.get(_HEADS)
