"""Lets ranks that share sequences run a block on some of the tokens: each computes an equal share of these.

Tokens go to the ranks that compute them and come back by all-to-alls (:mod:`dlo_plugins.curricula.token_routes`), whose
backwards are all-to-alls too. So a block's computation and activations shrink on all ranks alike, wherever the tokens
are. Inside the block, attention has the documents of the tokens alone, in backward too, where blocks may recompute.

Shapes: B rows, l positions of this rank, L of the full sequence, K chosen tokens, k of this rank, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from dlo_framework.batches import chosen_tokens
from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.context.gathered_modules import gather_full
from dlo_plugins.context.shared_sequence import SharedSequence
from dlo_plugins.curricula.block_handlers import check_hidden
from dlo_plugins.curricula.token_draws import TokenPicker, select_arguments
from dlo_plugins.curricula.token_routes import TokenLayout, TokenRoutes, find_routes
from dlo_plugins.tensor.sequence_parallel import ShardedSequence


@dataclass(frozen=True)
class BlockTokens:
    """Tokens of a block's call on this rank.

    Attributes:
        count: Tokens of a row, those that one process has.
        length: Positions of a row, with the padding of batches.
        takes_full: Whether the block gets all positions of a slice of `tp`, as at the start of a pipeline's stage.
        returns_full: Whether it returns all, as at the end of a stage.
    """

    count: int
    length: int
    takes_full: bool
    returns_full: bool


class _Plan(NamedTuple):
    """What is known of a block's tokens in a step: routes to the ranks and back, and how arguments are selected."""

    taken: TokenRoutes
    returned: TokenRoutes
    picker: TokenPicker


