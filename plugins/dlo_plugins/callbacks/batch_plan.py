"""Mathematics of a changing batch size: schedules, windows of micro-batches, and the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from dlo_framework.data import Position, Window
from dlo_framework.errors import DloError, check_number, check_one_of
from dlo_plugins.callbacks.run_position import RunPosition, parse_position, value_at

Number = TypeVar("Number", float, Tensor)
LRRule = Literal["none", "sqrt", "linear"]


@dataclass
class LRDecay:
    """Decaying learning-rate schedule that the batch size replaces by growth.

    Attributes:
        factor: Factor by which each decay multiplies the learning rate, in (0, 1).
        at: Points of the decays, for a step schedule: ``["30%", "60%"]``, or epochs, or samples.
        every: Number of epochs between decays, for an exponential schedule.
        max_batch_size: Largest batch size; once it is reached, the learning rate decays. None for the size of the data.
    """

    factor: float
    at: list[str | float] | None = None
    every: float | None = None
    max_batch_size: int | None = None

    def check(self) -> None:
        """Raises a DloError for values out of range, and unless exactly one of ``at`` and ``every`` is set."""
        check_number("decay_to_growth: factor", self.factor, "above 0 and below 1", "set 0.1 or 0.2, which are usual")
        check_one_of("decay_to_growth", at=self.at, every=self.every)
        check_number("decay_to_growth: 'every'", self.every, "a number of epochs above 0", "2 is usual")
        self.points()

    def points(self) -> list[RunPosition]:
        """Returns the points of a step schedule."""
        return [parse_position(point, "decay_to_growth.at") for point in self.at or []]

    def decays(self, at: Position, max_epochs: float) -> int:
        """Returns the number of decays before a batch that begins at ``at``."""
        if self.every is not None:
            # As integers, so that a rounding error cannot move a boundary by a batch.
            return int((at.epoch * at.size + at.samples) // max(1, round(self.every * at.size)))
        return sum(point.reached(at, max_epochs) for point in self.points())


@dataclass
class NoiseScale:
    """Settings of a batch size that follows the gradient noise scale, measured during the run.

    Attributes:
        max_batch_size: Largest batch size.
        multiple: Ratio of the target batch size to the noise scale. At 1, training takes twice the least number of
            steps and twice the least number of samples (McCandlish et al. 2018).
        every: Number of optimizer steps between decisions.
        smoothing: Weight of the old running means at each decision.
    """

    max_batch_size: int
    multiple: float = 1.0
    every: int = 50
    smoothing: float = 0.9

    def check(self, batch_size: int) -> None:
        """Raises a DloError for values out of range."""
        if self.max_batch_size < batch_size:
            raise DloError(
                f"noise_scale: max_batch_size must be at least the batch size of {batch_size}, got"
                f" {self.max_batch_size}; set {batch_size} or more"
            )
        check_number("noise_scale: multiple", self.multiple, "above 0", "the default is 1")
        check_number("noise_scale: every", self.every, "at least 1", "the default is 50")
        check_number("noise_scale: smoothing", self.smoothing, "at least 0 and below 1", "the default is 0.9")


@dataclass
class NoiseEstimate:
    """Running means of the two numbers whose ratio is the simple noise scale, ``tr(covariance) / |gradient|^2``.

    Each of them is unbiased (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1) but their ratio is not, so they
    are averaged separately. Their start at 0 cancels in the ratio.

    Attributes:
        noise: Trace of the covariance of one sample's gradient.
        signal: Squared norm of the true gradient.
        weight: Total weight of the measurements in both means; the rest is the weight of their start at 0.
    """

    noise: float = 0.0
    signal: float = 0.0
    weight: float = 0.0

    def add(self, noise: float, signal: float, smoothing: float) -> None:
        """Adds one measurement of both; ``smoothing`` is the weight of the old means."""
        self.noise = smoothing * self.noise + (1 - smoothing) * noise
        self.signal = smoothing * self.signal + (1 - smoothing) * signal
        self.weight = smoothing * self.weight + (1 - smoothing)

    @property
    def scale(self) -> float | None:
        """Noise scale in samples; None while the measurements are too noisy to give one."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None


def noise_and_signal(small: Number, large: Number, sizes: tuple[float, float]) -> tuple[Number, Number]:
    """Returns unbiased estimates of the trace of the per-sample covariance, and of the squared true gradient.

    The mean of ``b`` samples' gradients has an expected squared norm of ``signal + noise / b``; two batch sizes
    give two equations.

    Args:
        small: Squared norm of a gradient that is the mean over ``sizes[0]`` samples.
        large: Squared norm of a gradient that is the mean over ``sizes[1]`` samples.
        sizes: Numbers of samples, the smaller one first.
    """
    few, many = sizes
    signal = (many * large - few * small) / (many - few)
    noise = (small - large) / (1 / few - 1 / many)
    return noise, signal


def scheduled_size(steps: Mapping[RunPosition, int], first: int, at: Position, max_epochs: float) -> int:
    """Returns the batch size of an explicit schedule: ``first`` before its first point."""
    found = value_at(steps, at, max_epochs)
    return first if found is None else found


def grown_size(decay: LRDecay, first: int, at: Position, max_epochs: float) -> tuple[int, float]:
    """Returns the batch size that replaces a decayed learning rate, and the decay that is left for the rate.

    Smith et al. 2018 (arXiv 1711.00489): the noise of SGD is proportional to lr / batch, so dividing the rate and
    multiplying the batch anneal in the same way. Once the batch cannot grow further, the rate decays.

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

    They are as few as the limit allows, and of one size that is divisible by the ranks, so that the mean of their means
    is the mean over the samples. If no number of them gives exactly ``batch_size``, the step is smaller by up to
    ``batches * world_size - 1`` samples.

    Args:
        batch_size: Samples of an optimizer step, over all ranks.
        limit: Samples of a micro-batch that fit on one rank; None for no limit.
        world_size: Number of data-parallel ranks.
        least: Smallest number of micro-batches.
    """
    at_once = batch_size if limit is None else limit * world_size
    fewest = max(least, math.ceil(batch_size / at_once))
    for batches in range(fewest, 2 * fewest + 1):
        if batch_size % (batches * world_size) == 0:
            return Window(batch_size // batches, batches)
    return Window(max(1, batch_size // (fewest * world_size)) * world_size, fewest)


def lr_factor(rule: LRRule, batch_size: float, first: float) -> float:
    """Returns the factor on the learning rate at ``batch_size``, for a rate that was tuned at ``first`` samples a step.

    ``linear`` is from Goyal et al. 2017 (arXiv 1706.02677), for SGD; ``sqrt`` is from Krizhevsky 2014 (arXiv
    1404.5997), and from Malladi et al. 2022 (arXiv 2205.10287) for adaptive optimizers.
    """
    growth = batch_size / first
    return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[rule]
