"""Datamodule with preferences for causal language models: `PreferenceData`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlo_framework.errors import DloError
from dlo_tasks.llm.preference_records import COLUMNS, read_preferences, style_preferences, tokenize_preferences
from dlo_tasks.llm.preference_rows import LongAnswers, lay_out_preferences
from dlo_tasks.llm.text_data import TextData
from dlo_tasks.llm.token_cache import Document, TokenStore
from dlo_tasks.llm.tokenization import cached_documents, tokenize_in_processes, total_size
from dlo_tasks.llm.tokenizer import find_filler_id

#: Version of the documents that are made of preferences.
_FORMAT = 1


class PreferenceData(TextData):
    """Loads preferences for `PreferenceLM`: prompts with a chosen and a rejected answer, or with a judged one.

    ```yaml
    data:
      class_path: PreferenceData
      init_args: {train_files: "pairs/*.jsonl", seq_len: 1024, batch_size: 16}
    ```

    Files are JSON lines or Parquet whose records have `prompt`, `chosen` and `rejected`; all three are strings, or
    lists of messages, which the chat template renders. Without `prompt`, `chosen` and `rejected` are full conversations
    that begin with the same messages. With `unpaired`, records may have `prompt`, `completion` and `label`, and each
    answer of a pair becomes a completion of its own. Without files, the data is code of Python's standard library whose
    chosen version has double quotes, and whose rejected version has single quotes.

    Both answers of a pair are documents of one row, which do not attend to each other, so that no rank, micro-batch or
    slice separates them. A packed row has as many pairs as fit into `2 * seq_len` positions. See
    :meth:`dlo_tasks.llm.preference_rows.PreferenceRows.fetch` for the batches.

    Args:
        unpaired: Whether to load single completions, each desirable or undesirable, for `objective: kto`.
        columns: Other names of the columns, such as `{chosen: answer_a}`.
        seq_len: Positions of an answer with its prompt: the context length in training.
        batch_size: Rows per micro-step, summed over all data-parallel ranks.
        packing: `best_fit` fills rows of `2 * seq_len` positions with pairs; `none` has one pair in each row, padded to
            the longest row of its batch.
        long_samples: Policy for answers that do not fit `seq_len`: `truncate` removes their end, `drop` leaves the pair
            out, `error` ends the run with the file and line. A prompt that leaves no position for an answer is an error
            unless it is dropped.
        val_fraction: Fraction of the prompts to hold out, chosen by a hash of their contents; 0 for none.
        **text_data: Further arguments of `TextData`.

    Raises:
        DloError: If arguments are out of range; by :meth:`check`, if files are missing or empty, or a first record is
            invalid; later, for a broken record (with its line), a missing tokenizer or chat template, or a prompt that
            fills the window.
    """

    column_names = COLUMNS
    mixes_sources = False

    #: A row has at least the two answers of a pair.
    pads_documents = False

    def __init__(
        self,
        unpaired: bool = False,
        columns: dict[str, str] | None = None,
        seq_len: int = 512,
        batch_size: int = 16,
        packing: Any = "best_fit",
        long_samples: LongAnswers = "truncate",
        val_fraction: float = 0.05,
        **text_data: Any,
    ) -> None:
        super().__init__(
            columns=columns,
            seq_len=seq_len,
            batch_size=batch_size,
            packing=packing,
            long_samples=long_samples,
            val_fraction=val_fraction,
            **text_data,
        )
        self.unpaired = unpaired
        self.answer_policy: LongAnswers = long_samples

    def read(self, files: Sequence[Path]) -> Iterator[Any]:
        """Yields the preferences of some files."""
        return read_preferences(files, self.columns, unpaired=self.unpaired)

    def tokenize(self, files: Sequence[Path], tokenizer: Any) -> str:
        """Tokenises some files, unless they are cached; returns the name of the cache file."""
        embedded = self.train_files is None and files == self._files("train")

        def documents(on_bytes: Callable[[int], object]) -> Iterable[Document]:
            if embedded:
                found = style_preferences(files, on_bytes, unpaired=self.unpaired)
            else:
                found = read_preferences(files, self.columns, unpaired=self.unpaired, on_bytes=on_bytes)
            tokenize = partial(tokenize_preferences, tokenizer=tokenizer, files=files)
            return tokenize_in_processes(found, tokenize, self.tokenize_processes, total_size(files))

        options = ["preferences", _FORMAT, self.unpaired, embedded, sorted(self.columns.items())]
        return cached_documents(files, tokenizer, self.cache_dir, documents, options)

    def lay_out(self, split: str, store: TokenStore, documents: np.ndarray, files: Sequence[Path]) -> tuple[Any, Any]:
        """Returns the dataset of some documents of a store, two for each preference, and its statistics.

        Raises:
            DloError: If a prompt fills the window, or no preference is left.
        """
        if not len(documents):
            raise DloError(f"preferences must have at least one pair of different answers, got none in {files[0]}")
        return lay_out_preferences(
            *(store, documents, files),
            unpaired=self.unpaired,
            seq_len=self.seq_len,
            packing=self.packing,
            long_samples=self.answer_policy,
            filler=find_filler_id(self.tokenizer),
            by_length=split == "val",
        )

    def _made_of(self) -> str:
        return super()._made_of() + ("-unpaired" if self.unpaired else "")
