"""Which tokens a token sees, chunk against chunk: those before it, of its document, in its window, that are no padding.

All ranks have the whole batch at hand before it is cut, so each knows the documents of all chunks, and nothing about
them has to travel with the keys. What is decided here once a step, from a few numbers a chunk: which pairs of chunks
need no computing, which no mask, and which the causal one; the rest get a mask when they are first computed, of two
chunks' size and not of the sequence's, which the layers that follow and backward share.

The host decides, so it has to know these numbers. It counts them before the batch is moved (:func:`count`), and they go
to the device with the batch's tensors (:class:`CountedTensor`); of a batch that nobody has counted it asks the device.

Shapes: B rows, L positions, C chunks of S = L / C positions.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

#: Elements of all masks of a batch, at most, that are kept for the layers that follow: 2^28 take 256 MiB, and twice as
#: much again as biases in half precision.
KEPT_ELEMENTS = 2**28
#: Elements by which the rows of a bias are aligned.
_ALIGNED = 16
#: Under this name a tensor keeps what has been counted of its batch.
_NAME = "_dlo_chunk_ends"


class Seen(enum.Enum):
    """What the queries of one chunk see of the keys of another."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


class PairMask:
    """Which keys of one chunk each query of another sees, in the forms that kernels take; each is made once.

    Args:
        seen: bool [B or 1, 1, S, T], true for what is seen.
    """

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen
        self._biases: dict[torch.dtype, Tensor] = {}

    @functools.cached_property
    def blind(self) -> Tensor:
        """Which queries see no key: bool [B or 1, 1, S]."""
        return ~self.seen.any(-1)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Returns what is added to scores: 0 for what is seen, minus infinity for the rest.

        Its rows begin at multiples of 16 elements, as CUDA kernels want it.
        """
        if dtype not in self._biases:
            *shape, keys = self.seen.shape
            room = self.seen.new_zeros((*shape, -(-keys // _ALIGNED) * _ALIGNED), dtype=dtype)
            self._biases[dtype] = room[..., :keys].masked_fill_(~self.seen, -math.inf)
        return self._biases[dtype]


class ChunkEnds(NamedTuple):
    """What the host has to know of the documents in a batch's chunks.

    Attributes:
        first_start: int64 [B, C] on the CPU, the index at which the document of each chunk's first token begins.
        last_start: int64 [B, C] on the CPU, of its last token.
        padded: bool [B, C] on the CPU, whether padding lies in the chunk.
    """

    first_start: Tensor
    last_start: Tensor
    padded: Tensor


@dataclass
class Documents:
    """The documents of a batch, and where its padding is.

    Attributes:
        length: L, positions of the whole sequence.
        chunks: C, into which they are cut.
        starts: int64 [B, L], the index at which each token's document begins; None for one document a row.
        real: bool [B, L], false for padding; None where there is none.
        first_start: see :class:`ChunkEnds`; None for one document a row.
        last_start: same.
        padded: see :class:`ChunkEnds`; None where there is no padding.
    """

    length: int
    chunks: int
    starts: Tensor | None = None
    real: Tensor | None = None
    first_start: Tensor | None = None
    last_start: Tensor | None = None
    padded: Tensor | None = None
    _known: dict[tuple[int, int, int | None], Seen] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[int, int], Documents] = field(default_factory=dict, repr=False)
    _masks: dict[tuple[int, int, int | None, torch.device], PairMask] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Positions of a chunk."""
        return self.length // self.chunks

    @property
    def plain(self) -> bool:
        """Whether each row is one document without padding."""
        return self.starts is None and self.real is None

    def rows(self, first: int, count: int) -> Documents:
        """Returns the documents of some rows: those of a micro-batch; the same object for the same rows."""
        if (first, count) in self._rows:
            return self._rows[first, count]
        cut = {
            name: value[first : first + count]
            for name in ("starts", "real", "first_start", "last_start", "padded")
            if (value := getattr(self, name)) is not None
        }
        self._rows[first, count] = found = replace(self, **cut, _known={}, _rows={}, _masks={})
        return found

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

    def mask(self, query: int, key: int, window: int | None, device: torch.device) -> PairMask:
        """Returns which keys of one chunk each query of another sees, `[B or 1, 1, S, S]`.

        It is kept for the layers that follow and for backward, as long as all that are kept have no more than
        :data:`KEPT_ELEMENTS`.
        """
        at = query, key, window, device
        if at in self._masks:
            return self._masks[at]
        made = PairMask(self._seen_tokens(query, key, window, device))
        if sum(mask.seen.numel() for mask in self._masks.values()) + made.seen.numel() <= KEPT_ELEMENTS:
            self._masks[at] = made
        return made

    def _seen_tokens(self, query: int, key: int, window: int | None, device: torch.device) -> Tensor:
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


