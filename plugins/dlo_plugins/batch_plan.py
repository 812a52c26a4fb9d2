"""The mathematics of a batch size that changes: schedules, windows of micro-batches, and the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from dlo_framework.data import Position, Window
from dlo_framework.errors import DloError
from dlo_plugins.points import Point, latest, parse_point

Number = TypeVar("Number", float, Tensor)
LRRule = Literal["none", "sqrt", "linear"]


@dataclass
class LRDecay:
    """A learning-rate schedule that decays; the batch grows in its stead.

    Attributes:
        factor: what each decay multiplies the rate by, in (0, 1).
        at: the points where it decays, for a step schedule: ``["30%", "60%"]``, or epochs, or samples.
        every: epochs between decays, for an exponential schedule.
        max_batch_size: the batch grows up to this; after that the rate does decay. None for no limit but the data.
    """

    factor: float
    at: list[str | float] | None = None
    every: float | None = None
    max_batch_size: int | None = None

    def check(self) -> None:
        """Raises a DloError for values out of range, and unless one of ``at`` and ``every`` is given."""
        if not 0 < self.factor < 1:
            raise DloError(f"decay_to_growth: factor lies between 0 and 1, but was {self.factor}; 0.1 or 0.2 is usual")
        if (self.at is None) == (self.every is None):
            raise DloError("decay_to_growth: give 'at' (a step schedule) or 'every' (an exponential one), and one only")
        if self.every is not None and self.every <= 0:
            raise DloError(f"decay_to_growth: 'every' is a number of epochs above 0, but was {self.every}")
        self.points()

    def points(self) -> list[Point]:
        """Returns the points of a step schedule."""
        return [parse_point(point, "decay_to_growth.at") for point in self.at or []]

    def decays(self, at: Position, max_epochs: float) -> int:
        """Returns how many decays lie before a batch that begins at ``at``."""
        if self.every is not None:
            # As integers, so that a rounding error cannot move a boundary by a batch.
            return int((at.epoch * at.size + at.samples) // max(1, round(self.every * at.size)))
        return sum(point.reached(at, max_epochs) for point in self.points())


@dataclass
class NoiseScale:
    """A batch that follows the gradient noise scale, measured on the run.

    Attributes:
        max_batch_size: the largest batch.
        multiple: the batch aimed at, over the noise scale. At 1 a step costs twice the least number of steps and
            of samples (McCandlish et al. 2018).
        every: optimizer steps between decisions.
        smoothing: how much of the running means a new measurement leaves in place, at each decision.
    """

    max_batch_size: int
    multiple: float = 1.0
    every: int = 50
    smoothing: float = 0.9

    def check(self, batch_size: int) -> None:
        """Raises a DloError for values out of range."""
        if self.max_batch_size < batch_size:
            raise DloError(
                f"noise_scale: max_batch_size is at least the batch size of {batch_size}, but was {self.max_batch_size}"
            )
        if self.multiple <= 0 or self.every < 1 or not 0 <= self.smoothing < 1:
            raise DloError(
                "noise_scale: multiple is above 0, every at least 1 and smoothing in [0, 1), but were"
                f" {self.multiple}, {self.every} and {self.smoothing}"
            )


@dataclass
class NoiseEstimate:
    """Running means of the two numbers whose ratio is the simple noise scale, ``tr(covariance) / |gradient|^2``.

    Each is unbiased by itself (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), and their ratio is not, so
    they are averaged apart. The weights of the means sum to 1 from the first measurement on (as Adam's correction).

    Attributes:
        noise: the trace of the covariance of one sample's gradient.
        signal: the squared norm of the true gradient.
        weight: how much of both means measurements make up, the rest being their start at 0.
    """

    noise: float = 0.0
    signal: float = 0.0
    weight: float = 0.0

    def add(self, noise: float, signal: float, smoothing: float) -> None:
        """Adds one measurement of both; ``smoothing`` is the weight of the old mean."""
        self.noise = smoothing * self.noise + (1 - smoothing) * noise
        self.signal = smoothing * self.signal + (1 - smoothing) * signal
        self.weight = smoothing * self.weight + (1 - smoothing)

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None while the measurements are too noisy to tell."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None


def noise_and_signal(small: Number, large: Number, sizes: tuple[float, float]) -> tuple[Number, Number]:
    """Returns unbiased estimates of the trace of the per-sample covariance, and of the squared true gradient.

    The mean of ``b`` samples' gradients has an expected squared norm of ``signal + noise / b``; two batch sizes
    give two equations.

    Args:
        small: squared norm of a gradient that is the mean over ``sizes[0]`` samples.
        large: the same over ``sizes[1]``, more than ``sizes[0]``.
        sizes: see there.
    """
    few, many = sizes
    signal = (many * large - few * small) / (many - few)
    noise = (small - large) / (1 / few - 1 / many)
    return noise, signal


def scheduled_size(steps: Mapping[Point, int], first: int, at: Position, max_epochs: float) -> int:
    """Returns the batch size of an explicit schedule: ``first`` before its first point."""
    found = latest(steps, at, max_epochs)
    return first if found is None else found


def grown_size(decay: LRDecay, first: int, at: Position, max_epochs: float) -> tuple[int, float]:
    """Returns the batch size that stands in for a decayed learning rate, and what is left for the rate to decay.

    Smith et al. 2018 (arXiv 1711.00489): the noise of SGD goes with lr / batch, so that dividing the one or
    multiplying the other anneals alike; where the batch can grow no more, the rate takes over.

    Returns:
        The batch size, rounded, and a factor of the learning rate, 1 while the batch can grow.
    """
    wanted = first * decay.factor ** -decay.decays(at, max_epochs)
    most = min(decay.max_batch_size or at.size, at.size)
    if wanted <= most:
        return round(wanted), 1.0
    return most, most / wanted


def window(batch_size: int, limit: int | None, world_size: int, least: int = 1) -> Window:
    """Returns the micro-batches that make up an optimizer step of ``batch_size`` samples.

    As few as the limit allows, all of one size that the ranks divide, so that the mean of their means is the mean
    over the samples. Where no number of them gives exactly ``batch_size``, the step is up to ``batches * world_size
    - 1`` samples smaller.

    Args:
        batch_size: samples of an optimizer step, over all ranks.
        limit: samples that one rank can hold at once; None for no limit.
        world_size: data-parallel ranks.
        least: at least so many micro-batches.
    """
    at_once = batch_size if limit is None else limit * world_size
    fewest = max(least, math.ceil(batch_size / at_once))
    for batches in range(fewest, 2 * fewest + 1):
        if batch_size % (batches * world_size) == 0:
            return Window(batch_size // batches, batches)
    return Window(max(1, batch_size // (fewest * world_size)) * world_size, fewest)


def lr_factor(rule: LRRule, batch_size: float, first: float) -> float:
    """Returns what the learning rate of ``first`` samples a step is multiplied by at ``batch_size``.

    ``linear`` as in Goyal et al. 2017 (arXiv 1706.02677), for SGD; ``sqrt`` as in Krizhevsky 2014 (arXiv 1404.5997),
    and for adaptive optimizers Malladi et al. 2022 (arXiv 2205.10287).
    """
    growth = batch_size / first
    return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[rule]