class ShardedTokens:
    """Ranks that share sequences by context parallelism, by sequence parallelism of `tp`, or by both.

    Args:
        sequence: Sequence that ranks of `cp` share; None without.
        stream: Sequence that ranks of `tp` share between their layers; None without.
        group: Ranks of both, `cp` before `tp`.
    """

    def __init__(
        self, sequence: SharedSequence | None, stream: ShardedSequence | None, group: dist.ProcessGroup | None
    ) -> None:
        self.sequence, self.stream = sequence, stream
        self.cp = 1 if sequence is None else sequence.ring.size
        self.tp = 1 if stream is None else stream.communicator.size
        self._all = Communicator(group)
        #: Ranks with other tokens where those of `tp` have all positions.
        self._chunks = None if sequence is None else Communicator(sequence.ring.group)
        #: Full arguments of a block, by this rank's shards, which all blocks of a forward get.
        self._full = WeakTensorKeyDictionary()
        self._plans: dict[tuple[str, BlockTokens], _Plan] = {}

    def tokens(self, hidden: Tensor, block: nn.Module) -> BlockTokens:
        """Returns the tokens of a block's call.

        Args:
            hidden: Hidden state, `[B, l, D]`.
            block: Block.
        """
        takes_full, returns_full = (True, True) if self.stream is None else self.stream.edges(block)
        if self.sequence is not None:
            documents = self.sequence.current
            assert documents is not None, "the strategy shards batches"
            count = documents.length if documents.tokens is None else documents.tokens
            return BlockTokens(count, documents.length, takes_full, returns_full)
        assert self.stream is not None
        length = hidden.shape[1] if takes_full else self.stream.length(hidden)
        return BlockTokens(length, length, takes_full, returns_full)

    def run(
        self,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others: Mapping[str, Any],
        index: np.ndarray,
        tokens: BlockTokens,
        name: str,
        block: nn.Module,
    ) -> Tensor:
        """Runs a block on the chosen tokens; returns its hidden state with theirs changed.

        Args:
            inner: Call of the block.
            args: Positional arguments of the call; the first one is the hidden state, unless they are empty.
            kwargs: Arguments by name; the first one is the hidden state without positional ones.
            others: Arguments by name besides the hidden state.
            index: Positions of the tokens, ascending, int64 `[K]`.
            tokens: Tokens of the call.
            name: Name of the block, for messages.
            block: Block.
        """
        hidden: Tensor = args[0] if args else next(iter(kwargs.values()))
        plan = self._plan(index, tokens, name, hidden.device)
        scope = _Scope(self, torch.from_numpy(index), self._padded(len(index)))
        chosen = _take(hidden, plan.taken, self._ranks(tokens.takes_full))
        more = select_arguments(others, plan.picker, len(hidden), name)
        with scope.forward(chosen), chosen_tokens(plan.picker.index):
            if args:
                output = inner(chosen, *args[1:], **more)
            else:
                output = inner(**{next(iter(kwargs)): chosen, **more})
        if tokens.takes_full == tokens.returns_full:
            check_hidden(chosen, output, name, "TokenDrop")
        scope.backward(output)
        rest = hidden if self.stream is None else as_returned(hidden, block, self.stream)
        return _put(rest, output.to(hidden.dtype), plan.returned, self._ranks(tokens.returns_full))

    def begin_step(self) -> None:
        """Forgets the tokens of the step before."""
        self._plans = {}

    def _plan(self, index: np.ndarray, tokens: BlockTokens, name: str, device: torch.device) -> _Plan:
        key = name, tokens
        if key not in self._plans:
            shorter = self._padded(len(index))
            taken = self._routes(index, tokens.length, shorter, tokens.takes_full, device)
            same = tokens.takes_full == tokens.returns_full
            returned = taken if same else self._routes(index, tokens.length, shorter, tokens.returns_full, device)
            picker = self._picker(torch.from_numpy(index), tokens.length, shorter, device)
            self._plans[key] = _Plan(taken, returned, picker)
        return self._plans[key]

    def _padded(self, count: int) -> int:
        """Returns the number of positions that tokens take, a multiple of twice the ranks of `cp`."""
        return count if self.cp == 1 else -(-count // (2 * self.cp)) * 2 * self.cp

    def _ranks(self, is_full: bool) -> Communicator | None:
        """Returns the ranks among which tokens move; None if each has all."""
        return self._chunks if is_full else self._all

    def _routes(self, index: np.ndarray, length: int, shorter: int, is_full: bool, device: torch.device) -> TokenRoutes:
        tp, ranks = 1 if is_full else self.tp, self._ranks(is_full)
        old, new = TokenLayout(length, self.cp, tp), TokenLayout(shorter, self.cp, tp)
        return find_routes(index, old, new, 0 if ranks is None else ranks.rank, device)

    def _picker(self, index: Tensor, length: int, shorter: int, device: torch.device) -> TokenPicker:
        """Returns how arguments of a block are those of the chosen tokens; arguments are not sharded by `tp`."""
        padded = torch.cat([index, index[-1:].expand(shorter - len(index))])
        if self.sequence is None:
            return TokenPicker(padded.to(device, non_blocking=True), length)
        rank = self.sequence.ring.rank
        own = padded[torch.from_numpy(TokenLayout(shorter, self.cp).places_of(rank))]
        return ContextPicker(padded.to(device, non_blocking=True), length, len(index), own.to(device), self)

    def full(self, shard: Tensor, dim: int) -> Tensor:
        """Returns an argument of the full sequence; one without a gradient is gathered once for all blocks."""
        assert self.sequence is not None
        if shard.requires_grad:
            return gather_full(shard, dim, self.sequence.ring)
        if shard not in self._full:
            self._full[shard] = gather_full(shard, dim, self.sequence.ring)
        found: Tensor = self._full[shard]
        return found


def as_returned(hidden: Tensor, block: nn.Module, stream: ShardedSequence) -> Tensor:
    """Returns a block's hidden state with the positions that the block returns: all, or this rank's slice.

    Args:
        hidden: Hidden state that the block gets, `[B, l, D]`.
        block: Block.
        stream: Sequence that ranks of `tp` share between their layers.
    """
    takes_full, returns_full = stream.edges(block)
    if takes_full == returns_full:
        return hidden
    return stream.split(hidden) if takes_full else stream.gather(hidden)


class ContextPicker(TokenPicker):
    """Arguments of chosen tokens where ranks share the sequence: shards stay shards, and full arguments full.

    Args:
        index: Positions of the tokens, int64 `[K]`, with the padding behind them.
        length: Positions of a row.
        count: Number of tokens without the padding.
        own: Positions of this rank's tokens, int64 `[k]`.
        ranks: Ranks that share the sequence.
    """

    def __init__(self, index: Tensor, length: int, count: int, own: Tensor, ranks: ShardedTokens) -> None:
        super().__init__(index, length)
        self.count, self.own, self.ranks = count, own, ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of a dim of tokens."""
        return self.length, self.length // self.ranks.cp

    def pick(self, value: Tensor, dim: int) -> Tensor:
        """Returns a tensor with the chosen tokens along a dim of them, counted from the end."""
        if value.shape[dim] == self.length:
            return value.index_select(dim, self.index)
        return self.ranks.full(value, value.ndim + dim).index_select(dim, self.own)

    def pick_mask(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Returns an attention mask of the chosen tokens, in which none sees the padding behind them."""
        if value.ndim == 2:  # Padding. Ranks whose tokens are all real may have no mask, so none is gathered.
            return self._padding(value)
        found = super().pick_mask(value, dims)
        if len(self.index) > self.count and found.shape[-1] == len(self.index):
            hidden = {torch.bool: 0}.get(found.dtype, -1)  # Documents of sparse attention are -1 for padding.
            found = found.clone()
            rows = slice(None) if found.shape[-2] == 1 else slice(self.count)
            found[..., rows, self.count :] = torch.finfo(found.dtype).min if found.is_floating_point() else hidden
        return found

    def _padding(self, value: Tensor) -> Tensor:
        assert self.ranks.sequence is not None
        documents = self.ranks.sequence.current
        assert documents is not None
        real = torch.ones(len(value), self.length, device=value.device) if documents.real is None else documents.real
        chosen = self.index if value.shape[1] == self.length else self.own
        return real.to(value.dtype)[:, chosen]

    def add_padding(self, kept: Tensor) -> None:
        """Adds the padding behind the tokens to those that are counted for bounds of documents, `[L]`."""
        kept[-1] += len(self.index) - self.count


class _Scope:
    """State of the attention and of the regions of `tp` while a block runs on chosen tokens, in backward too.

    The gradient of the output is computed before the block's backward, which may recompute, and that of the chosen
    tokens after it; hooks on both tensors set the state between them.
    """

    def __init__(self, ranks: ShardedTokens, index: Tensor, shorter: int) -> None:
        self._sequence, self._stream = ranks.sequence, ranks.stream
        self._selection = None if ranks.sequence is None else ranks.sequence.select_tokens(index, shorter)
        self._length = shorter // ranks.cp
        self._before: Any = None
        self._has_gradient = True

    def _enter(self) -> None:
        sequence, stream = self._sequence, self._stream
        self._before = None if sequence is None else sequence.selection
        if sequence is not None and self._selection is not None:
            sequence.selection = self._selection
        if stream is not None:
            stream.selected = self._length

    def _leave(self, *_: Any) -> None:
        if self._sequence is not None:
            self._sequence.selection = self._before
        if self._stream is not None:
            self._stream.selected = None
        self._before = None

    @contextlib.contextmanager
    def forward(self, chosen: Tensor) -> Iterator[None]:
        """Sets the state inside the block of a with statement; leaves it in backward with the gradient of `chosen`."""
        self._has_gradient = chosen.requires_grad
        if chosen.requires_grad:
            chosen.register_hook(self._leave)
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def backward(self, output: Tensor) -> None:
        """Sets the state in backward with the gradient of `output`."""
        if output.requires_grad:
            output.register_hook(self._enter_backward)

    def _enter_backward(self, gradient: Tensor) -> None:
        if not self._has_gradient:  # All before the block is frozen, so that backward ends with it.
            Variable._execution_engine.queue_callback(self._leave)
        self._enter()


class _Move(torch.autograd.Function):
    """All-to-all of rows `[n, B, D]`; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Communicator, sent: list[int], received: list[int]) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchange_rows(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.ranks.exchange_rows(gradients[0], ctx.received, ctx.sent), None, None, None


def _take(hidden: Tensor, routes: TokenRoutes, ranks: Communicator | None) -> Tensor:
    """Returns this rank's share of the chosen tokens, `[B, k, D]`, zeros for padding; of its own `[B, l, D]`."""
    if ranks is None:
        return hidden.index_select(1, routes.sent)
    rows = hidden.index_select(1, routes.sent).transpose(0, 1)  # [n, B, D]
    got: Tensor = _Move.apply(rows, ranks, routes.sent_counts, routes.received_counts)
    found = got.new_zeros(routes.size, *got.shape[1:]).index_copy(0, routes.received, got)
    return found.transpose(0, 1).contiguous()


def _put(hidden: Tensor, changed: Tensor, routes: TokenRoutes, ranks: Communicator | None) -> Tensor:
    """Returns the hidden state `[B, l, D]` with the chosen tokens of all ranks' shares `[B, k, D]`."""
    if ranks is None:
        return hidden.index_copy(1, routes.sent, changed)
    rows = changed.index_select(1, routes.received).transpose(0, 1)
    got: Tensor = _Move.apply(rows, ranks, routes.received_counts, routes.sent_counts)
    return hidden.index_copy(1, routes.sent, got.transpose(0, 1))
