"""Lays documents out as samples, packed or padded, and makes batches of samples or prompts.

A training batch is a dict of int64 tensors [B, L]: ``input_ids``; ``labels``, the id of the next token, or -100 where
it is not a target; ``position_ids``, which restart at 0 with each document. Without an attention mask, transformers
reads restarting positions as separate documents and makes the block-diagonal causal mask (transformers 5,
``masking_utils.find_packed_sequence_indices``). Flash kernels take no mask: see
:func:`dlo_tasks.language.families.flash_arguments`. Padding is on the right, where no earlier token of a causal model
attends to it, so padded batches need no mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlo_framework.data import Draw, uniform
from dlo_framework.errors import DloError
from dlo_tasks.language.packing import (
    DocumentChunks,
    DocumentTooLong,
    LongSamples,
    WindowAssignment,
    count_targets,
    cut_documents,
    pack_best_fit,
    ranges,
)
from dlo_tasks.language.records import format_location
from dlo_tasks.language.token_cache import TokenStore

IGNORE_INDEX = -100
"""Label of a position without a target: the ``ignore_index`` of torch and transformers."""

#: Multiple of padded lengths, for matrix units and few different shapes.
MULTIPLE = 8

Batch = dict[str, torch.Tensor]


class StepDraws(list[Draw]):
    """Samples of one batch on this rank, with totals over the optimizer step.

    Attributes:
        tokens_in_step: Number of targets of the optimizer step, over all ranks and micro-batches; None if unknown.
        pairs_in_step: Number of preferences of the optimizer step, over all ranks and micro-batches; None if unknown,
            and for other data.
        length: Positions of the longest sample of the batch, over all ranks; None for windows of equal length.
    """

    tokens_in_step: int | None = None
    pairs_in_step: int | None = None
    length: int | None = None


class PackedSamples:
    """Dataset of windows of equal length, each filled with pieces; or of single pieces, padded in their batch.

    Args:
        store: Token store.
        pieces: Pieces to use.
        packing: Window and offset of each piece; None for samples of one piece, padded to the longest of the batch.
        seq_len: Positions per window, and the most of a padded batch.
        filler: Id at unused positions.
        targets: Number of targets of each piece, int64 [P].

    Attributes:
        targets: Number of targets of each sample, int64 [samples].
        lengths: Positions of each sample, int64 [samples]; None for windows, which have the same length.
        pairs: None: samples have no preferences.
    """

    pairs: np.ndarray | None = None

    def __init__(
        self,
        store: TokenStore,
        pieces: DocumentChunks,
        packing: WindowAssignment | None,
        seq_len: int,
        filler: int,
        targets: np.ndarray,
    ) -> None:
        self.lengths: np.ndarray | None = None
        if packing is None:
            number = np.arange(len(pieces.start))
            packing, self.lengths = WindowAssignment(number, np.zeros_like(number), len(number)), pieces.length
        order = np.lexsort((packing.offset, packing.window))
        self._store, self._seq_len, self._filler = store, seq_len, filler
        self._start, self._length = pieces.start[order], pieces.length[order]
        self._offset = packing.offset[order]
        self._first = np.searchsorted(packing.window[order], np.arange(packing.windows + 1))
        self.targets = np.bincount(packing.window, targets, packing.windows).astype(np.int64)

    def __len__(self) -> int:
        return len(self._first) - 1

    def count_targets(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of targets of samples, int64 of the shape of ``index``."""
        return self.targets[index]

    def place(self, draws: list[Draw]) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the pieces of drawn samples, the first position of each in the flattened batch, and a row's length.

        Both arrays are int64 [P], the positions ascending.
        """
        index = np.array([draw.index for draw in draws])
        first, counts = self._first[index], self._first[index + 1] - self._first[index]
        width = self._seq_len
        if self.lengths is not None:
            longest = (draws.length if isinstance(draws, StepDraws) else None) or int(self.lengths[index].max())
            width = min(-(-longest // MULTIPLE) * MULTIPLE, width)
        pieces = np.repeat(first, counts) + ranges(counts)
        return pieces, np.repeat(np.arange(len(draws)) * width, counts) + self._offset[pieces], width

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn samples."""
        pieces, begin, width = self.place(draws)
        length = self._length[pieces]
        source = np.repeat(self._start[pieces], length) + ranges(length)
        batch = gather_tokens(self._store, source, source + 1, begin, length, (len(draws), width), self._filler)
        return finish(batch, draws)


