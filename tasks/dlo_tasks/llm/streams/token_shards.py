"""Tokenised shards: contiguous tokens with the bounds of documents, in constant memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dlo_framework.data.remote import ByteFile
from dlo_framework.errors import DloError
from dlo_tasks.llm.token_cache import TokenStore


class TokenShard(Protocol):
    """Documents of one or more files, one after the other.

    Attributes:
        name: Name for messages.
        tokens: Number of tokens.
        documents: Number of documents.
    """

    name: str
    tokens: int
    documents: int

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents, int64; of index ``documents``, the number of tokens."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids of the tokens ``start`` to ``stop - 1``, in the file's integer type."""

    def read_ahead(self, start: int, stop: int) -> None:
        """Begins to fetch these tokens."""


def document_of(shard: TokenShard, tokens: np.ndarray) -> np.ndarray:
    """Returns the document of each token: the last that begins at it or before, int64 of its shape.

    It is a bisection whose steps read one bound per token: mapped bounds stay on the disk.
    """
    low, high = np.zeros(tokens.shape, np.int64), np.full(tokens.shape, shard.documents, np.int64)
    while True:
        middle = (low + high) // 2
        active = high - low > 1
        if not active.any():
            return low
        before = shard.bounds(middle) <= tokens
        low = np.where(active & before, middle, low)
        high = np.where(active & ~before, middle, high)


class StoreShard:
    """Shard of dlo's own token cache.

    Args:
        path: Path of the cache file.

    Raises:
        DloError: If it has tokens that are not targets, such as conversations.
    """

    def __init__(self, path: Path) -> None:
        self._store = TokenStore(path)
        self.name, self.tokens, self.documents = str(path), self._store.tokens, len(self._store)
        if not self._store.all_learned:
            raise DloError(
                f"{path} must be plain text, got conversations or completions; name their files under `files`, not"
                " the cache"
            )

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        return self._store.bounds[index]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids of some tokens."""
        return self._store.read(slice(start, stop))[0]

    def read_ahead(self, start: int, stop: int) -> None:
        """Does nothing: the kernel reads ahead in a mapped file."""


class RecordShard:
    """Shard whose documents are records of a container format: MDS, WebDataset or Parquet.

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
        file: ByteFile,
    ) -> None:
        self.name, self._index = name, index
        self._bounds = np.load(index, mmap_mode="r", allow_pickle=False)
        self.documents, self.tokens = len(self._bounds) - 1, int(self._bounds[-1])
        self._read_record, self._range_of, self._file = read_record, range_of, file

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        return np.asarray(self._bounds[index])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids of some tokens, of as many documents as they span."""
        first, last = document_of(self, np.array([start, stop - 1])).tolist()
        parts = []
        for number in range(first, last + 1):
            begin, end = self.bounds(np.array([number, number + 1])).tolist()
            ids = self._read_record(number)
            if len(ids) != end - begin:
                raise DloError(
                    f"{self.name}: document {number} must have {end - begin} tokens, as when it was indexed, got"
                    f" {len(ids)}; delete {self._index}"
                )
            parts.append(ids[max(0, start - begin) : stop - begin])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_ahead(self, start: int, stop: int) -> None:
        """Begins to fetch the documents of some tokens."""
        first, last = document_of(self, np.array([start, stop - 1])).tolist()
        self._file.read_ahead([self._range_of(number) for number in range(first, last + 1)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bounds": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bounds = np.load(self._index, mmap_mode="r", allow_pickle=False)
