"""Layout of a sequence over ranks, in chunks, and which keys the queries of a chunk see.

The Llama 3 Herd of Models. Grattafiori et al., 2024, arXiv 2407.21783, section 3.3.2. If each rank had one contiguous
slice of a causal sequence, the first rank would have almost nothing to compute, and the last almost everything. With
two chunks for each rank, rank r holds the r-th chunk from the head and the r-th from the tail, and all ranks have the
same work. Striped Attention (Brandon et al., 2023, arXiv 2311.09431) balances the work too, by interleaving single
tokens, but then every pair of ranks needs a causal mask.

A token sees itself and the tokens before it that are in its document and in its window, except padding; under a mask
with a prefix, the later tokens of the prefix too.

All ranks have the full batch before it is sharded, so each rank knows the documents of all chunks, and nothing about
them is sent with the keys. Once a step, a few numbers for each chunk decide which pairs of chunks are skipped, which
need no mask, and which need the causal mask. The other pairs get a mask when they are first computed. It has the size
of two chunks, not of the sequence, and later layers and backward use it again.

The host decides, so it needs these numbers. It counts them before the batch is moved (:func:`count_ends`), and the
batch's tensors keep them when they are moved to the device (:class:`CountedTensor`). For a batch without counts, the
device computes them, and the host waits.

Shapes: B rows, L positions of the full sequence, C chunks (two for each rank) of S = L / C positions.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.attention.attention_mask import AttentionMask, LocalHeads

#: Label of a position without a target.
_NO_TARGET = -100


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the numbers of a rank's two chunks, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def shard_sequence(whole: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """Returns a copy of a rank's shard of a tensor.

    Args:
        whole: Full tensor; its size along `dim` is a multiple of `2 * ranks`.
        rank: Rank of the shard.
        ranks: Number of ranks that share the sequence.
        dim: Dimension of the sequence.
    """
    pieces = whole.chunk(2 * ranks, dim)
    return torch.cat([pieces[number] for number in chunks_of(rank, ranks)], dim)


def concat_shards(parts: list[Tensor], dim: int = 1) -> Tensor:
    """Returns the full tensor from the shards in the order of ranks; the inverse of :func:`shard_sequence`."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim)


def pad_batch(batch: Any, ranks: int) -> dict[str, Any]:
    """Returns a batch with positions, its sequence padded on the right to a multiple of `2 * ranks`.

    The padding has no target, is a document of its own, and has positions 0, 1, 2, ... An `attention_mask` marks it as
    padding.

    Args:
        batch: Batch: a dict with `input_ids` [B, L]; all other tensors of this shape belong to the sequence.
        ranks: Number of ranks that share the sequence.

    Raises:
        DloError: If the batch is not such a dict, or its attention mask has another shape.
    """
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        got = f"keys {sorted(batch)}" if isinstance(batch, dict) else type(batch).__name__
        raise DloError(
            f"a batch must be a dict with `input_ids` [B, L] for context parallelism, got {got}; return one from the"
            " loader, or set cp=1"
        )
    batch = dict(batch)
    ids = batch["input_ids"]
    length = ids.shape[1]
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise DloError(
            f"attention_mask must have the shape {list(ids.shape)} of input_ids for context parallelism, got"
            f" {list(mask.shape)}; leave it out, and separate documents by position_ids that begin again at 0"
        )
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(length, device=ids.device).expand(ids.shape)
    elif batch["position_ids"].ndim == 2 and len(batch["position_ids"]) == 1:
        batch["position_ids"] = batch["position_ids"].expand(ids.shape)
    missing = -length % (2 * ranks)
    if missing:
        for name, tensor in batch.items():
            if not in_sequence(tensor, ids):
                continue
            if name == "position_ids":
                more = torch.arange(missing, device=tensor.device, dtype=tensor.dtype).expand(len(tensor), -1)
                batch[name] = torch.cat([tensor, more], 1)
            else:
                batch[name] = F.pad(tensor, (0, missing), value=_NO_TARGET if name == "labels" else 0)
    return batch


def continued_positions(batch: dict[str, Any], ids: Tensor) -> Tensor:
    """Returns the positions of the full sequence, [B, L]; those of the padding of :func:`pad_batch` go on counting.

    Args:
        batch: Batch before it was padded.
        ids: Tokens of the padded batch, [B, L].
    """
    given = batch.get("position_ids")
    index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if given is None or given.ndim != 2:
        return index
    own = given.expand(len(ids), -1)
    more = own[:, -1:] + torch.arange(1, 1 + ids.shape[1] - own.shape[1], device=ids.device)
    return torch.cat([own, more], 1)


def in_sequence(value: Any, ids: Tensor) -> bool:
    """Returns whether a batch's entry has a value for each token: its first two dims are those of `ids`."""
    return isinstance(value, Tensor) and value.shape[:2] == ids.shape


#: Largest number of elements of a batch's masks that are kept for later layers: 2^28 take 256 MiB, and their biases in
#: half precision another 512 MiB.
KEPT_ELEMENTS = 2**28
#: Number of elements to a multiple of which the rows of a bias are aligned.
_ALIGNED = 16
#: Name of the attribute in which a tensor keeps the counts of its batch.
_NAME = "_dlo_chunk_ends"