class FixedDraws:
    """Dataset whose random choices for a sample, such as its masks, are the same in each epoch.

    Args:
        dataset: Dataset that may draw from the samples' seeds.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn samples."""
        batch: Batch = self._dataset.fetch([draw._replace(seed=draw.index) for draw in draws])
        return batch


class Prompts:
    """Dataset of prompts to complete, padded on the left.

    Args:
        prompts: Token ids of each prompt.
        filler: Id at unused positions.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], filler: int) -> None:
        self._prompts, self._filler = prompts, filler

    def __len__(self) -> int:
        return len(self._prompts)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns ``input_ids`` and ``attention_mask``, int64 [B, L], and ``index``, the prompt numbers, int64 [B]."""
        ids, mask = pad_left([self._prompts[draw.index] for draw in draws], self._filler)
        index = torch.tensor([draw.index for draw in draws])
        return {"input_ids": ids, "attention_mask": mask, "index": index}


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompts as ids and attention mask, both `[B, L]`, padded on the left."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def pad_right(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | None = None, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows as ids and attention mask, both `[B, S]`, padded on the right to a multiple."""
    longest = -(-max(map(len, rows)) // multiple) * multiple
    ids = [list(row) + [pad] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def gather_tokens(
    store: TokenStore,
    source: np.ndarray,
    following: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
    shape: tuple[int, int],
    filler: int,
    *,
    context: bool = False,
) -> Batch:
    """Returns a batch with pieces of documents at given places.

    Args:
        store: Token store.
        source: Index of each token of the pieces in the store, int64 [T].
        following: Index of each one's next token.
        begin: Index of each piece's first position in the flattened batch, int64 [P], ascending.
        length: Positions of each piece, int64 [P].
        shape: Shape of the batch.
        filler: Id at unused positions, which have no label and continue the positions of the row's last piece. As a
            document of its own, padding would be all zeros in a model whose padding embedding is zero, and a
            standard deviation would have the gradient NaN (Gemma 3n).
        context: Whether to add `context_labels`, the next tokens that are not targets.
    """
    within = ranges(length)
    target = np.repeat(begin, length) + within
    next_ids, learned = store.read(following)
    last = np.zeros(shape[0], dtype=np.int64)
    np.maximum.at(last, begin // shape[1], begin % shape[1])
    flat = {"input_ids": np.full(shape[0] * shape[1], filler, dtype=np.int64)}
    flat["input_ids"][target] = store.read(source)[0]
    for name, is_label in (("labels", learned), ("context_labels", ~learned))[: 1 + context]:
        flat[name] = np.full(shape[0] * shape[1], IGNORE_INDEX, dtype=np.int64)
        flat[name][target] = np.where(is_label, next_ids, IGNORE_INDEX)
    flat["position_ids"] = (np.arange(shape[1])[None] - last[:, None]).ravel()
    flat["position_ids"][target] = within
    return {name: torch.from_numpy(values).view(shape) for name, values in flat.items()}


def finish(batch: Batch, draws: list[Draw]) -> Batch:
    """Returns the batch with the totals of its optimizer step that are known."""
    for name in ("tokens_in_step", "pairs_in_step"):
        total = getattr(draws, name, None)
        if total is not None:
            batch[name] = torch.tensor(total)
    return batch


# --- samples of documents -----------------------------------------------------------------------------------------

PackingName = Literal["best_fit", "none"]
_SPLIT = 3  # stream of random numbers for the split


class Statistics(NamedTuple):
    """Statistics of a layout of documents.

    Attributes:
        documents: Number of documents.
        tokens: Positions of all samples. Documents also have their last token, which is only a target, and truncated
            tokens.
        targets: Positions whose next token is a target.
        samples: Number of windows, or of padded samples.
        capacity: Positions of all windows; for padded samples, those of the samples without padding.
        longest: Positions of the longest piece.
        too_long: Number of documents longer than the window, handled by ``long_samples``.
        unused: Number of documents of fewer than two tokens.
        untaught: Number of pieces without a target, which are left out.
        packing: Value of the option ``packing``.
        long_samples: Policy for documents longer than the window.
    """

    documents: int
    tokens: int
    targets: int
    samples: int
    capacity: int
    longest: int
    too_long: int
    unused: int
    untaught: int
    packing: PackingName
    long_samples: LongSamples

    @property
    def fill(self) -> float:
        """Fraction of all positions that hold a document's token."""
        return self.tokens / max(1, self.capacity)

    def __str__(self) -> str:
        made = {"truncate": "truncated", "split": "split", "drop": "dropped", "error": "refused"}[self.long_samples]
        if self.packing == "best_fit":
            width = self.capacity // max(1, self.samples)
            shape = f"in {self.samples:,} windows of {width:,}, {self.fill:.1%} full"
        else:
            mean = self.tokens / max(1, self.samples)
            shape = f"in {self.samples:,} samples, {mean:,.0f} long on average and {self.longest:,} at most"
        left_out = [(self.unused, "without two tokens left out"), (self.untaught, "without a target left out")]
        rest = "".join(f", {count:,} {what}" for count, what in left_out if count)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.targets:,} learned) {shape};"
            f" {self.too_long:,} too long: {made}{rest}"
        )


