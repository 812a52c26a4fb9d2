"""Tokenised shards: contiguous tokens with the bounds of documents, in constant memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dlo_framework.data.remote import LocalFile, RemoteFile
from dlo_framework.errors import DloError
from dlo_tasks.llm.token_cache import TokenStore

_PROBES = 32  # neighbouring bounds that one step of a search reads
_INTERPOLATIONS = 6


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

    It is an interpolation search: a few steps, each of which reads ``_PROBES`` neighbouring bounds per token, find
    documents of similar lengths; a bisection finds the others. Mapped bounds stay on the disk.

    Args:
        shard: Shard of the tokens.
        tokens: Tokens of the shard, int64 of any shape, each at least 0 and below ``shard.tokens``.
    """
    wanted = tokens.ravel()
    assert not len(wanted) or (wanted.min() >= 0 and wanted.max() < shard.tokens)
    found = np.zeros(wanted.shape, np.int64)
    left = np.arange(len(wanted))  # tokens whose document is not found yet [P]
    low, high = np.zeros_like(left), np.full_like(left, shard.documents)
    low_token, high_token = np.zeros_like(left), np.full_like(left, shard.tokens)
    step = 0
    while len(left):
        token = wanted[left]
        if step < _INTERPOLATIONS:
            share = (token - low_token) / np.maximum(high_token - low_token, 1)
            guess = low + (share * (high - low)).astype(np.int64)
        else:
            guess = (low + high) // 2
        step += 1
        first = np.maximum(guess - _PROBES // 2, low)
        bounds = shard.bounds(np.minimum(first[:, None] + np.arange(_PROBES), shard.documents))  # [P, probes]
        count = (bounds <= token[:, None]).sum(1)
        inside = (count > 0) & (count < _PROBES)
        found[left[inside]] = (first + count - 1)[inside]
        above = count > 0  # and not inside: all probes begin before the token
        low, low_token = np.where(above, first + _PROBES - 1, low), np.where(above, bounds[:, -1], low_token)
        high, high_token = np.where(above, high, first), np.where(above, high_token, bounds[:, 0])
        left, low, high = left[~inside], low[~inside], high[~inside]
        low_token, high_token = low_token[~inside], high_token[~inside]
    return found.reshape(tokens.shape)


def map_bytes(path: Path, random: bool = False) -> np.ndarray:
    """Returns the bytes of a file that is not empty, mapped, uint8.

    Args:
        path: Path of the file.
        random: Whether reads go to random places, so that the kernel reads no neighbouring pages.
    """
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if random and hasattr(mmap, "MADV_RANDOM"):
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


class RecordShard:
    """Shard whose documents are members of a tar in WebDataset's layout.

    Args:
        name: Name of the file.
        index: File with the first token of each document and the number of tokens, int64 `[documents + 1]`.
        read_record: Function that returns the ids of a document.
        range_of: Function that returns the (offset, size) of a document in the file.
        file: File, for reading ahead.
    """

    def __init__(
        self,
        name: str,
        index: Path,
        read_record: Callable[[int], np.ndarray],
        range_of: Callable[[int], tuple[int, int]],
        file: LocalFile | RemoteFile,
    ) -> None:
        self.name, self._index = name, index
        self._bounds = np.load(index, mmap_mode="r", allow_pickle=False)
        self.documents, self.tokens = len(self._bounds) - 1, int(self._bounds[-1])
        self._read_record, self._range_of, self.file = read_record, range_of, file

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        return np.asarray(self._bounds[index])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns the ids of windows, each of as many documents as it spans."""
        firsts, lasts = document_of(self, np.stack([starts, starts + length - 1]))
        rows = []
        for start, first, last in zip(starts.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            bounds = self.bounds(np.arange(first, last + 2)).tolist()
            parts = [self._document(first + number, *pair) for number, pair in enumerate(pairwise(bounds))]
            rows.append(np.concatenate(parts)[start - bounds[0] :][:length])
        return np.stack(rows)

    def _document(self, number: int, begin: int, end: int) -> np.ndarray:
        """Returns the ids of a document, whose bounds are given."""
        ids = self._read_record(number)
        if len(ids) != end - begin:
            raise DloError(
                f"{self.name}: document {number} must have {end - begin} tokens, as when it was indexed, got"
                f" {len(ids)}; delete {self._index}"
            )
        return ids

    def ranges(self, starts: np.ndarray, length: int) -> list[tuple[int, int]]:
        """Returns the ranges of the documents of windows."""
        firsts, lasts = document_of(self, np.stack([starts, starts + length - 1]))
        wanted = {
            number
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
            for number in range(first, last + 1)
        }
        return [self._range_of(number) for number in sorted(wanted)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bounds": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bounds = np.load(self._index, mmap_mode="r", allow_pickle=False)
