"""Datamodule with text for models that predict masked tokens: `MaskedTextData`.

BERT: Pre-training of Deep Bidirectional Transformers. Devlin et al., 2018, arXiv 1810.04805; masks are drawn again for
each epoch, as in RoBERTa (Liu et al., 2019, arXiv 1907.11692). Masks of whole words are those of BERT's later releases.

The number of masked tokens of a row depends on its length alone, so that the targets of an optimizer step are known
before it. Which tokens are masked depends on the seed, the epoch and the row alone: it is the same on any number of
ranks, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dlo_framework.data import Draw, uniform
from dlo_framework.errors import DloError, check_number
from dlo_tasks.language.batches import (
    IGNORE_INDEX,
    Batch,
    PackedSamples,
    Statistics,
    finish,
    pad_right,
)
from dlo_tasks.language.chat import read_prompts
from dlo_tasks.language.packing import (
    DocumentChunks,
    DocumentTooLong,
    WindowAssignment,
    cut_documents,
    pack_best_fit,
    ranges,
)
from dlo_tasks.language.records import Record, format_location, read_records
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, TokenStore
from dlo_tasks.language.tokenization import cached_documents, in_calls, tokenize_in_processes, total_size
from dlo_tasks.language.tokenizer import embedded_tokenizer, find_filler_id, vocabulary_size

#: Fraction of the tokens that BERT predicts.
MASK_FRACTION = 0.15
_CHOICE, _REPLACEMENT, _TOKEN = 5, 6, 7  # streams of random numbers
#: Space, newline, tab and carriage return as byte-level BPE writes them: letters of Unicode.
_SPACES = "\u0120\u010a\u0109\u010d"
#: Mask token of the tokenizer that dlo trains.
_MASK = "<|mask|>"


class MaskedTextData(TextData):
    """Loads plain text for `MaskedLM`, masks some of its tokens, and packs it into windows.

    ```yaml
    data:
      class_path: MaskedTextData
      init_args: {train_files: "wiki/*.jsonl", seq_len: 512, batch_size: 256}
    ```

    Files are JSON lines or Parquet with a column `text`; any other file is one text. Without files, the data is the
    source code of Python's standard library. Pieces of documents begin with the tokenizer's CLS token and end with its
    SEP token, if it has them. Of the tokens that are predicted, most are replaced by the mask token, some by a random
    one, and some stay as they are. Tokenizer, cache, packing, validation and resuming are those of :class:`TextData`;
    for short sequences first, add :class:`~dlo_plugins.curriculum.sequence_length.SequenceLength`.

    Batches are dicts of int64 tensors `[batch, length]`: `input_ids`; `labels`, the token at a masked position, else
    -100; `position_ids`, which restart at 0 with each document of a packed row, or `attention_mask` of padded rows; and
    in training `tokens_in_step`. Batches for prediction have `attention_mask`, `labels`, which are set where a text has
    the mask token, and `index`, the numbers of the texts.

    Args:
        mask_fraction: Fraction of a row's tokens that are predicted; 0.15 in BERT, 0.3 in ModernBERT.
        random_fraction: Fraction of the predicted tokens that a random token replaces.
        unchanged_fraction: Fraction of the predicted tokens that stay as they are.
        whole_words: Whether to mask all tokens of a word together. A word that is larger than what is left of a row's
            number of masked tokens is passed over; if only such words are left, one is masked in part.
        **text_data: Further arguments of `TextData`.

    Raises:
        DloError: If arguments are out of range; by :meth:`check`, if files are missing or empty, or a first record has
            no text; later, for a broken line (with its number), or a tokenizer without a mask token.
    """

    column_names = ("text", "prompt")
    mixes_sources = False
    model_kind = "masked"

    def __init__(
        self,
        mask_fraction: float = MASK_FRACTION,
        random_fraction: float = 0.1,
        unchanged_fraction: float = 0.1,
        whole_words: bool = False,
        **text_data: Any,
    ) -> None:
        super().__init__(**text_data)
        check_number("mask_fraction", mask_fraction, "above 0 and below 1", f"{MASK_FRACTION} is usual")
        for name, value in (("random_fraction", random_fraction), ("unchanged_fraction", unchanged_fraction)):
            check_number(name, value, "at least 0 and at most 1", "0.1 is usual")
        if random_fraction + unchanged_fraction > 1:
            raise DloError(
                "random_fraction and unchanged_fraction must be at most 1 together, got"
                f" {random_fraction} and {unchanged_fraction}; set both to 0.1"
            )
        self.mask_fraction = mask_fraction
        self.masking = Masking(mask_fraction, random_fraction, unchanged_fraction, whole_words)

    def read(self, files: Sequence[Path]) -> Iterator[Record]:
        """Yields the records of some files, which must be texts."""
        return map(partial(_check_text, files), read_records(files, self.columns))

    def tokenize(self, files: Sequence[Path], tokenizer: Any) -> str:
        """Tokenises some files without special tokens, unless they are cached; returns the name of the cache file."""
        if tokenizer.mask_token_id is None:
            raise DloError(
                f"tokenizer must have a mask token for MaskedTextData, got {self._loaded_from} without one; set"
                " data.init_args.tokenizer to that of a BERT, or remove it"
            )

        def documents(on_bytes: Callable[[int], object]) -> Iterable[Document]:
            records = map(partial(_check_text, files), read_records(files, self.columns, on_bytes))
            tokenize = partial(_tokenize_texts, tokenizer=tokenizer)
            return tokenize_in_processes(records, tokenize, self.tokenize_processes, total_size(files))

        return cached_documents(files, tokenizer, self.cache_dir, documents, ["masked", sorted(self.columns.items())])

    def train_tokenizer(self) -> Any:
        """Returns the tokenizer of data whose model has none, with a mask token as its last one."""
        tokenizer = embedded_tokenizer(self._library, self.vocab_size - 1, self.cache_dir)
        tokenizer.add_special_tokens({"mask_token": _MASK})
        return tokenizer

    def lay_out(
        self, split: str, store: TokenStore, documents: np.ndarray, files: Sequence[Path]
    ) -> tuple[MaskedSamples, Statistics]:
        """Returns the dataset of some documents of a store, and its statistics."""
        tokens = SpecialTokens.of(self.tokenizer)
        policy, room = self.long_samples or "split", self.seq_len - tokens.around
        if room < 1:
            raise DloError(
                f"seq_len must be above {tokens.around}, the tokens around a document, got {self.seq_len}; raise it"
            )
        try:
            pieces = cut_documents(store.bounds, documents, room, policy, last_is_input=True)
        except DocumentTooLong as error:
            place = format_location(files, int(store.files[error.document]), int(store.rows[error.document]))
            raise error.with_location(place) from None
        if not len(pieces.start):
            raise DloError(
                f"documents must have at least one token, got none in the {len(documents)} of {files[0]}"
                f" (long_samples: {policy}); check the files, or raise seq_len"
            )
        if self.packing == "none" and split == "val":  # Batches of neighbours have little padding.
            pieces = pieces.select(np.argsort(pieces.length, kind="stable"))
        taken = pieces.length + tokens.around
        packed = pack_best_fit(taken, self.seq_len) if self.packing == "best_fit" else None
        dataset = MaskedSamples(store, pieces, packed, self.seq_len, tokens, self.masking)
        statistics = Statistics(
            documents=len(documents),
            tokens=int(taken.sum()),
            targets=int(dataset.targets.sum()),
            samples=len(dataset),
            capacity=int(taken.sum()) if packed is None else packed.windows * self.seq_len,
            longest=int(taken.max()),
            too_long=pieces.too_long,
            unused=pieces.too_short,
            untaught=0,
            packing=self.packing,
            long_samples=policy,
        )
        return dataset, statistics

    def lay_out_prompts(self, files: Sequence[Path]) -> MaskedPrompts:
        """Returns the dataset of the texts of some files, each with a mask token."""
        self.prompts, _ = read_prompts(files, self.tokenizer, self.columns)
        ids = self.tokenizer(self.prompts)["input_ids"]
        mask = self.tokenizer.mask_token_id
        for text, row in zip(self.prompts, ids, strict=True):
            if mask not in row:
                raise DloError(
                    f"predict_files must have the tokenizer's mask token {self.tokenizer.mask_token} in each text, got"
                    f" {text!r}; write it where a word is missing"
                )
        return MaskedPrompts(ids, find_filler_id(self.tokenizer), mask)

    def _made_of(self) -> str:
        return super()._made_of() + repr(self.masking)


def _check_text(files: Sequence[Path], record: Record) -> Record:
    if record.kind != "text":
        raise DloError(
            f"{format_location(files, record.file, record.row)}: record must have a text for MaskedTextData, got a"
            f" {record.kind}; name the column of the text in columns, such as {{text: content}}"
        )
    return record


def _tokenize_texts(records: Iterable[Record], tokenizer: Any) -> Iterator[Document]:
    for some in in_calls(records):
        rows = tokenizer([record.content for record in some], add_special_tokens=False, verbose=False)["input_ids"]
        for record, ids in zip(some, rows, strict=True):
            learned = np.ones(len(ids), dtype=bool)
            yield Document(np.array(ids, dtype=np.int64), learned, record.digest, record.file, record.row)


# --- samples ------------------------------------------------------------------------------------------------------


class Masking(NamedTuple):
    """Choice of the tokens that are predicted; see :class:`MaskedTextData`."""

    fraction: float
    random: float
    unchanged: float
    whole_words: bool

    def count_targets(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the number of predicted tokens of rows with these numbers of tokens, int64."""
        return np.maximum(1, np.floor(self.fraction * tokens + 0.5)).astype(np.int64)

    def choose(self, ids: np.ndarray, first: np.ndarray, count: int, seed: int, words: WordStarts) -> np.ndarray:
        """Returns the positions of a row's predicted tokens, int64 [count].

        Args:
            ids: Tokens of the row, without special ones, int64 [T].
            first: Whether a token is the first of its document, bool [T].
            count: Number of tokens to choose.
            seed: Seed of the sample.
            words: Beginnings of words.
        """
        if not self.whole_words:
            return np.argsort(uniform(np.arange(len(ids)), seed, _CHOICE), kind="stable")[:count]
        starts = np.flatnonzero(words.begin(ids) | first)
        lengths = np.diff(starts, append=len(ids))
        order = np.argsort(uniform(np.arange(len(starts)), seed, _CHOICE), kind="stable")
        chosen: list[int] = []
        passed: list[int] = []
        for word in order.tolist():
            left = count - len(chosen)
            if left == 0:
                break
            if lengths[word] <= left:
                chosen += range(starts[word], starts[word] + lengths[word])
            else:
                passed.append(word)
        if len(chosen) < count:
            chosen += range(starts[passed[0]], starts[passed[0]] + count - len(chosen))
        return np.array(chosen)


