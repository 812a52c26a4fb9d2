"""Shards of tokenised documents, and windows of equal length over them, each computed from its index.

Shards need no list of their samples in memory, so that they may be of any size. Window i of a shard has the tokens
``i * seq_len`` to ``(i + 1) * seq_len``; the last one is only a target. Positions restart at 0 with each document, and
the last token of a document has no target, as in packed windows. The tokens after the last full window of a shard are
left out.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_framework.data.remote import LocalFile, RemoteFile
from dlo_framework.errors import DloError
from dlo_tasks.language.batches import IGNORE_INDEX, Batch, finish
from dlo_tasks.language.token_cache import TokenStore

_PARTS = 8  # of the documents that are left, in one of which a step of a search finds each token


class TokenShard(Protocol):
    """Documents of one or more files, one after the other.

    Attributes:
        name: Name for messages.
        tokens: Number of tokens.
        documents: Number of documents.
        file: File of the tokens.
    """

    name: str
    tokens: int
    documents: int
    file: LocalFile | RemoteFile

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents, int64; of index ``documents``, the number of tokens."""

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns the ids of ``length`` tokens from each of ``starts``, in the file's integer type: [P, length]."""

    def ranges(self, starts: np.ndarray, length: int) -> list[tuple[int, int]]:
        """Returns the (offset, size) ranges of the file that windows are read from."""


def document_of(shard: TokenShard, tokens: np.ndarray) -> np.ndarray:
    """Returns the document of each token: the last that begins at it or before, int64 of its shape.

    Each step of the search reads a few bounds for all tokens. Mapped bounds stay on the disk.

    Args:
        shard: Shard of the tokens.
        tokens: Tokens of the shard, int64 of any shape, each at least 0 and below ``shard.tokens``.
    """
    assert not tokens.size or (tokens.min() >= 0 and tokens.max() < shard.tokens)
    first, span = np.zeros(tokens.shape, np.int64), shard.documents  # The document is in first ... first + span - 1.
    while span > 1:
        span = -(-span // _PARTS)
        begins = first[..., None] + span * np.arange(1, _PARTS)
        bounds = shard.bounds(np.minimum(begins, shard.documents))
        first += span * (bounds <= tokens[..., None]).sum(-1)
    return first


def map_bytes(path: Path, random: bool = False) -> np.ndarray:
    """Returns the bytes of a file that is not empty, mapped, uint8.

    Args:
        path: Path of the file.
        random: Whether reads go to random places, so that the kernel reads no neighbouring pages.
    """
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if random:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.uint8)  # It keeps the mapping.


