"""Which tokens a token sees, chunk against chunk: those before it, of its document, in its window, that are no padding.

All ranks have the whole batch at hand before it is cut, so each knows the documents of all chunks, and nothing about
them has to travel with the keys. What is decided here once a step, from a few numbers a chunk: which pairs of chunks
need no computing, which no mask, and which the causal one; the rest get a mask when they are computed, of two chunks'
size and not of the sequence's.

Shapes: B rows, L positions, C chunks of S = L / C positions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Seen(enum.Enum):
    """What the queries of one chunk see of the keys of another."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


@dataclass
class Documents:
    """The documents of a batch, and where its padding is.

    Attributes:
        length: L, positions of the whole sequence.
        chunks: C, into which they are cut.
        starts: int64 [B, L], the index at which each token's document begins; None for one document a row.
        real: bool [B, L], false for padding; None where there is none.
        first_start: int64 [B, C] on the CPU, `starts` of each chunk's first token.
        last_start: int64 [B, C] on the CPU, of its last token.
        padded: bool [B, C] on the CPU, whether padding lies in the chunk.
    """

    length: int
    chunks: int
    starts: Tensor | None = None
    real: Tensor | None = None
    first_start: Tensor | None = None
    last_start: Tensor | None = None
    padded: Tensor | None = None
    _known: dict[tuple[int, int, int | None], Seen] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Positions of a chunk."""
        return self.length // self.chunks

    @property
    def plain(self) -> bool:
        """Whether each row is one document without padding."""
        return self.starts is None and self.real is None

    def rows(self, first: int, count: int) -> Documents:
        """Returns the documents of some rows: those of a micro-batch."""
        cut = {
            name: value[first : first + count]
            for name in ("starts", "real", "first_start", "last_start", "padded")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **cut, _known={})

    def seen(self, query: int, key: int, window: int | None = None) -> Seen:
        """Returns what one chunk's queries see of another chunk's keys.

        Args:
            query: number of the chunk of the queries.
            key: of that of the keys.
            window: how many tokens a token sees, itself included; None for all before it.
        """
        at = query, key, window
        if at not in self._known:
            self._known[at] = self._decide(query, key, window)
        return self._known[at]

    def mask(self, query: int, key: int, window: int | None, device: torch.device) -> Tensor:
        """Returns which keys of one chunk each query of another sees: bool [B or 1, 1, S, S]."""
        size = self.size
        q = torch.arange(query * size, (query + 1) * size, device=device)[:, None]
        k = torch.arange(key * size, (key + 1) * size, device=device)[None, :]
        found = (k <= q)[None]
        if window is not None:
            found = found & (q - k < window)
        if self.starts is not None:
            found = found & (k >= self.starts[:, query * size : (query + 1) * size, None])
        if self.real is not None:
            # Padding sees itself, so that no row of the softmax is empty; nothing comes of it.
            found = found & (self.real[:, None, key * size : (key + 1) * size] | (q == k))
        return found[:, None]

    def _decide(self, query: int, key: int, window: int | None) -> Seen:
        size = self.size
        q_first, q_last = query * size, (query + 1) * size - 1
        k_first, k_last = key * size, (key + 1) * size - 1
        if key > query or (window is not None and q_first - k_last >= window):
            return Seen.NOTHING
        if self.first_start is not None and bool((self.first_start[:, query] > k_last).all()):
            return Seen.NOTHING
        narrow = window is not None and q_last - k_first >= window
        split = self.last_start is not None and bool((self.last_start[:, query] > k_first).any())
        padded = self.padded is not None and bool(self.padded[:, key].any())
        if narrow or split or padded:
            return Seen.SOME
        return Seen.CAUSAL if key == query else Seen.ALL


def documents_of(positions: Tensor, mask: Tensor | None, chunks: int) -> Documents:
    """Returns the documents of a batch; waits for the device once.

    A document begins where positions begin again at 0. Without a mask, one also begins wherever a position does not
    follow from the one before it, as transformers 5 has it (``masking_utils.find_packed_sequence_indices``). Without
    values (meta and fake tensors), each row is one document.

    Args:
        positions: int64 [B, L].
        mask: [B, L], 0 for padding.
        chunks: into which the sequence is cut; they divide L.
    """
    length = positions.shape[1]
    found = Documents(length, chunks)
    if positions.device.type == "meta" or isinstance(positions, FakeTensor):
        return found
    begins = positions == 0
    if mask is None:
        begins[:, 1:] |= positions.diff(dim=1) != 1
    begins[:, 0] = True
    index = torch.arange(length, device=positions.device)
    starts = torch.where(begins, index, 0).cummax(1).values
    real = torch.ones_like(begins) if mask is None else mask.bool()
    by_chunk = starts.unflatten(1, (chunks, -1))
    padded = ~real.unflatten(1, (chunks, -1)).all(2)
    first, last, gaps = torch.stack([by_chunk[:, :, 0], by_chunk[:, :, -1], padded.long()]).cpu().unbind()
    if bool(last[:, -1].any()):
        found.starts, found.first_start, found.last_start = starts, first, last
    if bool(gaps.any()):
        found.real, found.padded = real, gaps.bool()
    return found
