"""Batch sampler for text: counts the targets of each optimizer step, and groups samples of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dlo_framework.data import Draw, ResumableBatchSampler, hash64
from dlo_framework.data.sampler import InOrderBatchSampler
from dlo_framework.progress import find_window
from dlo_tasks.language.batches import StepDraws

#: Number of batches whose samples are sorted by length together.
BUCKET = 50
_BATCHES = 4  # stream of random numbers for the order of batches


class AccumulationPlan(NamedTuple):
    """Gradient accumulation of the trainer.

    Attributes:
        size: Batches per optimizer step.
        batches: Maximum number of batches per epoch; infinite for all.
    """

    size: int
    batches: float


class TextBatchSampler(ResumableBatchSampler):
    """A :class:`ResumableBatchSampler` whose batches know the number of targets of their optimizer step.

    The order of an epoch is known before it begins, and so is the number of targets of each step, over all ranks and
    micro-batches. No communication is needed. Targets are counted when the step comes.

    Args:
        size: Number of samples per epoch.
        count_targets: Function that returns the number of targets of samples, by their indices, int64 [P].
        lengths: Positions of each sample, int64 [size], for batches of similar lengths: an epoch's random order is
            divided into groups of ``BUCKET`` batches, each group is sorted by length, and the batches are shuffled.
            None for the plain random order.
        pairs: Number of preferences of each sample, int64 [size]; None for other data.
        accumulation: Function that returns the trainer's accumulation; called when an epoch begins.
        options: Arguments of :class:`ResumableBatchSampler`.
    """

    def __init__(
        self,
        size: int,
        *,
        count_targets: Callable[[np.ndarray], np.ndarray],
        lengths: np.ndarray | None = None,
        pairs: np.ndarray | None = None,
        accumulation: Callable[[], AccumulationPlan],
        **options: Any,
    ) -> None:
        super().__init__(size, **options)
        self._count_targets, self._accumulation = count_targets, accumulation
        self._lengths, self._pairs = lengths, pairs

    def batches_from(self, samples: int) -> Iterator[list[Draw]]:
        """Yields this rank's batches of the current epoch, after the first ``samples`` of the global order."""
        draws_between = self._draw_function()
        last: tuple[int, int] | None = None
        tokens = pairs = None
        coming = zip(super().batches_from(samples), self._steps_from(samples), self.spans_from(samples), strict=False)
        for draws, step, span in coming:
            if step != last:
                index = np.arange(0) if step is None else draws_between(*step)[0]
                tokens = None if step is None else int(self._count_targets(index).sum())
                pairs = None if step is None or self._pairs is None else int(self._pairs[index].sum())
                last = step
            known = StepDraws(draws)
            known.tokens_in_step, known.pairs_in_step = tokens, pairs
            if self._lengths is not None:
                known.length = int(self._lengths[draws_between(*span)[0]].max())
            yield known

    def _steps_from(self, samples: int) -> Iterator[tuple[int, int] | None]:
        """Yields the first position of each batch's optimizer step and the one after; None if it is not known yet."""
        size, batches = self._accumulation()
        if self.window_at is not None:
            spans = self.planned()
            first = sum(span.start < samples for span in spans)
            unknown = first < len(spans) and spans[first].batches != size  # DynamicBatchSize with noise_scale
            for span in spans[first:]:
                past = spans[span.first + span.batches - 1].stop
                yield None if unknown else (spans[span.first].start, past)
            return
        step = self.global_batch_size
        begin = -(-samples // step)
        for number, (start, _) in enumerate(self.spans_from(samples), begin):
            first, length = find_window(number, size, min(batches, len(self)))
            low = max(0, start - (number - first) * step)
            yield low, min(start + (first + max(length, 1) - number) * step, self.size)

    def _epoch_draws(self) -> tuple[np.ndarray, np.ndarray]:
        indices, seeds = super()._epoch_draws()
        if self._lengths is None or not self.shuffle:
            return indices, seeds
        order = bucket_by_length(self._lengths[indices], self.global_batch_size, self.seed, self.epoch)
        return indices[order], seeds[order]


class InOrderTextBatchSampler(TextBatchSampler, InOrderBatchSampler):  # type: ignore[misc]
    """A :class:`TextBatchSampler` without shuffling, which Lightning recognises; see :class:`InOrderBatchSampler`."""


def bucket_by_length(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns an order in which the samples of each batch have similar lengths.

    Args:
        lengths: Lengths in random order, int64 [N].
        batch_size: Batch size over all ranks; samples of an incomplete batch stay at the end.
        seed: Seed of the order of the batches.
        epoch: Epoch, which changes that order.

    Returns:
        Permutation of the samples, int64 [N].
    """
    whole = len(lengths) // batch_size
    used, group = whole * batch_size, BUCKET * batch_size
    groups = [
        np.argsort(lengths[first : min(first + group, used)], kind="stable") + first for first in range(0, used, group)
    ]
    turn = np.argsort(hash64(np.arange(whole), seed, epoch, _BATCHES), kind="stable")
    batches = np.concatenate([*groups, np.arange(0)]).reshape(whole, batch_size)[turn]
    return np.concatenate([batches.ravel(), np.arange(used, len(lengths))])