def split_documents(hashes: np.ndarray, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the training and the validation documents, int64, which depend on their content only.

    A document stays in its split when others are added or removed, and copies of it are in the same split.

    Args:
        hashes: Hashes of the documents' contents, uint64 [N].
        val_fraction: Expected fraction of documents to hold out.
    """
    held_out = uniform(hashes, _SPLIT) < val_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def find_val_fraction(hashes: np.ndarray) -> float | None:
    """Returns a fraction with which :func:`split_documents` leaves documents on both sides; None if there is none."""
    positions = np.unique(uniform(hashes, _SPLIT))
    if len(positions) < 2:
        return None
    for digits in range(1, 17):
        fraction = float(np.ceil(positions[0] * 10**digits + 1e-9) / 10**digits)
        if positions[0] < fraction <= positions[-1]:
            return fraction
    return None


def lay_out_samples(
    store: TokenStore,
    documents: np.ndarray,
    files: Sequence[Path],
    *,
    seq_len: int,
    packing: PackingName,
    long_samples: LongSamples | None,
    filler: int,
    by_length: bool = False,
) -> tuple[PackedSamples, Statistics]:
    """Returns documents as samples, with statistics.

    Args:
        store: Token store.
        documents: Indices of the documents in the store, int64 [D].
        files: Source files, for error messages.
        seq_len: Positions per window.
        packing: Layout, ``pack_best_fit`` or ``none``.
        long_samples: Policy, see :func:`dlo_tasks.language.packing.cut_documents`. None splits where all tokens are
            targets, as in plain text, and truncates otherwise, because the rest of a conversation has little meaning
            without its beginning.
        filler: Id at unused positions.
        by_length: Whether to sort padded samples by length, so that batches of neighbours have little padding.

    Raises:
        DloError: If a document is too long, under ``error``, or no target is left.
    """
    policy = long_samples or ("split" if store.all_learned else "truncate")
    try:
        pieces = cut_documents(store.bounds, documents, seq_len, policy)
    except DocumentTooLong as error:
        raise error.with_location(
            format_location(files, int(store.files[error.document]), int(store.rows[error.document]))
        ) from None
    targets = pieces.length if store.all_learned else count_targets(store.learned(), pieces)
    taught = targets > 0
    untaught = int((~taught).sum())
    pieces, targets = pieces.select(taught), targets[taught]
    if not len(targets):
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        raise DloError(
            f"documents must have at least one target, got none in the {len(documents)} of {files[0]}{more}:"
            f" {pieces.too_short} have fewer than two tokens, {pieces.too_long} do not fit seq_len {seq_len}"
            f" (long_samples: {policy}), {untaught} pieces have no target, such as an assistant's answer; check the"
            " files, or raise seq_len"
        )
    if packing == "none" and by_length:
        order = np.argsort(pieces.length, kind="stable")
        pieces, targets = pieces.select(order), targets[order]
    packed = pack_best_fit(pieces.length, seq_len) if packing == "best_fit" else None
    dataset = PackedSamples(store, pieces, packed, seq_len, filler, targets)
    tokens = int(pieces.length.sum())
    statistics = Statistics(
        documents=len(documents),
        tokens=tokens,
        targets=int(targets.sum()),
        samples=len(dataset),
        capacity=tokens if packed is None else packed.windows * seq_len,
        longest=int(pieces.length.max()),
        too_long=pieces.too_long,
        unused=pieces.too_short,
        untaught=untaught,
        packing=packing,
        long_samples=policy,
    )
    return dataset, statistics


# --- counts of a batch, taken on the CPU --------------------------------------------------------------------------

# Reading a number from an accelerator waits for all queued work, and the accelerator then waits for the host. Therefore
# the datamodule counts before the batch is moved, and attaches the counts to the moved tensors as attributes, row by
# row. Only these tensors and slices of their rows (a micro-batch of a pipeline) have them. Other tensors made from them
# (a sequence shard, a new batch) have none, nor do tensors that were written to afterwards; for these the device is
# read.

_NAME = "_dlo_counted"

#: Counts of each row of a tensor `[B, L]`.
Rows = list[tuple[int, ...]]


class Documents(NamedTuple):
    """Documents of a batch: one begins with each row, and wherever positions do not increase by one.

    Attributes:
        number: Number of documents.
        longest: Tokens of the longest document.
        restart: Whether positions decrease anywhere inside a row, 1 or 0.
    """

    number: int
    longest: int
    restart: int


def count_rows(batch: Any) -> dict[str, Rows]:
    """Returns the counts of a batch's tensors on the CPU, by name; {} for a batch on another device.

    Args:
        batch: Batch, usually a dict with `labels` and `position_ids`, `[B, L]`.
    """
    counts: dict[str, Rows] = {}
    if isinstance(batch, Mapping):
        labels, positions = batch.get("labels"), batch.get("position_ids")
        if isinstance(labels, Tensor) and labels.device.type == "cpu" and labels.ndim == 2:
            counts["labels"] = [(number,) for number in (labels != IGNORE_INDEX).sum(dim=1).tolist()]
        if isinstance(positions, Tensor) and positions.device.type == "cpu" and positions.ndim == 2:
            counts["position_ids"] = [tuple(row) for row in _documents_of_rows(positions).tolist()]
    return counts


def attach_counts(batch: Any, counts: Mapping[str, Rows]) -> None:
    """Attaches counts to a batch's tensors, on their current device."""
    for name, numbers in counts.items():
        tensor = batch[name]
        if tensor.is_inference():  # Inference tensors have no version counter.
            continue
        mark = _Mark(tensor._version, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), numbers)
        for place in (tensor, tensor._base):  # A slice of a view has the view's base.
            if place is not None:
                setattr(place, _NAME, mark)