class SpecialTokens(NamedTuple):
    """Special tokens of a tokenizer, and which of its others begin a word.

    Attributes:
        mask: Id of the mask token.
        filler: Id at unused positions.
        before: Ids before each piece of a document.
        after: Ids after each piece.
        ordinary: Ids that are not special, int64.
        words: Beginnings of words.
    """

    mask: int
    filler: int
    before: list[int]
    after: list[int]
    ordinary: np.ndarray
    words: WordStarts

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """Returns those of a tokenizer."""
        before, after = ([] if token is None else [token] for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        ordinary = np.array(sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}), dtype=np.int64)
        filler = find_filler_id(tokenizer)
        return cls(tokenizer.mask_token_id, filler, before, after, ordinary, WordStarts(tokenizer))

    @property
    def around(self) -> int:
        """Number of special tokens of a piece."""
        return len(self.before) + len(self.after)


class WordStarts:
    """Where words begin, by the forms of tokens: WordPiece marks the parts that continue a word, others the beginnings.

    Args:
        tokenizer: Fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        size = vocabulary_size(tokenizer)
        model = tokenizer.backend_tokenizer.model
        prefix = model.continuing_subword_prefix if type(model).__name__ == "WordPiece" else None
        #: Whether a token begins a word everywhere, and whether the token after it does.
        self._begins, self._ends = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        for token, number in tokenizer.get_vocab().items():
            if prefix is not None:
                self._begins[number] = not token.startswith(prefix)
            else:  # SentencePiece writes a space as \u2581, which is not a letter.
                self._begins[number] = not token[:1].isalnum() or token[:1] in _SPACES
                self._ends[number] = not token[-1:].isalnum() or token[-1:] in _SPACES

    def begin(self, ids: np.ndarray) -> np.ndarray:
        """Returns whether each token of a row begins a word, bool [T]."""
        begins = self._begins[ids]
        begins[1:] |= self._ends[ids[:-1]]
        return begins


class MaskedSamples(PackedSamples):
    """Dataset of windows, or of padded pieces, of which some tokens are masked.

    Args:
        store: Token store.
        pieces: Pieces to use, without special tokens.
        packing: Window and offset of each piece, with its special tokens; None for padded samples of one piece.
        seq_len: Positions per window, and the most of a padded batch.
        tokens: Special tokens.
        masking: Choice of the tokens that are predicted.
    """

    def __init__(
        self,
        store: TokenStore,
        pieces: DocumentChunks,
        packing: WindowAssignment | None,
        seq_len: int,
        tokens: SpecialTokens,
        masking: Masking,
    ) -> None:
        with_special = pieces._replace(length=pieces.length + tokens.around)
        super().__init__(store, with_special, packing, seq_len, tokens.filler, targets=pieces.length)
        self._tokens, self._masking = tokens, masking
        self.targets = masking.count_targets(self.targets)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn samples."""
        tokens = self._tokens
        index = np.array([draw.index for draw in draws])
        pieces, begin, width = self.place(draws)
        size = len(draws) * width
        length = self._length[pieces] - tokens.around
        at = begin + len(tokens.before)
        places = np.repeat(at, length) + ranges(length)
        ids = np.full(size, tokens.filler, dtype=np.int64)
        ids[places] = self._store.read(np.repeat(self._start[pieces], length) + ranges(length))[0]
        for shift, token in enumerate(tokens.before):
            ids[begin + shift] = token
        for shift, token in enumerate(tokens.after):
            ids[at + length + shift] = token
        first, used = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        first[at] = True
        used[np.repeat(begin, length + tokens.around) + ranges(length + tokens.around)] = True
        labels = np.full(size, IGNORE_INDEX, dtype=np.int64)
        bounds = np.searchsorted(places, np.arange(len(draws) + 1) * width)
        for row, draw in enumerate(draws):
            own = places[bounds[row] : bounds[row + 1]]
            count = int(self.targets[index[row]])
            chosen = own[self._masking.choose(ids[own], first[own], count, draw.seed, tokens.words)]
            labels[chosen] = ids[chosen]
            self._replace(ids, chosen, chosen - row * width, draw.seed)
        flat = {"input_ids": ids, "labels": labels}
        if self.lengths is None:
            positions = np.arange(size) - np.repeat(np.arange(len(draws)) * width, width)
            restarts = np.zeros(size, dtype=np.int64)
            restarts[begin] = positions[begin]
            ends = np.flatnonzero(np.diff(used.astype(np.int8), append=1) < 0) + 1  # Unused positions are a document.
            restarts[ends[ends % width > 0]] = positions[ends[ends % width > 0]]
            flat["position_ids"] = positions - np.maximum.accumulate(restarts.reshape(-1, width), axis=1).ravel()
        else:
            flat["attention_mask"] = used.astype(np.int64)
        return finish({name: torch.from_numpy(values).view(-1, width) for name, values in flat.items()}, draws)

    def _replace(self, ids: np.ndarray, chosen: np.ndarray, places: np.ndarray, seed: int) -> None:
        """Replaces chosen tokens in place: by the mask, by a random token, or not at all."""
        draw = uniform(places, seed, _REPLACEMENT)
        random = draw < self._masking.random
        ids[chosen[draw >= self._masking.random + self._masking.unchanged]] = self._tokens.mask
        drawn = uniform(places[random], seed, _TOKEN) * len(self._tokens.ordinary)
        ids[chosen[random]] = self._tokens.ordinary[drawn.astype(np.int64)]


class MaskedPrompts:
    """Dataset of texts with mask tokens to fill in, padded on the right.

    Args:
        texts: Token ids of each text.
        filler: Id at unused positions.
        mask: Id of the mask token.
    """

    def __init__(self, texts: Sequence[Sequence[int]], filler: int, mask: int) -> None:
        self._texts, self._filler, self._mask = texts, filler, mask

    def __len__(self) -> int:
        return len(self._texts)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns ``input_ids``, ``attention_mask`` and ``labels``, int64 [B, L], and ``index``, int64 [B]."""
        ids, kept = pad_right([self._texts[draw.index] for draw in draws], self._filler)
        labels = ids.masked_fill(ids != self._mask, IGNORE_INDEX)
        index = torch.tensor([draw.index for draw in draws])
        return {"input_ids": ids, "attention_mask": kept, "labels": labels, "index": index}
