"""Mixtures of data sources: which source gives the n-th sample of a run, as a pure function of n.

Sources are not drawn at random: the n-th sample comes from the source that is furthest behind its share. Source i gets
its j-th sample at the time t at which the integral of its weight reaches j + 1/2, and samples are sorted by time. That
is the divisor method of Webster and Sainte-Laguë, whose counts differ from the shares by less than one sample per
source, at each n, and also while the weights change. The integral has a closed form, so that any position is computed
without those before it: a run resumes exactly on any number of ranks, and all ranks together see the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from dlo_framework.data.sampler import BufferShuffle, GlobalShuffle, Placed, SampleOrder, hash64
from dlo_framework.errors import DloError, check_number, did_you_mean

Ramp = Literal["step", "linear"]

#: Number of samples whose order is computed together.
_BLOCK = 4096
#: Number of blocks that stay in memory.
_KEPT = 16


class MixturePoint(NamedTuple):
    """Weights from one moment of a run.

    Attributes:
        samples: Number of samples of the run before it.
        weights: Weight of each source, by name; only their ratios count.
    """

    samples: int
    weights: dict[str, float]


class Assignment(NamedTuple):
    """Sources of some samples of a run.

    Attributes:
        source: Index of each sample's source, int64 [P].
        number: Number of samples that the source has given before, since the beginning of the run, int64 [P].
    """

    source: np.ndarray
    number: np.ndarray


class Mixture:
    """Assigns each sample of a run to a source, with weights that may change during the run.

    Args:
        names: Names of the sources.
        points: Weights by moment, in the order of ``samples``; the first is at 0. After the last, its weights stay.
        ramp: Change between two moments: ``step`` keeps the weights until the next one, ``linear`` interpolates.

    Raises:
        DloError: If names are unknown or missing, weights are not positive, or moments are not ascending from 0.
    """

    def __init__(self, names: Sequence[str], points: Sequence[MixturePoint], ramp: Ramp = "step") -> None:
        self.names = list(names)
        check_points(self.names, points)
        self.ramp = ramp
        self._exact = _ExactShares(
            [point.samples for point in points],
            [[Fraction(point.weights[name]) for name in names] for point in points],
            ramp,
        )
        self._times = np.array([point.samples for point in points], dtype=np.float64)
        self._weights = np.array([[float(weight) for weight in row] for row in self._exact.weights])
        self._integrals = np.array([[float(share) for share in row] for row in self._exact.integrals])
        self._marks: dict[int, np.ndarray] = {}
        self._blocks: dict[int, Assignment] = {}

    def assign(self, start: int, stop: int) -> Assignment:
        """Returns the sources of the run's samples ``start`` to ``stop - 1``.

        Args:
            start: First sample.
            stop: Sample after the last.
        """
        assignments: list[Assignment] = []
        block = self._block_of(start)
        while start < stop:
            before = self._counts(block)
            first, past = int(before.sum()), int(self._counts(block + 1).sum())
            if first <= start < past:
                whole = self._assign_block(block)
                some = slice(start - first, min(stop, past) - first)
                assignments.append(Assignment(whole.source[some], whole.number[some]))
                start = min(stop, past)
            block += 1
        if not assignments:
            return Assignment(np.empty(0, np.int64), np.empty(0, np.int64))
        return Assignment(*(np.concatenate(parts) for parts in zip(*assignments, strict=True)))

    def _segment(self, samples: float) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the moment before, the weights there, and their change per sample."""
        place = int(np.searchsorted(self._times, samples, side="right")) - 1
        weights = self._weights[place]
        if self.ramp == "step" or place + 1 == len(self._times):
            return place, weights, np.zeros_like(weights)
        length = self._times[place + 1] - self._times[place]
        return place, weights, (self._weights[place + 1] - weights) / length

    def _counts(self, block: int) -> np.ndarray:
        """Returns how many samples each source gives in the blocks of time before this one, int64 [sources].

        It alone decides which samples belong to a block. It is exact, so that no sample is repeated or missing.
        """
        if block not in self._marks:
            if len(self._marks) > 4 * _KEPT:
                self._marks.clear()
            self._marks[block] = np.array(self._exact.rounded(block * _BLOCK), dtype=np.int64)
        return self._marks[block]

    def _block_of(self, position: int) -> int:
        """Returns the block of time whose samples include a position of the run."""
        block = max(0, position // _BLOCK)
        while block and int(self._counts(block).sum()) > position:
            block -= 1
        while int(self._counts(block + 1).sum()) <= position:
            block += 1
        return block

    def _assign_block(self, block: int) -> Assignment:
        if block in self._blocks:
            return self._blocks[block]
        first, past = self._counts(block), self._counts(block + 1)
        source = np.repeat(np.arange(len(self.names)), past - first)
        number = np.concatenate([np.arange(a, b) for a, b in zip(first.tolist(), past.tolist(), strict=True)])
        times = self._times_of(source, number, float(block * _BLOCK), float((block + 1) * _BLOCK))
        order = np.lexsort((number, source, times))
        if len(self._blocks) >= _KEPT:
            self._blocks.pop(next(iter(self._blocks)))
        self._blocks[block] = Assignment(source[order].astype(np.int64), number[order].astype(np.int64))
        return self._blocks[block]

    def _times_of(self, source: np.ndarray, number: np.ndarray, low: float, high: float) -> np.ndarray:
        """Returns when each source's share reaches ``number`` + 1/2, by bisection to a 64th of a sample."""
        lows, highs = np.full(len(source), low), np.full(len(source), high)
        edges = self._times[(self._times > low) & (self._times < high)]
        for _ in range(math.ceil(math.log2(64 * (high - low)))):
            middle = (lows + highs) / 2
            reached = self._shares_of(source, middle, low, edges) >= number + 0.5
            highs = np.where(reached, middle, highs)
            lows = np.where(reached, lows, middle)
        return highs

    def _shares_of(self, source: np.ndarray, times: np.ndarray, low: float, edges: np.ndarray) -> np.ndarray:
        """Returns the share of each source at its own time, float64 [P]; all times are in one block."""
        result = np.empty(len(times))
        bounds = np.concatenate([[low], edges])
        part = np.searchsorted(bounds, times, side="right") - 1
        for number, begin in enumerate(bounds.tolist()):
            chosen = part == number
            if chosen.any():
                place, weights, slope = self._segment(begin)
                past = times[chosen] - self._times[place]
                which = source[chosen]
                result[chosen] = self._integrals[place, which] + past * (weights[which] + 0.5 * slope[which] * past)
        return result


class _ExactShares:
    """Shares of the sources as fractions.

    Args:
        times: Moments, in samples.
        weights: Weights of the sources at each moment, of which only the ratios count.
        ramp: Change between two moments.
    """

    def __init__(self, times: list[int], weights: list[list[Fraction]], ramp: Ramp) -> None:
        self.times, self.ramp = times, ramp
        self.weights = [[weight / sum(row) for weight in row] for row in weights]
        self.integrals: list[list[Fraction]] = [[Fraction(0)] * len(self.weights[0])]
        for place, samples in enumerate(self.times[1:]):
            self.integrals.append(self._until(place, samples))

    def rounded(self, samples: int) -> list[int]:
        """Returns each source's share of the run's first samples, rounded to the nearest integer, halves up."""
        place = max(number for number, time in enumerate(self.times) if time <= samples)
        return [math.floor(share + Fraction(1, 2)) for share in self._until(place, samples)]

    def _until(self, place: int, samples: int) -> list[Fraction]:
        """Returns the shares at a time between a moment and the next."""
        past = samples - self.times[place]
        after = self.weights[place]
        if self.ramp == "linear" and place + 1 < len(self.times):
            length = self.times[place + 1] - self.times[place]
            after = [
                now + (then - now) * past / (2 * length)  # the mean since the moment
                for now, then in zip(after, self.weights[place + 1], strict=True)
            ]
        return [share + weight * past for share, weight in zip(self.integrals[place], after, strict=True)]


class MixtureOrder:
    """Order of the samples of several sources, mixed by weights; a :class:`dlo_framework.data.sampler.SampleOrder`.

    The dataset has the sources' samples one after the other. A source that has given all its samples begins its next
    pass, in another order, so that its samples occur equally often, to one.

    Args:
        mixture: Mixture of the sources.
        orders: Order of each source, whose epochs are the passes over it.
        size: Number of samples per epoch; None for the number of samples of all sources.
    """

    def __init__(self, mixture: Mixture, orders: Sequence[SampleOrder], size: int | None = None) -> None:
        assert len(orders) == len(mixture.names)
        self.mixture, self.orders = mixture, list(orders)
        self._first = np.cumsum([0] + [order.size for order in orders])
        self.size = int(self._first[-1]) if size is None else size

    def place(self, epoch: int, positions: np.ndarray) -> Placed:
        """Returns the samples at these positions; ``sample`` counts over all sources."""
        index, copy = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        if not len(positions):
            return Placed(index, copy)
        low, high = int(positions.min()), int(positions.max()) + 1
        assigned = self.mixture.assign(epoch * self.size + low, epoch * self.size + high)
        source, number = assigned.source[positions - low], assigned.number[positions - low]
        for which in np.unique(source).tolist():
            order = self.orders[which]
            passes, within = np.divmod(number, order.size)
            for turn in np.unique(passes[source == which]).tolist():
                chosen = (source == which) & (passes == turn)
                index[chosen] = self._first[which] + order.place(turn, within[chosen]).sample
                copy[chosen] = turn
        return Placed(index, copy)


def read_points(mix: Any, names: Sequence[str], sizes: Sequence[int]) -> list[MixturePoint]:
    """Returns the moments that the option ``mix`` describes.

    Args:
        mix: Weights by source, or a list of objects with ``samples`` and ``weights``; None for weights in proportion
            to the sources' sizes.
        names: Names of the sources.
        sizes: Number of samples of each source.

    Raises:
        DloError: If ``mix`` has another form.
    """
    if mix is None:
        return [MixturePoint(0, dict(zip(names, map(float, sizes), strict=True)))]
    if isinstance(mix, Mapping):
        return [MixturePoint(0, dict(mix))]
    points = []
    for moment in mix if isinstance(mix, list | tuple) else [mix]:
        if not isinstance(moment, Mapping) or set(moment) != {"samples", "weights"}:
            raise DloError(
                f"mix must be weights by source, or a list of moments, got {str(moment)[:80]!r}; write {{samples: 0,"
                f" weights: {{{', '.join(f'{name}: 1' for name in names)}}}}}"
            )
        if not isinstance(moment["samples"], int) or not isinstance(moment["weights"], Mapping):
            raise DloError(
                f"mix must have integers under samples and weights by source under weights, got {str(moment)[:80]!r}"
            )
        points.append(MixturePoint(moment["samples"], dict(moment["weights"])))
    return points


def check_points(names: Sequence[str], points: Sequence[MixturePoint]) -> None:
    """Checks the moments of a mixture.

    Raises:
        DloError: As :class:`Mixture` describes.
    """
    if not points or points[0].samples != 0:
        got = points[0].samples if points else "no moment"
        raise DloError(f"mix must begin at samples: 0, got {got}; add {{samples: 0, weights: ...}} as the first moment")
    for before, after in pairwise(points):
        if after.samples <= before.samples:
            raise DloError(
                f"mix must have moments with ascending samples, got {before.samples} before {after.samples}; sort them"
            )
    for point in points:
        for name, weight in point.weights.items():
            if name not in names:
                raise DloError(
                    f"mix must name sources, got {name!r}"
                    f"{did_you_mean(name, names) or '; the sources are ' + ', '.join(names)}"
                )
            allowed = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
            if not allowed or weight < 0 or (weight == 0 and len(points) == 1):
                rule = "positive" if len(points) == 1 else "positive, or 0 for a source that pauses"
                raise DloError(f"mix.{name} must be {rule}, got {weight}; raise it, or remove the source")
        missing = [name for name in names if name not in point.weights]
        if missing:
            raise DloError(f"mix must have a weight for each source, got none for {', '.join(missing)}; add it")
        if sum(point.weights.values()) <= 0:
            raise DloError(f"mix must have a positive weight at each moment, got none at samples {point.samples}")


ShuffleName = Literal["global", "buffer"]


class MixOptions(NamedTuple):
    """How sources are mixed and shuffled.

    Attributes:
        mix: Value of the option; see :func:`dlo_framework.data.mixture.read_points`.
        ramp: Change of the weights between two moments.
        shuffle: Shuffle inside a source: ``global`` or ``buffer``.
        chunk: Number of samples that stay together, under ``buffer``.
        buffer: Number of samples that are shuffled together, under ``buffer``.
        epoch_samples: Number of samples per epoch; None for those of all sources.
    """

    mix: Any
    ramp: Ramp
    shuffle: ShuffleName
    chunk: int
    buffer: int
    epoch_samples: int | None

    def order(self, names: Sequence[str], sizes: Sequence[int], seed: int) -> MixtureOrder:
        """Returns the order of the samples of all sources.

        Args:
            names: Names of the sources.
            sizes: Number of samples of each source.
            seed: Seed of the run's order.
        """
        mixture = Mixture(names, read_points(self.mix, names, sizes), self.ramp)
        seeds = (hash64(np.arange(len(names)), seed) >> np.uint64(1)).tolist()
        orders: list[SampleOrder] = [
            GlobalShuffle(size, own)
            if self.shuffle == "global"
            else BufferShuffle(size, own, chunk=self.chunk, buffer=self.buffer)
            for size, own in zip(sizes, seeds, strict=True)
        ]
        return MixtureOrder(mixture, orders, self.epoch_samples)

    def check(self, names: Sequence[str]) -> None:
        """Checks the options before files are opened.

        Raises:
            DloError: If weights are invalid, or a size is out of range.
        """
        check_number("epoch_samples", self.epoch_samples, "at least 1", "leave it out for all samples")
        self.order(names, [1] * len(names), 0)