def read_target_count(labels: Tensor) -> int | None:
    """Returns the number of targets among labels, or None without attached counts."""
    rows = _left_with(labels)
    return sum(number for (number,) in rows) if rows else None


def count_documents(position_ids: Tensor) -> Documents:
    """Returns the documents of `position_ids [B, L]`, with at most one transfer from the device."""
    rows = _left_with(position_ids)
    if rows is None:
        counts = _documents_of_rows(position_ids)
        return Documents(*torch.stack([counts[:, 0].sum(), counts[:, 1].amax(), counts[:, 2].amax()]).tolist())
    numbers, lengths, falls = zip(*rows, strict=True)
    return Documents(sum(numbers), max(lengths), max(falls))


def single_documents(tokens: Tensor) -> Tensor:
    """Returns positions of rows `[B, L]` that are one document each, with attached counts."""
    rows, length = tokens.shape
    positions = torch.ones_like(tokens).cumsum(dim=1) - 1  # An arange would not be fake for fake tokens.
    attach_counts({"position_ids": positions}, {"position_ids": [(1, length, 0)] * rows})
    return positions


def mark_document_starts(position_ids: Tensor) -> Tensor:
    """Returns whether a document begins at each position, bool `[B, L]`."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    return begins


class _Mark(NamedTuple):
    """Counts attached to a tensor, with its version and memory layout at that time."""

    version: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    rows: Rows


def _left_with(tensor: Tensor) -> Rows | None:
    """Returns the counts attached to a tensor, or to the tensor of which it is a slice of rows."""
    for place in (tensor, tensor._base):
        mark: _Mark | None = getattr(place, _NAME, None)
        if mark is None or mark.version != tensor._version or not len(tensor):
            continue
        if tensor.shape[1:] != mark.shape[1:] or tensor.stride() != mark.stride or not mark.stride[0]:
            continue
        first, rest = divmod(int(tensor.storage_offset()) - mark.offset, mark.stride[0])
        if not rest and 0 <= first <= len(mark.rows) - len(tensor):
            return mark.rows[first : first + len(tensor)]
    return None


def _documents_of_rows(position_ids: Tensor) -> Tensor:
    """Returns the fields of :class:`Documents` for each row, int64 `[B, 3]`."""
    begins = mark_document_starts(position_ids)
    places = torch.arange(position_ids.shape[1], device=position_ids.device)
    newest = torch.where(begins, places, 0).cummax(dim=1).values
    falls = (position_ids.diff(dim=1) < 0).any(dim=1)
    return torch.stack([begins.sum(dim=1), (places - newest).amax(dim=1) + 1, falls.long()], dim=1)