def gather_windows(ids: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Returns windows of contiguous ids, in one copy: [P, length].

    Args:
        ids: Ids [T].
        starts: First token of each window, int64 [P], each at most T - ``length``.
        length: Tokens of a window.
    """
    assert not len(starts) or (starts.min() >= 0 and starts.max() + length <= len(ids))
    (stride,) = ids.strides
    rows = np.lib.stride_tricks.as_strided(ids, (len(ids) - length + 1, length), (stride, stride), writeable=False)
    return np.asarray(rows[starts])


class StoreShard:
    """Shard of dlo's own token cache.

    Args:
        path: Path of the cache file.

    Raises:
        DloError: If it has tokens that are not targets, such as conversations.
    """

    def __init__(self, path: Path) -> None:
        self._store = TokenStore(path)
        self.file: LocalFile | RemoteFile = LocalFile(path)
        self.name, self.tokens, self.documents = str(path), self._store.tokens, len(self._store)
        if not self._store.all_learned:
            raise DloError(
                f"{path} must be plain text, got conversations or completions; name their files under `files`, not"
                " the cache"
            )

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        return self._store.bounds[index]

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns the ids of windows."""
        return self._store.without_flags(gather_windows(self._store.raw, starts, length))

    def ranges(self, starts: np.ndarray, length: int) -> list[tuple[int, int]]:
        """Returns the ranges of windows."""
        size = self._store.raw.itemsize
        return [(self._store.offset + start * size, length * size) for start in starts.tolist()]


# --- windows ------------------------------------------------------------------------------------------------------


class TokenWindows:
    """Windows of a source's shards, from ``first`` to ``past``.

    Args:
        shards: Shards of the source.
        seq_len: Positions per window.
        vocab_size: Number of ids that the model knows.
        name: Name of the source, for messages.
        first: First window; for a part of the windows, as for validation.
        past: Window after the last; None for all.

    Raises:
        DloError: If no shard fills a window, or an id at the beginning of a shard is not in the vocabulary.
    """

    def __init__(
        self,
        shards: Sequence[TokenShard],
        seq_len: int,
        vocab_size: int,
        name: str,
        first: int = 0,
        past: int | None = None,
    ) -> None:
        self._shards, self._seq_len, self._vocab_size, self.name = list(shards), seq_len, vocab_size, name
        counts = [max(0, (shard.tokens - 1) // seq_len) for shard in shards]
        self._starts = np.cumsum([0, *counts])  # first window of each shard [shards + 1]
        if not self._starts[-1]:
            raise DloError(
                f"sources.{name} must have more than {seq_len} tokens in a file, got"
                f" {sum(shard.tokens for shard in shards)} in {len(self._shards)} files; lower seq_len, or name more"
            )
        self._first, self._past = first, int(self._starts[-1]) if past is None else past
        for shard, count in zip(self._shards[:1], counts, strict=False):
            if count:
                self._check_ids(shard.windows(np.zeros(1, np.int64), seq_len + 1), shard)

    def __len__(self) -> int:
        return self._past - self._first

    @property
    def tokens(self) -> int:
        """Number of positions of all windows."""
        return len(self) * self._seq_len

    def part(self, first: int, past: int) -> TokenWindows:
        """Returns the windows ``first`` to ``past - 1`` as a dataset."""
        return TokenWindows(
            self._shards, self._seq_len, self._vocab_size, self.name, self._first + first, self._first + past
        )

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn windows."""
        index = np.array([draw.index for draw in draws])
        places = self._places(index)
        tokens, (row, offset) = self._read(places), self._document_starts(places)
        length = self._seq_len
        # One block of memory: the allocator keeps it for the next batch, and a worker sends it as one file.
        ids, labels, positions = np.empty((3, len(draws), length), np.int64)
        ids[:], labels[:] = tokens[:, :-1], tokens[:, 1:]
        labels[row, offset - 1] = IGNORE_INDEX
        count_from_begins(positions, row, offset)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return finish({name: torch.from_numpy(values) for name, values in arrays.items()}, draws)

    def read(self, index: np.ndarray) -> np.ndarray:
        """Returns the tokens of windows and the one after each, in the stored type: [P, seq_len + 1].

        Raises:
            DloError: If an id is not in the vocabulary.
        """
        return self._read(self._places(index))

    def _read(self, places: list[tuple[TokenShard, np.ndarray, np.ndarray]]) -> np.ndarray:
        length = self._seq_len + 1
        parts = []
        for shard, rows, starts in places:
            ids = shard.windows(starts, length)
            self._check_ids(ids, shard)
            parts.append((rows, ids))
        if len(parts) == 1:
            return parts[0][1]
        tokens = np.empty(
            (sum(len(rows) for rows, _ in parts), length), np.result_type(*(ids.dtype for _, ids in parts))
        )
        for rows, ids in parts:
            tokens[rows] = ids
        return tokens

    def count_targets(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of targets of windows: all positions but those whose next token begins a document."""
        targets = np.full(index.shape, self._seq_len, np.int64)
        for shard, rows, starts in self._places(index):
            last = document_of(shard, starts + self._seq_len)
            targets[rows] -= last - document_of(shard, starts)
        return targets

    @property
    def is_remote(self) -> bool:
        """Whether any shard is remote, so that windows are fetched ahead."""
        return any(isinstance(shard.file, RemoteFile) for shard in self._shards)

    def read_ahead(self, draws: list[Draw]) -> None:
        """Begins to fetch the drawn windows of remote shards."""
        for shard, _, starts in self._places(np.array([draw.index for draw in draws])):
            if isinstance(shard.file, RemoteFile):
                shard.file.read_ahead(shard.ranges(starts, self._seq_len + 1))

    def _places(self, index: np.ndarray) -> list[tuple[TokenShard, np.ndarray, np.ndarray]]:
        """Returns the shards of windows, each with the rows of ``index`` in it and the first token of each."""
        index = index + self._first
        which = np.searchsorted(self._starts, index, side="right") - 1
        places = []
        for number in _distinct(which):
            rows = np.flatnonzero(which == number)
            places.append((self._shards[number], rows, (index[rows] - self._starts[number]) * self._seq_len))
        return places

    def _document_starts(
        self, places: list[tuple[TokenShard, np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the documents that begin after the first token of windows: row and offset, 1 to seq_len, of each."""
        by_shard = []
        for shard, rows, starts in places:
            first, last = document_of(shard, np.stack([starts, starts + self._seq_len]))
            counts = last - first
            at = np.repeat(np.arange(len(starts)), counts)
            within = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
            by_shard.append((rows[at], shard.bounds(np.repeat(first, counts) + 1 + within) - starts[at]))
        row, offset = (np.concatenate(parts) for parts in zip(*by_shard, strict=True))
        return row, offset

    def _check_ids(self, ids: np.ndarray, shard: TokenShard) -> None:
        largest, least = int(ids.max()), int(ids.min())
        if largest >= self._vocab_size or least < 0:
            raise DloError(
                f"sources.{self.name}: token ids must be below the tokenizer's vocabulary size {self._vocab_size}, got"
                f" {largest if least >= 0 else least} in {shard.name}; set the tokenizer that the source was tokenised"
                " with"
            )


def _distinct(numbers: np.ndarray) -> list[int]:
    """Returns the distinct values of an array, ascending; sooner than numpy where all are equal."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])]
    return [int(number) for number in np.unique(numbers)]


def count_from_begins(positions: np.ndarray, row: np.ndarray, offset: np.ndarray) -> None:
    """Writes positions that count from 0 in each row, and again from each place where a document begins.

    Args:
        positions: Positions to write, int64 [B, L], contiguous.
        row: Row of each place, int64 [D].
        offset: Position of each place in its row; places at the end of a row, L, are ignored.
    """
    length = positions.shape[1]
    flat = positions.reshape(-1)
    inside = offset < length
    begins = np.concatenate([np.arange(0, len(flat), length), row[inside] * length + offset[inside]])
    begins.sort()
    begins = begins[np.diff(begins, prepend=-1) > 0]  # An empty document begins where the next one does.
    flat[:] = 1
    flat[0] = 0
    flat[begins[1:]] = 1 - np.diff(begins)
    np.cumsum(flat, out=flat)


class JoinedWindows:
    """Windows of several datasets, one after the other; a :class:`dlo_framework.data.ReadAheadDataset`.

    Args:
        parts: Datasets, all with windows of the same length.
        batches_ahead: Number of batches that are fetched ahead, of remote shards; 0 for none.
    """

    #: For the loader: nothing is drawn.
    uses_global_random = False
    #: None: all windows have the same length.
    lengths: np.ndarray | None = None
    #: None: the data has no preferences.
    pairs: np.ndarray | None = None

    def __init__(self, parts: Sequence[Any], batches_ahead: int = 0) -> None:
        self.parts = list(parts)
        self._remote = [part for part in parts if isinstance(part, TokenWindows) and part.is_remote]
        self.batches_ahead = batches_ahead if self._remote else 0
        self._starts = np.cumsum([0] + [len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn windows, in the order of the draws."""
        batches = []
        for part, rows, some in self._draws_of(draws):
            batches.append((rows, part.fetch(some)))
        if len(batches) == 1:
            return finish(batches[0][1], draws)
        joined: Batch = {}
        for name, first in batches[0][1].items():
            out = torch.empty((len(draws), *first.shape[1:]), dtype=first.dtype)
            for rows, batch in batches:
                out.numpy()[rows] = batch[name].numpy()  # torch's own takes longer
            joined[name] = out
        return finish(joined, draws)

    def count_targets(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of targets of windows."""
        targets = np.empty(index.shape, np.int64)
        which = self.part_of(index)
        for number in _distinct(which):
            chosen = which == number
            targets[chosen] = self.parts[number].count_targets(index[chosen] - self._starts[number])
        return targets

    def part_of(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of the dataset of each window."""
        return np.searchsorted(self._starts, index, side="right") - 1

    def read_ahead(self, draws: list[Draw]) -> None:
        """Begins to fetch the drawn windows of remote shards."""
        for part, _, some in self._draws_of(draws):
            if part in self._remote:
                part.read_ahead(some)

    def _draws_of(self, draws: list[Draw]) -> list[tuple[Any, np.ndarray, list[Draw]]]:
        if len(self.parts) == 1:
            return [(self.parts[0], np.arange(len(draws)), draws)]
        index = np.array([draw.index for draw in draws])
        which = self.part_of(index)
        by_part = []
        for number in _distinct(which):
            rows = np.flatnonzero(which == number)
            within = (index[rows] - self._starts[number]).tolist()
            some = [Draw(at, *draws[row][1:]) for row, at in zip(rows.tolist(), within, strict=True)]
            by_part.append((self.parts[number], rows, some))
        return by_part
