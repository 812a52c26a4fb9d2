"""Sparsity patterns of attention: which blocks of keys each block of queries sees, per head, as data.

Fixed: Generating Long Sequences with Sparse Transformers. Child et al., 2019, arXiv 1904.10509. BSLongformer:
Longformer: The Long-Document Transformer. Beltagy et al., 2020, arXiv 2004.05150. BigBird: Big Bird: Transformers for
Longer Sequences. Zaheer et al., 2020, arXiv 2007.14062. Parameters and layouts are those of DeepSpeed's sparse
attention (0.16.5, `SparsityConfig`), which later versions of it no longer have. Departures: `block` is 64 by default,
BigBird's own, and not 16; `attention` follows the model by default; random blocks come from a seed, and a row with
fewer visible blocks than random ones takes them all.
"""

from __future__ import annotations

import copy
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dlo_framework.errors import DloError, check_number

Direction = Literal["unidirectional", "bidirectional"]


class SparsityPattern(ABC):
    """Pattern of visible blocks. Override :meth:`layout` for a pattern of your own.

    Args:
        block: Number of positions per block.
        different_layout_per_head: Whether each head has a layout of its own, where the pattern has several.
        attention: `unidirectional`, without keys after the query, or `bidirectional`; by default the model's own.

    Raises:
        DloError: If a value is out of range.
    """

    #: Number of first positions that all positions see, also under causal attention.
    prefix = 0
    #: Whether global blocks also see all blocks, of a pattern that has the option.
    horizontal_global_attention = False

    def __init__(
        self, block: int = 64, different_layout_per_head: bool = False, attention: Direction | None = None
    ) -> None:
        _check_least(1, block=block)
        if attention not in (None, "unidirectional", "bidirectional"):
            raise DloError(f"attention must be unidirectional or bidirectional, got {attention!r}; leave it out")
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.attention: Direction | None = attention

    @abstractmethod
    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns whether each block of queries sees each block of keys, bool `[num_heads, num_blocks, num_blocks]`.

        Each block must see itself. Blocks after the query's are ignored in a causal model.

        Args:
            num_heads: Number of heads of the full model.
            num_blocks: Number of blocks of the sequence; the last one may be partly filled.
        """

    def visible(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Returns which positions see each other inside visible blocks, bool; None for all.

        Args:
            query: Positions of queries, int64 `[..., q, 1]`.
            key: Positions of keys, int64 `[..., 1, k]`.
        """
        return None

    @property
    def is_dense(self) -> bool:
        """Whether every block sees every block."""
        return False

    @property
    def is_causal(self) -> bool:
        """Whether blocks see no later blocks."""
        return self.attention == "unidirectional"

    def directed(self, causal: bool) -> SparsityPattern:
        """Returns this pattern for a model of a direction.

        Args:
            causal: Whether the model is causal.

        Raises:
            DloError: If `attention` contradicts the model.
        """
        wanted: Direction = "unidirectional" if causal else "bidirectional"
        if self.attention == wanted:
            return self
        if causal and self.attention == "bidirectional":
            raise DloError(
                "attention of the mask must be unidirectional for a causal model, got bidirectional; leave it out"
            )
        pattern = copy.copy(self)
        pattern.attention = self.attention or wanted
        pattern._check_direction()
        return pattern

    def _check_direction(self) -> None:
        if self.horizontal_global_attention and self.attention == "unidirectional":
            raise DloError(
                "horizontal_global_attention must be false for unidirectional attention, got true: no block sees later"
                " ones; remove it"
            )

    def settings(self) -> dict[str, Any]:
        """Returns the arguments that build this pattern again, as plain data."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.settings().items())})"

    def _for_heads(self, num_heads: int, make: Callable[[int], Tensor]) -> Tensor:
        """Returns the layouts of all heads, by a function of a head's number; one for all unless they differ."""
        heads = num_heads if self.different_layout_per_head else 1
        return torch.stack([make(head) for head in range(heads)]).expand(num_heads, -1, -1)

    def _local(self, num_blocks: int, windows: Sequence[int]) -> Tensor:
        """Returns the layout of windows side by side, bool `[blocks, blocks]`; the last size repeats."""
        sizes, start = list(windows), 0
        layout = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
        while start < num_blocks:
            past = start + (sizes.pop(0) if len(sizes) > 1 else sizes[0])
            layout[start:past, start:past] = True
            start = past
        return layout.tril() if self.is_causal else layout

    def _set_globals(self, firsts: Sequence[int], ends: Sequence[int] | None) -> None:
        """Sets the global blocks of a pattern with the options `global_block_indices`, `global_block_end_indices`."""
        if any(first < 0 for first in firsts):
            raise DloError(f"global_block_indices must not be negative, got {list(firsts)}; count from 0")
        if ends is not None and len(firsts) != len(ends):
            raise DloError(
                f"global_block_end_indices must have {len(firsts)} entries, as global_block_indices, got {len(ends)};"
                " give each range its end"
            )
        self._ranges = list(zip(firsts, ends or [first + 1 for first in firsts], strict=True))
        for first, end in self._ranges:
            if first >= end:
                raise DloError(
                    f"global_block_end_indices must be above global_block_indices, got {end} for {first};"
                    " ends are exclusive"
                )
        self.global_block_indices = list(firsts)
        self.global_block_end_indices = None if ends is None else list(ends)

    def _columns(self, layout: Tensor, first: int, past: int, horizontal: bool) -> None:
        """Makes blocks visible to all blocks (from `first` on, in one direction), and sees all with `horizontal`."""
        layout[first if self.is_causal else 0 :, first:past] = True
        if horizontal:
            layout[first:past] = True


