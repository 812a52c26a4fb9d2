"""Lays preferences out in rows: all answers of a preference are in one row, so that no slice of a batch separates them.

A row is a window of documents, as in :mod:`dlo_tasks.llm.batches`: each answer with its prompt is a document, whose
positions begin at 0 and which attends to itself only. A row has one preference, or as many as fit.

Shapes: B rows, L positions, A answers of the row that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_framework.errors import DloError
from dlo_tasks.llm.batches import IGNORE_INDEX, MULTIPLE, Batch, PackingName, finish, unused_positions
from dlo_tasks.llm.packing import pack_best_fit
from dlo_tasks.llm.records import format_location
from dlo_tasks.llm.token_cache import TokenStore

LongAnswers = Literal["truncate", "drop", "error"]


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
        known = getattr(draws, "length", None)
        batch = self._gather(held, known)
        answers = np.full((len(draws), most), -1, dtype=np.int64)
        for number, (first, past) in enumerate(spans):
            answers[number, : (past - first) * each] = self._preferred[first:past].ravel()
        batch["answers"] = torch.from_numpy(answers)
        if self._mismatched is not None:
            others = self._gather([self._mismatched.select(np.arange(*span)) for span in spans], None)
            del others["context_labels"]
            batch |= {f"mismatched_{name}": values for name, values in others.items()}
        return finish(batch, draws)

    def _gather(self, held: Sequence[Answers], longest: int | None) -> Batch:
        """Returns a batch with these sequences in its rows, one after the other.

        Args:
            held: Sequences of each row.
            longest: Positions of the longest row, if it is known over all ranks.
        """
        longest = longest or max(int(row.positions.sum()) for row in held)
        width = self._width or -(-longest // MULTIPLE) * MULTIPLE
        shape = len(held), width
        each = [len(row.prompt) for row in held]
        answers = Answers(*(np.concatenate(values) for values in zip(*held, strict=True)))
        runs = zip(*answers, strict=True)
        source = np.concatenate([np.r_[p : p + n, a : a + m] for p, n, a, m in runs])
        tokens, learned = self._store.read(source)
        length = answers.positions
        ends = np.cumsum(length + 1)
        is_input, is_next = np.ones(len(source), dtype=bool), np.ones(len(source), dtype=bool)
        is_input[ends - 1] = is_next[ends - length - 1] = False
        starts = np.concatenate([np.cumsum(row.positions) - row.positions for row in held])
        begin = np.repeat(np.arange(len(held)) * width, each) + starts
        within = np.concatenate([np.arange(number) for number in length])
        target = np.repeat(begin, length) + within
        empty = np.full(shape[0] * width, IGNORE_INDEX, dtype=np.int64)
        flat = {name: empty.copy() for name in ("labels", "context_labels")}
        flat["input_ids"] = np.full_like(empty, self._filler)
        flat["position_ids"] = unused_positions(begin, shape)
        flat["sequence_ids"] = np.full_like(empty, -1)
        following, taught = tokens[is_next], learned[is_next]
        flat["input_ids"][target] = tokens[is_input]
        flat["labels"][target] = np.where(taught, following, IGNORE_INDEX)
        flat["context_labels"][target] = np.where(taught, IGNORE_INDEX, following)
        flat["position_ids"][target] = within
        numbers = np.concatenate([np.arange(count) for count in each])
        flat["sequence_ids"][target] = np.repeat(numbers, length)
        return {name: torch.from_numpy(values).view(shape) for name, values in flat.items()}


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
        store: Token store with two documents for each preference; see :mod:`dlo_tasks.llm.preference_records`.
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