def documents_of(positions: Tensor, mask: Tensor | None, chunks: int, ends: ChunkEnds | None = None) -> Documents:
    """Returns the documents of a batch; waits for the device once, unless it is told what the host has to know.

    A document begins where positions begin again at 0. Without a mask, one also begins wherever a position does not
    follow from the one before it, as transformers 5 has it (``masking_utils.find_packed_sequence_indices``). Without
    values (meta and fake tensors), each row is one document.

    Args:
        positions: int64 [B, L].
        mask: [B, L], 0 for padding.
        chunks: into which the sequence is cut; they divide L.
        ends: what :func:`count` has found for this batch; None where nobody has counted.
    """
    found = Documents(positions.shape[1], chunks)
    if positions.device.type == "meta" or isinstance(positions, FakeTensor):
        return found
    starts, real = _starts(positions, mask)
    if ends is None:
        ends = _ends(starts, real, chunks)
    if bool(ends.last_start[:, -1].any()):
        found.starts, found.first_start, found.last_start = starts, ends.first_start, ends.last_start
    if bool(ends.padded.any()):
        found.real, found.padded = real, ends.padded
    return found


def count(positions: Tensor, mask: Tensor | None, chunks: int) -> ChunkEnds:
    """Returns what the host has to know of a batch that is still on the CPU; arguments as in :func:`documents_of`."""
    assert positions.device.type == "cpu"
    return _ends(*_starts(positions, mask), chunks)


class CountedTensor(Tensor):
    """A tensor of a batch on the CPU, from which its copy on the device gets what has been counted of the batch.

    In all else it is a plain tensor: whatever is computed of it is one.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _ends: ChunkEnds

    @staticmethod
    def of(tensor: Tensor, ends: ChunkEnds) -> CountedTensor:
        """Returns a tensor with the counts of its batch."""
        found = tensor.as_subclass(CountedTensor)
        found._ends = ends
        return found

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the tensor on a device, with the counts, as long as nobody writes to it."""
        moved = super().to(*args, **kwargs).as_subclass(Tensor)
        if not moved.is_inference():  # Those do not note when they are written to.
            setattr(moved, _NAME, (moved._version, self._ends))
        return moved


def attached(tensors: Sequence[Tensor]) -> ChunkEnds | None:
    """Returns the counts that are kept with all of these tensors, none of which has been written to since."""
    found = [getattr(tensor, _NAME, (None, None)) for tensor in tensors]
    same = all(
        version == tensor._version and ends is found[0][1]
        for tensor, (version, ends) in zip(tensors, found, strict=True)
    )
    return found[0][1] if found and same else None


def _starts(positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns at which index each token's document begins, int64 [B, L], and which tokens are no padding, bool."""
    begins = positions == 0
    if mask is None:
        begins[:, 1:] |= positions.diff(dim=1) != 1
    begins[:, 0] = True
    index = torch.arange(positions.shape[1], device=positions.device)
    real = torch.ones_like(begins) if mask is None else mask.bool()
    return torch.where(begins, index, 0).cummax(1).values, real


def _ends(starts: Tensor, real: Tensor, chunks: int) -> ChunkEnds:
    by_chunk = starts.unflatten(1, (chunks, -1))
    padded = ~real.unflatten(1, (chunks, -1)).all(2)
    first, last, gaps = torch.stack([by_chunk[:, :, 0], by_chunk[:, :, -1], padded.long()]).cpu().unbind()
    return ChunkEnds(first, last, gaps.bool())