class Visibility(enum.Enum):
    """Visibility of one chunk's keys to another chunk's queries."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


class PairMask:
    """Mask of one chunk's keys for another chunk's queries, in the forms that kernels take; each is made once.

    Args:
        seen: Mask, bool [B or 1, H or 1, S, T], true for keys that are seen.
    """

    def __init__(self, seen: Tensor) -> None:
        self.visible = seen
        self._biases: dict[torch.dtype, Tensor] = {}

    @functools.cached_property
    def blind(self) -> Tensor:
        """Mask of the queries that see no key, bool [B or 1, H or 1, S]."""
        return ~self.visible.any(-1)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Returns the bias that is added to scores: 0 for keys that are seen, minus infinity for the others.

        Its rows begin at multiples of 16 elements, as CUDA kernels require.
        """
        if dtype not in self._biases:
            *shape, keys = self.visible.shape
            room = self.visible.new_zeros((*shape, -(-keys // _ALIGNED) * _ALIGNED), dtype=dtype)
            self._biases[dtype] = room[..., :keys].masked_fill_(~self.visible, -math.inf)
        return self._biases[dtype]


class SparseMask(NamedTuple):
    """Mask of the attention modules, for this rank's heads.

    Attributes:
        mask: Mask.
        heads: Heads of this rank; None for all.
    """

    mask: AttentionMask
    heads: LocalHeads | None

    def has_blocks(self, query: range, key: range, length: int) -> bool:
        """Returns whether any block of these keys is visible to any of these queries."""
        layout, size = self.mask.layout(length, self.heads), self.mask.pattern.block
        rows = slice(query.start // size, (query.stop - 1) // size + 1)
        columns = slice(key.start // size, (key.stop - 1) // size + 1)
        return bool(layout[:, rows, columns].any())


class ChunkEnds(NamedTuple):
    """Counts of a batch: the numbers that the host needs about the documents in each chunk.

    Attributes:
        first_start: Index at which the document of each chunk's first token begins, int64 [B, C] on the CPU.
        last_start: Index at which the document of each chunk's last token begins, int64 [B, C] on the CPU.
        padded: Whether each chunk has padding, bool [B, C] on the CPU.
    """

    first_start: Tensor
    last_start: Tensor
    padded: Tensor


@dataclass
class Documents:
    """Documents and padding of a batch.

    Attributes:
        length: Positions of the full sequence, L.
        chunks: Number of chunks of the sequence, C.
        starts: Index at which each token's document begins, int64 [B, L]; None for one document a row.
        real: Mask of tokens, bool [B, L], false for padding; None without padding.
        first_start: Index as in :class:`ChunkEnds`, [B, C]; None for one document a row.
        last_start: Index as in :class:`ChunkEnds`, [B, C]; None for one document a row.
        padded: Mask as in :class:`ChunkEnds`, [B, C]; None without padding.
        sparse: Sparse mask of the attention; None without one.
    """

    length: int
    chunks: int
    starts: Tensor | None = None
    real: Tensor | None = None
    first_start: Tensor | None = None
    last_start: Tensor | None = None
    padded: Tensor | None = None
    sparse: SparseMask | None = None
    _known: dict[tuple[int, int, int | None], Visibility] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[int, int], Documents] = field(default_factory=dict, repr=False)
    _masks: dict[tuple[int, int, int | None, torch.device], PairMask] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Number of positions in a chunk, S."""
        return self.length // self.chunks

    @property
    def plain(self) -> bool:
        """Whether each row is one document without padding or a sparse mask."""
        return self.starts is None and self.real is None and self.sparse is None

    @property
    def prefix(self) -> int:
        """Number of positions at the start of a row that all positions see."""
        return 0 if self.sparse is None else self.sparse.mask.pattern.prefix

    def rows(self, first: int, count: int) -> Documents:
        """Returns the documents of a micro-batch's rows; the same object for the same rows."""
        if (first, count) in self._rows:
            return self._rows[first, count]
        cut = {
            name: value[first : first + count]
            for name in ("starts", "real", "first_start", "last_start", "padded")
            if (value := getattr(self, name)) is not None
        }
        self._rows[first, count] = documents = replace(self, **cut, _known={}, _rows={}, _masks={})
        return documents

    def seen(self, query: int, key: int, window: int | None = None) -> Visibility:
        """Returns the visibility of one chunk's keys to another chunk's queries.

        Args:
            query: Number of the queries' chunk.
            key: Number of the keys' chunk.
            window: Number of tokens that a token sees, itself included; None for all before it.
        """
        at = query, key, window
        if at not in self._known:
            self._known[at] = self._decide(query, key, window)
        return self._known[at]

    def mask(self, query: int, key: int, window: int | None, device: torch.device) -> PairMask:
        """Returns the mask of one chunk's keys for another chunk's queries, `[B or 1, H or 1, S, S]`.

        It is kept for later layers and backward, as long as all kept masks together have at most :data:`KEPT_ELEMENTS`.
        """
        at = query, key, window, device
        if at in self._masks:
            return self._masks[at]
        made = PairMask(self._seen_tokens(query, key, window, device))
        if sum(mask.visible.numel() for mask in self._masks.values()) + made.visible.numel() <= KEPT_ELEMENTS:
            self._masks[at] = made
        return made

    def _seen_tokens(self, query: int, key: int, window: int | None, device: torch.device) -> Tensor:
        size = self.size
        queries = torch.arange(query * size, (query + 1) * size, device=device)
        keys = torch.arange(key * size, (key + 1) * size, device=device)
        q, k = queries[:, None], keys[None]
        seen = (k <= q)[None]
        if self.prefix:
            seen = seen | (k < self.prefix)
        if window is not None:
            seen = seen & (q - k < window)
        if self.starts is not None:
            seen = seen & (k >= self.starts[:, query * size : (query + 1) * size, None])
            if self.prefix:
                seen = seen & (self.starts[:, None, key * size : (key + 1) * size] <= q)
        if self.real is not None:
            # Padding sees itself, so that no row of the softmax is empty; its output is not used.
            seen = seen & (self.real[:, None, key * size : (key + 1) * size] | (q == k))
        if self.sparse is None:
            return seen[:, None]
        return seen[:, None] & self.sparse.mask.visible(queries, keys, self.sparse.heads, self.length)

    def _decide(self, query: int, key: int, window: int | None) -> Visibility:
        size = self.size
        q_first, q_last = query * size, (query + 1) * size - 1
        k_first, k_last = key * size, (key + 1) * size - 1
        if (key > query and k_first >= self.prefix) or (window is not None and q_first - k_last >= window):
            return Visibility.NOTHING
        if self.first_start is not None and bool((self.first_start[:, query] > k_last).all()):
            return Visibility.NOTHING
        if self.sparse is not None:
            rows, columns = range(q_first, q_last + 1), range(k_first, k_last + 1)
            return Visibility.SOME if self.sparse.has_blocks(rows, columns, self.length) else Visibility.NOTHING
        narrow = window is not None and q_last - k_first >= window
        split = self.last_start is not None and bool((self.last_start[:, query] > k_first).any())
        padded = self.padded is not None and bool(self.padded[:, key].any())
        if narrow or split or padded:
            return Visibility.SOME
        return Visibility.CAUSAL if key == query else Visibility.ALL


def find_documents(positions: Tensor, mask: Tensor | None, chunks: int, ends: ChunkEnds | None = None) -> Documents:
    """Returns the documents of a batch; waits for the device once if `ends` is None.

    A document begins where positions restart at 0. Without a mask, a document also begins where a position is not the
    previous one plus 1, as in transformers 5 (``masking_utils.find_packed_sequence_indices``). Without values (meta and
    fake tensors), each row is one document.

    Args:
        positions: Positions of the tokens, int64 [B, L].
        mask: Attention mask, [B, L], 0 for padding; None without padding.
        chunks: Number of chunks of the sequence, a divisor of L.
        ends: Counts of this batch, from :func:`count_ends`; None to count here.
    """
    documents = Documents(positions.shape[1], chunks)
    if positions.device.type == "meta" or isinstance(positions, FakeTensor):
        return documents
    starts, real = _starts(positions, mask)
    if ends is None:
        ends = _ends(starts, real, chunks)
    if bool(ends.last_start[:, -1].any()):
        documents.starts, documents.first_start, documents.last_start = starts, ends.first_start, ends.last_start
    if bool(ends.padded.any()):
        documents.real, documents.padded = real, ends.padded
    return documents


def count_ends(positions: Tensor, mask: Tensor | None, chunks: int) -> ChunkEnds:
    """Returns the counts of a batch that is still on the CPU; arguments as in :func:`find_documents`."""
    assert positions.device.type == "cpu"
    return _ends(*_starts(positions, mask), chunks)


class CountedTensor(Tensor):
    """Tensor of a batch on the CPU whose copy on the device gets the counts of the batch.

    Otherwise it acts as a plain tensor, and operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _ends: ChunkEnds

    @staticmethod
    def attach(tensor: Tensor, ends: ChunkEnds) -> CountedTensor:
        """Returns a tensor with the counts of its batch."""
        counted = tensor.as_subclass(CountedTensor)
        counted._ends = ends
        return counted

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the tensor on a device, with the counts, which a write to it makes invalid."""
        moved = super().to(*args, **kwargs).as_subclass(Tensor)
        if not moved.is_inference():  # Inference tensors have no version.
            setattr(moved, _NAME, (moved._version, self._ends))
        return moved


def read_counts(tensors: Sequence[Tensor]) -> ChunkEnds | None:
    """Returns the counts that all of these tensors keep; None if they differ or a tensor has been written to since."""
    counts = [getattr(tensor, _NAME, (None, None)) for tensor in tensors]
    same = all(
        version == tensor._version and ends is counts[0][1]
        for tensor, (version, ends) in zip(tensors, counts, strict=True)
    )
    return counts[0][1] if counts and same else None


def _starts(positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the index at which each token's document begins, int64 [B, L], and a mask, bool, false for padding."""
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
