"""Datamodule with preferences for causal language models: `PreferenceData`.

All answers of a preference are in one row, so that no slice of a batch separates them. A row is a window of documents,
as in :mod:`dlo_tasks.language.batches`: each answer with its prompt is a document, whose positions begin at 0 and which
attends to itself only. A row has one preference, or as many as fit.

Shapes: B rows, L positions, A answers of the row that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_framework.errors import DloError
from dlo_tasks.language.batches import MULTIPLE, Batch, PackingName, StepDraws, finish, gather_tokens
from dlo_tasks.language.packing import pack_best_fit, ranges
from dlo_tasks.language.preference_records import COLUMNS, read_preferences, style_preferences, tokenize_preferences
from dlo_tasks.language.records import format_location
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, TokenStore
from dlo_tasks.language.tokenization import cached_documents, tokenize_in_processes, total_size
from dlo_tasks.language.tokenizer import find_filler_id

LongAnswers = Literal["truncate", "drop", "error"]

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
    :meth:`dlo_tasks.language.preference_data.PreferenceRows.fetch` for the batches.

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
                preferences = style_preferences(files, on_bytes, unpaired=self.unpaired)
            else:
                preferences = read_preferences(files, self.columns, unpaired=self.unpaired, on_bytes=on_bytes)
            tokenize = partial(tokenize_preferences, tokenizer=tokenizer, files=files)
            return tokenize_in_processes(preferences, tokenize, self.tokenize_processes, total_size(files))

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
            store,
            documents,
            files,
            unpaired=self.unpaired,
            seq_len=self.seq_len,
            packing=self.packing,
            long_samples=self.answer_policy,
            filler=find_filler_id(self.tokenizer),
            by_length=split == "val",
        )

    def _made_of(self) -> str:
        return super()._made_of() + ("-unpaired" if self.unpaired else "")


# --- rows ---------------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """Token sequences of a store, each a prompt and an answer, which may be of different documents.

    Attributes:
        prompt: Index of each prompt's first token in the store, int64 [N].
        prompt_length: Tokens of each prompt, int64 [N].
        answer: Index of each answer's first token in the store, int64 [N].
        answer_length: Tokens of each answer, int64 [N].
    """

    prompt: np.ndarray
    prompt_length: np.ndarray
    answer: np.ndarray
    answer_length: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Positions of each sequence, int64 [N]: the last token is only a target."""
        return self.prompt_length + self.answer_length - 1

    def select(self, index: np.ndarray) -> Answers:
        """Returns some of the sequences."""
        return Answers(*(values[index] for values in self))

    def cut(self, seq_len: int) -> Answers:
        """Returns the sequences with answers that end with the window."""
        return self._replace(answer_length=np.minimum(self.answer_length, seq_len + 1 - self.prompt_length))


class PreferenceStatistics(NamedTuple):
    """Statistics of a layout of preferences.

    Attributes:
        preferences: Number of pairs, or of completions.
        unpaired: Whether they are completions.
        desirable: Number of desirable completions; of pairs, of chosen answers.
        tokens: Positions of all answers with their prompts.
        rows: Number of rows.
        capacity: Positions of all rows.
        longest: Positions of the longest answer with its prompt.
        too_long: Number of preferences longer than the window.
        long_samples: Policy for them.
    """

    preferences: int
    unpaired: bool
    desirable: int
    tokens: int
    rows: int
    capacity: int
    longest: int
    too_long: int
    long_samples: LongAnswers

    def __str__(self) -> str:
        kind = f"completions ({self.desirable:,} desirable)" if self.unpaired else "pairs"
        made = {"truncate": "truncated", "drop": "dropped", "error": "refused"}[self.long_samples]
        return (
            f"{self.preferences:,} {kind}, {self.tokens:,} tokens in {self.rows:,} rows,"
            f" {self.tokens / max(1, self.capacity):.1%} full; {self.longest:,} long at most; {self.too_long:,} too"
            f" long: {made}"
        )


