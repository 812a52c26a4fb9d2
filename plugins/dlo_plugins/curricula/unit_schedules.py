"""Which units of a model train after a fraction of training: freezing from below, and unfreezing from above.

Units are numbered from below: the stem is 0, then the blocks, then the head. In both schedules the frozen units are
those below a number.

- FreezeOut: Accelerate Training by Progressively Freezing Layers. Brock, Lim, Ritchie & Weston, 2017, arXiv 1706.04983.
- Universal Language Model Fine-tuning for Text Classification (gradual unfreezing, discriminative rates). Howard &
  Ruder, 2018, arXiv 1801.06146.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

#: Fractions that are computed in two ways must not differ in which side of a point they are on.
_ROUNDING = 1e-9


class UnitSchedule(ABC):
    """Schedule of a number of units."""

    @abstractmethod
    def frozen(self, fraction: float) -> int:
        """Returns the number of units, counted from below, that do not train after a fraction of training."""

    @abstractmethod
    def factors(self, fraction: float) -> list[float]:
        """Returns the factor of the learning rate of each unit after a fraction of training."""


class FreezeOutSchedule(UnitSchedule):
    """Anneals the rate of each unit to 0 along half a cosine, the lower units' sooner; at 0 the unit is frozen.

    Args:
        units: Number of units.
        t0: Fraction of training after which the lowest unit is frozen, before the cube; the highest trains to the end.
        cubic: Whether the fractions are cubed, which freezes the lower units sooner.
        scale_lr: Whether a unit's initial rate is divided by its fraction, so that all units move about as far.
    """

    def __init__(self, units: int, t0: float, cubic: bool, scale_lr: bool) -> None:
        ends = [t0 + (1 - t0) * number / (units - 1) for number in range(units)]
        self.ends = [end**3 if cubic else end for end in ends]
        self.scale_lr = scale_lr

    def frozen(self, fraction: float) -> int:
        """Returns the number of units that are frozen; never the highest."""
        return sum(fraction >= end - _ROUNDING for end in self.ends[:-1])

    def factors(self, fraction: float) -> list[float]:
        """Returns the factor of each unit's learning rate."""
        return [
            0.5 * (1 + math.cos(math.pi * min(1.0, fraction / end))) / (end if self.scale_lr else 1)
            for end in self.ends
        ]


class UnfreezeSchedule(UnitSchedule):
    """Trains the highest unit from the start, and one more from above after each interval.

    Args:
        units: Number of units.
        interval: Interval, as a fraction of training.
        lr_decay: Ratio of the learning rates of a unit and the one below it.
    """

    def __init__(self, units: int, interval: float, lr_decay: float) -> None:
        self.units, self.interval = units, interval
        self._factors = [lr_decay ** (number + 1 - units) for number in range(units)]

    def frozen(self, fraction: float) -> int:
        """Returns the number of units that do not train yet."""
        return max(0, self.units - 1 - int(fraction / self.interval + _ROUNDING))

    def factors(self, fraction: float) -> list[float]:
        """Returns the factor of each unit's learning rate, which does not change."""
        return self._factors