class DenseSparsity(SparsityPattern):
    """All blocks see all blocks; plain attention, for comparison.

    Args:
        block: Number of positions per block.
        attention: `unidirectional` or `bidirectional`; by default the model's own.
    """

    def __init__(self, block: int = 64, attention: Direction | None = None) -> None:
        super().__init__(block, False, attention)

    @property
    def is_dense(self) -> bool:
        """Whether every block sees every block."""
        return True

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns a layout of ones."""
        return torch.ones(num_heads, num_blocks, num_blocks, dtype=torch.bool)


class FixedSparsity(SparsityPattern):
    """Local windows side by side, whose last blocks are visible to all later ones (Child et al. 2019).

    Args:
        block: Number of positions per block.
        different_layout_per_head: Whether heads use different global blocks; see `num_different_global_patterns`.
        num_local_blocks: Number of blocks of a window.
        num_global_blocks: Number of consecutive blocks of a window that are global.
        attention: `unidirectional` or `bidirectional`; by default the model's own.
        horizontal_global_attention: Whether global blocks also see all blocks; bidirectional attention only.
        num_different_global_patterns: Number of different choices of the global blocks, which heads take in turn.
    """

    def __init__(
        self,
        block: int = 64,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: Direction | None = None,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(block, different_layout_per_head, attention)
        _check_least(1, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
        _check_least(1, num_different_global_patterns=num_different_global_patterns)
        if num_local_blocks % num_global_blocks:
            raise DloError(
                f"num_global_blocks must divide num_local_blocks={num_local_blocks}, got {num_global_blocks};"
                " 1 always does"
            )
        most = num_local_blocks // num_global_blocks if different_layout_per_head else 1
        if num_different_global_patterns > most:
            more = "" if different_layout_per_head else ", or set different_layout_per_head: true"
            raise DloError(
                f"num_different_global_patterns must be at most {most}, got {num_different_global_patterns};"
                f" set it to {most}{more}"
            )
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns
        self._check_direction()

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns the windows, and the global blocks of each."""
        local, size, count = self._local(num_blocks, [self.num_local_blocks]), self.num_local_blocks, num_blocks

        def make(head: int) -> Tensor:
            made = local.clone()
            offset = size - (1 + head % self.num_different_global_patterns) * self.num_global_blocks
            full = count - count % size
            starts = list(range(offset, full, size))
            if full < count:  # The last window is shorter.
                starts.append(max(0, min(full + offset, count - self.num_global_blocks)))
            for first in starts:
                self._columns(made, first, first + self.num_global_blocks, self.horizontal_global_attention)
            return made

        return self._for_heads(num_heads, make)