class PreferenceRows:
    """Dataset of rows of preferences.

    Args:
        store: Token store.
        answers: Sequences of the store.
        members: Sequences of each preference, int64 [P, M]: chosen and rejected, or one completion.
        preferred: Whether each of them is preferred or desirable, bool [P, M].
        mismatched: Sequences with a prompt and another prompt's completion, one for each preference, for the estimate
            of a divergence; None for pairs.
        row: Row of each preference, int64 [P].
        width: Positions of each row; None for the longest row of a batch.
        filler: Id at unused positions.

    Attributes:
        targets: Positions of each row's chosen answers and their prompts, int64 [rows].
        pairs: Number of preferences of each row, int64 [rows].
        lengths: Positions of each row, int64 [rows]; None where all are of equal length.
    """

    def __init__(
        self,
        store: TokenStore,
        answers: Answers,
        members: np.ndarray,
        preferred: np.ndarray,
        mismatched: Answers | None,
        row: np.ndarray,
        width: int | None,
        filler: int,
    ) -> None:
        order = np.argsort(row, kind="stable")
        rows = int(row.max()) + 1
        self._store, self._answers, self._filler, self._width = store, answers, filler, width
        self._members, self._preferred = members[order], preferred[order]
        self._mismatched = None if mismatched is None else mismatched.select(order)
        self._first = np.searchsorted(row[order], np.arange(rows + 1))
        positions = answers.positions[members]  # [P, M]
        self.pairs: np.ndarray | None = np.bincount(row, minlength=rows)
        self.targets = np.bincount(row, (positions * preferred).sum(axis=1), rows).astype(np.int64)
        self.lengths = np.bincount(row, positions.sum(axis=1), rows).astype(np.int64) if width is None else None

    def __len__(self) -> int:
        return len(self._first) - 1

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn rows.

        All are int64 `[B, L]`, unless a shape is given:

        * `input_ids` and `position_ids`;
        * `labels`, the next token where it is a token of an answer, else -100; `context_labels`, the next token
          elsewhere inside a document, else -100;
        * `sequence_ids`, the number of the answer in its row, -1 at unused positions;
        * `answers` `[B, A]`: 1 for preferred or desirable answers, 0 for others, -1 where a row has fewer;
        * `mismatched_` with `input_ids`, `position_ids`, `labels` and `sequence_ids`, for completions;
        * `tokens_in_step` and `pairs_in_step`, scalars: chosen tokens with their prompts, and preferences, of the
          optimizer step.
        """
        spans = [(int(self._first[draw.index]), int(self._first[draw.index + 1])) for draw in draws]
        each = self._members.shape[1]
        most = max(past - first for first, past in spans) * each
        held = [self._answers.select(self._members[first:past].ravel()) for first, past in spans]
        batch = self._gather(held, draws.length if isinstance(draws, StepDraws) else None)
        answers = np.full((len(draws), most), -1, dtype=np.int64)
        for number, (first, past) in enumerate(spans):
            answers[number, : (past - first) * each] = self._preferred[first:past].ravel()
        batch["answers"] = torch.from_numpy(answers)
        if self._mismatched is not None:
            others = self._gather([self._mismatched.select(np.arange(*span)) for span in spans], None)
            del others["context_labels"]
            batch |= {f"mismatched_{name}": values for name, values in others.items()}
        return finish(batch, draws)

    def count_targets(self, index: np.ndarray) -> np.ndarray:
        """Returns the positions of rows' chosen answers and their prompts, int64 of the shape of ``index``."""
        return self.targets[index]

    def _gather(self, held: Sequence[Answers], longest: int | None) -> Batch:
        """Returns a batch with these sequences in its rows, one after the other.

        Args:
            held: Sequences of each row.
            longest: Positions of the longest row, if it is known over all ranks.
        """
        longest = longest or max(int(row.positions.sum()) for row in held)
        width = self._width or -(-longest // MULTIPLE) * MULTIPLE
        shape = len(held), width
        each = np.array([len(row.prompt) for row in held])
        answers = Answers(*(np.concatenate(values) for values in zip(*held, strict=True)))
        source = np.concatenate([np.r_[p : p + n, a : a + m] for p, n, a, m in zip(*answers, strict=True)])
        length = answers.positions
        ends = np.cumsum(length + 1)
        inputs, following = np.delete(source, ends - 1), np.delete(source, ends - length - 1)
        starts = np.concatenate([np.cumsum(row.positions) - row.positions for row in held])
        begin = np.repeat(np.arange(len(held)) * width, each) + starts
        batch = gather_tokens(self._store, inputs, following, begin, length, shape, self._filler, context=True)
        numbers = np.full(shape[0] * width, -1, dtype=np.int64)
        numbers[np.repeat(begin, length) + ranges(length)] = np.repeat(ranges(each), length)
        return {**batch, "sequence_ids": torch.from_numpy(numbers).view(shape)}


def lay_out_preferences(
    store: TokenStore,
    documents: np.ndarray,
    files: Sequence[Path],
    *,
    unpaired: bool,
    seq_len: int,
    packing: PackingName,
    long_samples: LongAnswers,
    filler: int,
    by_length: bool = False,
) -> tuple[PreferenceRows, PreferenceStatistics]:
    """Returns preferences in rows, with statistics.

    Args:
        store: Token store with two documents for each preference; see :mod:`dlo_tasks.language.preference_records`.
        documents: Indices of the documents, int64 [D], both of each preference.
        files: Source files, for error messages.
        unpaired: Whether each preference has one answer only.
        seq_len: Positions of the longest answer with its prompt; a packed row has twice as many.
        packing: `best_fit`, as many preferences in a row as fit, or `none`, one in each row.
        long_samples: Policy for longer answers: `truncate` removes their end, `drop` leaves the preference out.
        filler: Id at unused positions.
        by_length: Whether to sort rows without packing by length.

    Raises:
        DloError: If an answer is too long, under `error`; if a prompt leaves no position for its answer, under
            `truncate`; or if no preference is left.
    """
    every = _find_answers(store, documents)
    has = store.bounds[documents + 1] > store.bounds[documents]  # bool [D]
    pairs = np.arange(len(documents)).reshape(-1, 2)
    long = ((every.positions > seq_len) & has)[pairs].any(axis=1)
    full = ((every.prompt_length > seq_len) & has)[pairs].any(axis=1)
    refused = long if long_samples == "error" else full & (long_samples == "truncate")
    if refused.any():
        _refuse(store, documents, files, every, int(np.argmax(refused)), int(refused.sum()), seq_len, full)
    keep = ~long if long_samples == "drop" else np.ones(len(pairs), dtype=bool)
    if not keep.any():
        raise DloError(
            f"long_samples: drop must leave a preference, got none of {len(pairs)} that fits seq_len {seq_len}; raise"
            " seq_len"
        )
    pairs = pairs[keep]
    answers = every.cut(seq_len)
    members, mismatched = pairs, None
    preferred = np.tile([True, False], (len(pairs), 1))
    if unpaired:
        preferred = has[pairs][:, :1]
        members = np.where(preferred, pairs[:, :1], pairs[:, 1:])
        own, other = answers.select(members[:, 0]), every.select(np.roll(members[:, 0], max(1, len(members) // 2)))
        mismatched = own._replace(answer=other.answer, answer_length=other.answer_length).cut(seq_len)
    length = answers.positions[members].sum(axis=1)
    taken = length if mismatched is None else np.maximum(length, mismatched.positions)
    width: int | None = 2 * seq_len
    if packing == "best_fit":
        row = pack_best_fit(taken, 2 * seq_len).window
    else:
        width, row = None, np.arange(len(members))
        if by_length:
            row[np.argsort(length, kind="stable")] = np.arange(len(members))
    dataset = PreferenceRows(store, answers, members, preferred, mismatched, row, width, filler)
    statistics = PreferenceStatistics(
        preferences=len(members),
        unpaired=unpaired,
        desirable=int(preferred.sum()),
        tokens=int(length.sum()),
        rows=len(dataset),
        capacity=len(dataset) * width if width is not None else int(length.sum()),
        longest=int(answers.positions[members].max()),
        too_long=int(long.sum()),
        long_samples=long_samples,
    )
    return dataset, statistics


def _find_answers(store: TokenStore, documents: np.ndarray) -> Answers:
    """Returns the documents as sequences: the prompt ends before the first target."""
    start, stop = (store.bounds[documents + past].astype(np.int64) for past in (0, 1))
    targets = np.append(np.flatnonzero(store.learned()), store.tokens)
    first = np.minimum(targets[np.searchsorted(targets, start)], stop)
    return Answers(start, first - start, first, stop - first)


def _refuse(
    store: TokenStore,
    documents: np.ndarray,
    files: Sequence[Path],
    answers: Answers,
    number: int,
    count: int,
    seq_len: int,
    full: np.ndarray,
) -> None:
    document = int(documents[2 * number])
    place = format_location(files, int(store.files[document]), int(store.rows[document]))
    two = slice(2 * number, 2 * number + 2)
    more = f" ({count} preferences are too long)" if count > 1 else ""
    if full[number]:
        tokens = int(answers.prompt_length[two].max())
        raise DloError(
            f"{place}: prompt must have at most seq_len = {seq_len} tokens, so that its answers have at least one, got"
            f" {tokens}{more}; set seq_len to more than {tokens}, or long_samples to drop"
        )
    tokens = int(answers.positions[two].max()) + 1
    raise DloError(
        f"{place}: prompt and answer must have at most seq_len + 1 = {seq_len + 1} tokens, got {tokens}{more}; set"
        f" seq_len to at least {tokens - 1}, or long_samples to truncate or drop"
    )
