"""Where the tokens of a sharded sequence are, and where some of them go so that ranks share those alone.

Ranks of `cp` have two chunks of each sequence, and ranks of `tp` with a shared sequence a slice of these. Tokens that a
block sees have the same layout in a shorter sequence. All ranks know the tokens, so no rank asks another: each sends
its own to the ranks that compute them, in one all-to-all.

Shapes: L positions, K tokens, cp and tp ranks, numbered `rank of cp * tp + rank of tp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dlo_plugins.context.sequence_layout import chunks_of


@dataclass(frozen=True)
class TokenLayout:
    """Layout of a sequence over ranks.

    Attributes:
        length: Positions, with padding; a multiple of `2 * cp`.
        cp: Number of ranks that have two chunks each.
        tp: Number of ranks that have a slice of these each.
    """

    length: int
    cp: int = 1
    tp: int = 1

    @property
    def of_chunks(self) -> int:
        """Number of positions of a rank of `cp`."""
        return self.length // self.cp

    @property
    def size(self) -> int:
        """Number of positions of a rank, with the padding of slices."""
        return -(-self.of_chunks // self.tp)

    def find(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranks that have tokens, and the tokens' places there, int64 `[K]` each."""
        rank, place = np.zeros_like(index), index
        if self.cp > 1:
            chunk = self.length // (2 * self.cp)
            number = index // chunk
            is_tail = number >= self.cp
            rank = np.where(is_tail, 2 * self.cp - 1 - number, number)
            place = index % chunk + is_tail * chunk
        return rank * self.tp + place // self.size, place % self.size

    def places_of(self, rank: int) -> np.ndarray:
        """Returns the positions that a rank of `cp` has, int64 `[L / cp]`."""
        if self.cp == 1:
            return np.arange(self.length)
        chunk = self.length // (2 * self.cp)
        return np.concatenate([np.arange(number * chunk, (number + 1) * chunk) for number in chunks_of(rank, self.cp)])


@dataclass(frozen=True)
class TokenRoutes:
    """Tokens that a rank sends and gets, in the order in which it does.

    Attributes:
        sent: Places of the tokens in this rank's shard, int64.
        sent_counts: Number of tokens to each rank.
        received: Places of the tokens in this rank's shard of the shorter sequence, int64.
        received_counts: Number of tokens from each rank.
        size: Positions of this rank's shard of the shorter sequence; those that get no token are padding.
    """

    sent: torch.Tensor
    sent_counts: list[int]
    received: torch.Tensor
    received_counts: list[int]
    size: int


def find_routes(index: np.ndarray, old: TokenLayout, new: TokenLayout, rank: int, device: torch.device) -> TokenRoutes:
    """Returns the routes of tokens to the layout of the sequence that they make.

    Args:
        index: Positions of the tokens, ascending, int64 `[K]`.
        old: Layout of the sequence.
        new: Layout of the tokens alone.
        rank: This rank.
        device: Device of the places.
    """
    source, place = old.find(index)
    target, new_place = new.find(np.arange(len(index)))
    ranks = old.cp * old.tp
    sent, received = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
    sent = sent[np.argsort(target[sent], kind="stable")]
    received = received[np.argsort(source[received], kind="stable")]
    return TokenRoutes(
        torch.from_numpy(place[sent]).to(device, non_blocking=True),
        np.bincount(target[sent], minlength=ranks).tolist(),
        torch.from_numpy(new_place[received]).to(device, non_blocking=True),
        np.bincount(source[received], minlength=ranks).tolist(),
        new.size,
    )