class VariableSparsity(SparsityPattern):
    """Fixed's windows in several sizes, chosen global blocks, and random blocks.

    Args:
        block: Number of positions per block.
        different_layout_per_head: Whether each head draws its own random blocks.
        num_random_blocks: Number of random blocks of each row.
        local_window_blocks: Numbers of blocks of the windows, from the first on; the last one repeats.
        global_block_indices: Global blocks, or the first block of each range of them.
        global_block_end_indices: End of each range, exclusive; by default ranges of one block.
        attention: `unidirectional` or `bidirectional`; by default the model's own.
        horizontal_global_attention: Whether global blocks also see all blocks; bidirectional attention only.
        seed: Seed of the random blocks.
    """

    def __init__(
        self,
        block: int = 64,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Direction | None = None,
        horizontal_global_attention: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(block, different_layout_per_head, attention)
        _check_least(0, num_random_blocks=num_random_blocks)
        _check_least(1, local_window_blocks=min(local_window_blocks, default=0))
        self._set_globals(global_block_indices, global_block_end_indices)
        self.num_random_blocks, self.local_window_blocks = num_random_blocks, list(local_window_blocks)
        self.horizontal_global_attention, self.seed = horizontal_global_attention, seed
        self._check_direction()

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns the windows, the global and the random blocks."""
        numbers, local = random.Random(self.seed), self._local(num_blocks, self.local_window_blocks)

        def make(head: int) -> Tensor:
            made = _random_blocks(num_blocks, self.num_random_blocks, numbers, causal=False) | local
            for first, past in self._ranges:
                self._columns(made, first, past, self.horizontal_global_attention)
            return made

        return self._for_heads(num_heads, make)


class BSLongformer(SparsityPattern):
    """Longformer in blocks: a sliding window and global blocks, which see and are seen by all (Beltagy et al. 2020).

    Args:
        block: Number of positions per block.
        num_sliding_window_blocks: Number of blocks of the window, half of them on each side.
        global_block_indices: Global blocks, or the first block of each range of them.
        global_block_end_indices: End of each range, exclusive; by default ranges of one block.
        attention: `unidirectional` or `bidirectional`; by default the model's own.
    """

    def __init__(
        self,
        block: int = 64,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Direction | None = None,
    ) -> None:
        super().__init__(block, False, attention)
        _check_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._set_globals(global_block_indices, global_block_end_indices)
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns the window and the global blocks."""
        layout = _band(num_blocks, self.num_sliding_window_blocks // 2)
        for first, past in self._ranges:
            self._columns(layout, first, past, horizontal=True)
        return (layout.tril() if self.is_causal else layout).expand(num_heads, -1, -1)


class BigBird(SparsityPattern):
    """Sliding window, random blocks and global blocks (Zaheer et al. 2020; its internal transformer construction).

    Args:
        block: Number of positions per block.
        different_layout_per_head: Whether each head draws its own random blocks.
        num_random_blocks: Number of random blocks of each row.
        num_sliding_window_blocks: Number of blocks of the window, half of them on each side.
        num_global_blocks: Number of first blocks that see and are seen by all.
        attention: `unidirectional` or `bidirectional`; by default the model's own.
        seed: Seed of the random blocks.
    """

    def __init__(
        self,
        block: int = 64,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: Direction | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(block, different_layout_per_head, attention)
        _check_least(0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
        _check_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self.num_random_blocks, self.num_sliding_window_blocks = num_random_blocks, num_sliding_window_blocks
        self.num_global_blocks, self.seed = num_global_blocks, seed

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns the window, the global and the random blocks."""
        numbers, band = random.Random(self.seed), _band(num_blocks, self.num_sliding_window_blocks // 2)

        def make(head: int) -> Tensor:
            made = band | _random_blocks(num_blocks, self.num_random_blocks, numbers, causal=self.is_causal)
            made[: self.num_global_blocks] = True
            made[:, : self.num_global_blocks] = True
            return made.tril() if self.is_causal else made

        return self._for_heads(num_heads, make)


class SlidingWindow(SparsityPattern):
    """Window of positions: each position sees itself and the nearest ones before it, and after it if bidirectional.

    Args:
        window: Number of positions that a position sees on one side, itself included.
        block: Number of positions per block, of the computation only.
        attention: `unidirectional` or `bidirectional`; by default the model's own.
    """

    def __init__(self, window: int, block: int = 64, attention: Direction | None = None) -> None:
        super().__init__(block, False, attention)
        _check_least(1, window=window)
        self.window = window

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns the blocks that the window touches."""
        layout = _band(num_blocks, -(-(self.window - 1) // self.block))
        return (layout.tril() if self.is_causal else layout).expand(num_heads, -1, -1)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns which positions are inside the window."""
        return (query - key).abs() < self.window


class Prefix(SparsityPattern):
    """Causal attention whose first positions see each other in both directions (prefix LM).

    Args:
        length: Number of positions of the prefix.
        block: Number of positions per block, of the computation only.
    """

    def __init__(self, length: int, block: int = 64) -> None:
        super().__init__(block)
        _check_least(1, length=length)
        self.length = self.prefix = length

    def layout(self, num_heads: int, num_blocks: int) -> Tensor:
        """Returns all blocks up to the query's, and those of the prefix."""
        layout = torch.ones(num_blocks, num_blocks, dtype=torch.bool).tril()
        layout[:, : -(-self.length // self.block)] = True
        return layout.expand(num_heads, -1, -1)


def pattern_from_settings(name: str, settings: dict[str, Any]) -> SparsityPattern:
    """Builds a pattern from its class's name and :meth:`SparsityPattern.settings`, as a checkpoint has them.

    Raises:
        DloError: If no imported class has the name.
    """
    known: dict[str, type[SparsityPattern]] = {}
    waiting: list[type[SparsityPattern]] = [SparsityPattern]
    while waiting:
        parent = waiting.pop()
        waiting += parent.__subclasses__()
        known[parent.__name__] = parent
    if name not in known:
        raise DloError(
            f"attention.mask must be an imported SparsityPattern, got {name}; import the file that defines it"
        )
    return known[name](**settings)


def _band(num_blocks: int, side: int) -> Tensor:
    """Returns a band of blocks around the diagonal, bool `[blocks, blocks]`."""
    numbers = torch.arange(num_blocks)
    return (numbers[:, None] - numbers).abs() <= side


def _random_blocks(num_blocks: int, count: int, numbers: random.Random, *, causal: bool) -> Tensor:
    """Returns a layout with a number of random blocks of each row, bool `[blocks, blocks]`."""
    layout = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    for row in range(num_blocks):
        choices = range(row + 1 if causal else num_blocks)
        layout[row, numbers.sample(choices, min(count, len(choices)))] = True
    return layout


def _check_least(least: int, **values: int) -> None:
    for name, value in values.items():
        check_number(name, value, f"at least {least}", f"set it to {least} or more")
