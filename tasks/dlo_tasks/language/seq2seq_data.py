"""Datamodule with pairs of source and target for encoder-decoder language models: `Seq2SeqData`.

Shapes: B rows, S positions of sources, T positions of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_framework.errors import DloError, check_number
from dlo_tasks.language.batches import IGNORE_INDEX, MULTIPLE, Batch, PackingName, Prompts, finish, pad_right
from dlo_tasks.language.chat import read_prompts
from dlo_tasks.language.encoder_decoder import encode_sources
from dlo_tasks.language.packing import LongSamples, cut_documents, pack_best_fit
from dlo_tasks.language.records import Record, format_location, read_records
from dlo_tasks.language.span_corruption import SpanCorruption, add_sentinels, find_sentinels
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, TokenStore
from dlo_tasks.language.tokenization import cached_documents, encode_texts, in_calls, tokenize_in_processes, total_size
from dlo_tasks.language.tokenizer import find_filler_id

#: Version of the documents that are made of pairs.
_FORMAT = 1


class Seq2SeqData(TextData):
    """Loads pairs of source and target for `Seq2SeqLM`, or makes them from plain text by span corruption.

    ```yaml
    data:
      class_path: Seq2SeqData
      init_args: {train_files: "pairs/*.jsonl", seq_len: 512, target_len: 128, batch_size: 16}
    ```

    Files are JSON lines or Parquet whose records all have `source` and `target`, or all have `text`. Any other file is
    one text. Text is cut into samples, and random spans of each become its target, as in
    [T5](https://arxiv.org/abs/1910.10683); each epoch removes other spans. Sentinels are the tokenizer's
    `<extra_id_0>`, `<extra_id_1>` and so on; a tokenizer without them gets a hundred as its last ids. Without files,
    the text is the source code of Python's standard library.

    Batches are dicts of int64 tensors: `input_ids` `[B, S]` and `labels` `[B, T]`, -100 at unused positions, with
    `attention_mask` `[B, S]` for padded rows, or `encoder_segment_ids` `[B, S]` and `decoder_segment_ids` `[B, T]` for
    packed rows, which number the pairs of a row from 1; and `tokens_in_step`, as in `TextData`. Sources and targets end
    with the end-of-text token.

    Args:
        noise_density: Fraction of the tokens that span corruption removes.
        mean_span: Mean number of tokens of a removed span.
        columns: Other names of the columns, such as `{source: article}`.
        seq_len: Positions of a source.
        target_len: Positions of a target. Default: `seq_len` for pairs; for text, those of a source of `seq_len`.
        batch_size: Rows per micro-step, summed over all data-parallel ranks.
        packing: `best_fit` fills rows with several pairs, without attention between them, for models with relative
            positions, such as T5. `none` pads each pair to the longest of its batch, and groups pairs of similar
            length; other models get it, with a line that says so.
        long_samples: Policy for pairs that are too long: `truncate` removes the end of a source or target, `drop`
            leaves the pair out, `error` ends the run with the file and line. Default: `truncate`. Text is `split`.
        predict_files: Files of sources for `dlo predict`: text with one source per line, or JSON lines or Parquet with
            a `source`.
        val_fraction: Fraction of the documents to hold out, chosen by a hash of their contents; 0 for none.
        **text_data: Further arguments of `TextData`.

    Raises:
        DloError: If arguments are out of range; by :meth:`check`, if files are missing or empty, or a first record is
            invalid; later, for a broken record, with its line.
    """

    column_names = ("source", "target", "text")
    mixes_sources = False
    model_kind = "seq2seq"

    def __init__(
        self,
        noise_density: float = 0.15,
        mean_span: float = 3.0,
        columns: dict[str, str] | None = None,
        seq_len: int = 512,
        target_len: int | None = None,
        batch_size: int = 16,
        packing: PackingName = "best_fit",
        long_samples: LongSamples | None = None,
        predict_files: str | list[str] | None = None,
        val_fraction: float = 0.05,
        **text_data: Any,
    ) -> None:
        super().__init__(
            columns=columns,
            seq_len=seq_len,
            batch_size=batch_size,
            packing=packing,
            long_samples=long_samples,
            predict_files=predict_files,
            val_fraction=val_fraction,
            **text_data,
        )
        self.corruption = SpanCorruption(noise_density, mean_span)
        check_number("target_len", target_len, "at least 1", "remove it for the default")
        self._given_target_len = target_len

    @cached_property
    def corrupts(self) -> bool:
        """Whether the files have text, whose spans are removed, by their first records."""
        return all(first.kind == "text" for _, first in self._first_records("train_files", "val_files"))

    @property
    def target_len(self) -> int:
        """Positions of a target."""
        if self._given_target_len is not None:
            return self._given_target_len
        if not self.corrupts:
            return self.seq_len
        text = self.corruption.longest(self.seq_len, 2 * self.seq_len, self.seq_len)
        return int(self.corruption.count(np.array(text)).target) + 1

    def check(self) -> None:
        """Checks the files before a run: raises DloError if they are missing, or a first record is invalid."""
        super().check()
        if self.corrupts:
            self.corruption.longest(self.seq_len, self.target_len, self.seq_len)
            if self.long_samples not in (None, "split"):
                raise DloError(f"long_samples must be split for text, got {self.long_samples}; remove it")
        elif self.long_samples == "split":
            raise DloError("long_samples must be truncate, drop or error for pairs, got split; remove it")

    def read(self, files: Sequence[Path]) -> Iterator[Any]:
        """Yields the records of some files, of one kind."""
        return self._records(files, None)

    def _records(self, files: Sequence[Path], on_bytes: Callable[[int], object] | None) -> Iterator[Record]:
        names = {"prompt": "source", "completion": "target", "text": "text"}
        columns = {name: self.columns.get(own, own) for name, own in names.items()}
        first: str | None = None
        for record in read_records(files, columns, *([] if on_bytes is None else [on_bytes])):
            first = first or record.kind
            if record.kind not in ("pair", "text") or record.kind != first:
                kinds = "source and target" if first == "pair" else "text"
                raise DloError(
                    f"{format_location(files, record.file, record.row)}: records must all have"
                    f" {columns['prompt']!r} and {columns['completion']!r}, or all {columns['text']!r}, got one unlike"
                    f" the first, which has {kinds}; write all alike"
                )
            yield record

    def tokenize(self, files: Sequence[Path], tokenizer: Any) -> str:
        """Tokenises some files, unless they are cached; returns the name of the cache file."""

        def documents(on_bytes: Callable[[int], object]) -> Iterable[Document]:
            tokenize = partial(tokenize_pairs, tokenizer=tokenizer)
            records = self._records(files, on_bytes)
            return tokenize_in_processes(records, tokenize, self.tokenize_processes, total_size(files))

        options = ["pairs", _FORMAT, sorted(self.columns.items())]
        return cached_documents(files, tokenizer, self.cache_dir, documents, options)

    def _load_tokenizer(self) -> Any:
        tokenizer = super()._load_tokenizer()
        return add_sentinels(tokenizer) if self.corrupts else tokenizer

    def lay_out(self, split: str, store: TokenStore, documents: np.ndarray, files: Sequence[Path]) -> tuple[Any, Any]:
        """Returns the dataset of some documents of a store, and its statistics.

        Raises:
            DloError: If a pair is too long, under `error`, or no pair is left.
        """
        samples = self._cut_text(store, documents) if self.corrupts else self._cut_pairs(store, documents, files)
        if not len(samples.start):
            raise DloError(
                f"documents must leave at least one pair of source and target, got none in the {len(documents)} of"
                f" {files[0]}; check the files, or raise seq_len and target_len"
            )
        if self.packing == "none" and split == "val":
            samples = samples.select(np.argsort(samples.source + samples.target, kind="stable"))
        shape = self.seq_len, self.target_len
        row = None
        if self.packing == "best_fit":
            # Of each pair the larger share of a row counts, so that sources and targets both fit.
            share = np.maximum(samples.source, -(-samples.target * shape[0] // shape[1]))
            row = pack_best_fit(share, shape[0]).window
        corruption = self.corruption if self.corrupts else None
        sentinels = find_sentinels(self.tokenizer)
        filler, end = find_filler_id(self.tokenizer), self.tokenizer.eos_token_id
        dataset = PairRows(store, samples, row, shape, filler, end, corruption, sentinels)
        return dataset, PairStatistics.of(samples, len(dataset), None if row is None else shape)

    def _cut_text(self, store: TokenStore, documents: np.ndarray) -> Samples:
        """Returns texts as samples that fit with their sentinels; the end-of-text token of a document is left out."""
        sentinels = len(find_sentinels(self.tokenizer))
        longest = self.corruption.longest(self.seq_len, self.target_len, sentinels)
        pieces = cut_documents(store.bounds, documents, longest, "split")
        pieces = pieces.select(pieces.length >= 2)
        counts = self.corruption.count(pieces.length)
        ends = self.tokenizer.eos_token_id is not None
        return Samples(pieces.start, pieces.length, counts.source + ends, counts.target + ends, pieces.too_long)

    def _cut_pairs(self, store: TokenStore, documents: np.ndarray, files: Sequence[Path]) -> Samples:
        start, stop = (store.bounds[documents + past].astype(np.int64) for past in (0, 1))
        targets = np.append(np.flatnonzero(store.learned()), store.tokens)
        first = np.minimum(targets[np.searchsorted(targets, start)], stop)
        source, target = first - start, stop - first
        long = (source > self.seq_len) | (target > self.target_len)
        if self.long_samples == "error" and long.any():
            number = int(np.argmax(long))
            place = format_location(files, *(int(of[documents[number]]) for of in (store.files, store.rows)))
            raise DloError(
                f"{place}: source and target must have at most seq_len = {self.seq_len} and target_len ="
                f" {self.target_len} tokens, got {source[number]} and {target[number]} ({int(long.sum())} pairs are"
                " longer); raise them, or set long_samples to truncate or drop"
            )
        keep = (source > 0) & (target > 0)
        if self.long_samples == "drop":
            keep &= ~long
        source, target = np.minimum(source, self.seq_len), np.minimum(target, self.target_len)
        return Samples(start, first - start, source, target, int(long.sum())).select(np.flatnonzero(keep))

    def lay_out_prompts(self, files: Sequence[Path]) -> Sources:
        """Returns the dataset of the sources of some files, and sets :attr:`prompts`."""
        columns = {"prompt": self.columns.get("source", "source")}
        self.prompts, _ = read_prompts(files, self.tokenizer, columns)
        return Sources(encode_sources(self.tokenizer, self.prompts), find_filler_id(self.tokenizer))

    def _made_of(self) -> str:
        return f"{super()._made_of()}-{self.corruption}-{self._given_target_len}"


class Sources(Prompts):
    """Dataset of sources whose targets are written, padded on the right."""

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns ``input_ids`` and ``attention_mask``, int64 [B, S], and ``index``, the source numbers, int64 [B]."""
        ids, mask = pad_right([self._prompts[draw.index] for draw in draws], self._filler)
        return {"input_ids": ids, "attention_mask": mask, "index": torch.tensor([draw.index for draw in draws])}


def tokenize_pairs(records: Iterable[Record], tokenizer: Any) -> Iterator[Document]:
    """Yields records as tokenised documents: a text, or a source and its target, whose tokens alone are targets."""
    for some in in_calls(records):
        if some[0].kind == "text":
            encoded = encode_texts(tokenizer, [record.content for record in some])
        else:
            both = [encode_sources(tokenizer, [record.content[side] for record in some]) for side in (0, 1)]
            encoded = [([*s, *t], np.arange(len(s) + len(t)) >= len(s)) for s, t in zip(*both, strict=True)]
        for record, (ids, learned) in zip(some, encoded, strict=True):
            yield Document(np.array(ids, dtype=np.int64), learned, record.digest, record.file, record.row)


class Samples(NamedTuple):
    """Pairs of source and target in a store, or texts of which they are made.

    Attributes:
        start: Index of each one's first token in the store, int64 [N].
        length: Number of tokens before those of the target, or of the text, int64 [N].
        source: Positions of each source, int64 [N].
        target: Positions of each target, int64 [N].
        too_long: Number of documents that did not fit.
    """

    start: np.ndarray
    length: np.ndarray
    source: np.ndarray
    target: np.ndarray
    too_long: int

    def select(self, index: np.ndarray) -> Samples:
        """Returns some of the samples."""
        start, length, source, target = (values[index] for values in self[:4])
        return Samples(start, length, source, target, self.too_long)


class PairStatistics(NamedTuple):
    """Statistics of a layout of pairs.

    Attributes:
        pairs: Number of pairs.
        source: Positions of all sources.
        target: Positions of all targets, each of which is learned.
        rows: Number of rows.
        capacity: Positions of all rows, of sources and of targets.
        too_long: Number of documents that did not fit.
    """

    pairs: int
    source: int
    target: int
    rows: int
    capacity: tuple[int, int]
    too_long: int

    @classmethod
    def of(cls, samples: Samples, rows: int, shape: tuple[int, int] | None) -> PairStatistics:
        """Returns the statistics of samples in rows of a shape, or in rows of their own."""
        source, target = int(samples.source.sum()), int(samples.target.sum())
        capacity = (source, target) if shape is None else (rows * shape[0], rows * shape[1])
        return cls(len(samples.start), source, target, rows, capacity, samples.too_long)

    def __str__(self) -> str:
        full = [f"{used / max(1, of):.1%}" for used, of in zip((self.source, self.target), self.capacity, strict=True)]
        return (
            f"{self.pairs:,} pairs, {self.source:,} tokens of sources and {self.target:,} of targets in"
            f" {self.rows:,} rows, {full[0]} and {full[1]} full; {self.too_long:,} documents too long"
        )


class PairRows:
    """Dataset of rows of pairs: one each, padded in their batch, or several each, in rows of equal shape.

    Args:
        store: Token store.
        samples: Pairs, or texts to corrupt.
        row: Row of each sample, int64 [N]; None for padded rows of one sample each.
        shape: Positions of the sources and of the targets of a row; the most of them in a padded batch.
        filler: Id at unused positions.
        end: End-of-text token of corrupted texts; None for none.
        corruption: Span corruption of texts; None for pairs.
        sentinels: Ids of the sentinels, int64.

    Attributes:
        targets: Number of targets of each row, int64 [rows].
        lengths: Positions of the source and the target of each row, int64 [rows]; None where all are of equal shape.
        pairs: None: rows have no preferences.
    """

    pairs: np.ndarray | None = None

    def __init__(
        self,
        store: TokenStore,
        samples: Samples,
        row: np.ndarray | None,
        shape: tuple[int, int],
        filler: int,
        end: int | None,
        corruption: SpanCorruption | None,
        sentinels: np.ndarray,
    ) -> None:
        self.lengths = samples.source + samples.target if row is None else None
        row = np.arange(len(samples.start)) if row is None else row
        order, rows = np.argsort(row, kind="stable"), int(row.max()) + 1
        self._store, self._samples, self._shape, self._filler = store, samples.select(order), shape, filler
        self._end = np.array([] if end is None else [end], dtype=np.int64)
        self._corruption, self._sentinels = corruption, sentinels
        self._first = np.searchsorted(row[order], np.arange(rows + 1))
        self.targets = np.bincount(row, samples.target, rows).astype(np.int64)

    def __len__(self) -> int:
        return len(self._first) - 1

    def count_targets(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of targets of rows, int64 of the shape of ``index``."""
        return self.targets[index]

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn rows; the spans of a row depend on its draw's seed alone."""
        rows = [self._row(draw) for draw in draws]
        sides = [[[pair[side] for pair in row] for row in rows] for side in (0, 1)]
        longest = [max(sum(map(len, row)) for row in side) for side in sides]
        padded = [min(-(-most // MULTIPLE) * MULTIPLE, full) for most, full in zip(longest, self._shape, strict=True)]
        shape = self._shape if self.lengths is None else padded
        names = ("input_ids", "encoder_segment_ids", self._filler), ("labels", "decoder_segment_ids", IGNORE_INDEX)
        batch: Batch = {}
        for side, width, (name, segments, filler) in zip(sides, shape, names, strict=True):
            ids, numbers = np.full((len(draws), width), filler), np.zeros((len(draws), width), dtype=np.int64)
            for place, parts in enumerate(side):
                joined = np.concatenate(parts)
                ids[place, : len(joined)] = joined
                numbers[place, : len(joined)] = np.repeat(np.arange(len(parts)) + 1, list(map(len, parts)))
            batch |= {name: torch.from_numpy(ids), segments: torch.from_numpy(numbers)}
        if self.lengths is not None:
            batch["attention_mask"] = batch.pop("encoder_segment_ids")
            del batch["decoder_segment_ids"]
        return finish(batch, draws)

    def _row(self, draw: Draw) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the sources and targets of a row, int64."""
        first, past = int(self._first[draw.index]), int(self._first[draw.index + 1])
        pairs = []
        for number in range(first, past):
            start, length, source, target = (int(values[number]) for values in self._samples[:4])
            if self._corruption is None:
                begin = start + length
                pair = self._read(start, source), self._read(begin, target)
            else:
                random = np.random.default_rng([draw.seed, number - first])
                parts = self._corruption.corrupt(self._read(start, length), self._sentinels, random)
                pair = np.append(parts[0], self._end), np.append(parts[1], self._end)
            pairs.append(pair)
        return pairs

    def _read(self, start: int, length: int) -> np.ndarray:
        return self._store.read(slice(start, start + length))[0]
