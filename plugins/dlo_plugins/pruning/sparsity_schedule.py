"""Sparsity over a run: the cubic schedule of gradual pruning.

Zhu & Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017, arXiv
1710.01878, equation 1.
"""

from __future__ import annotations

from dlo_framework.errors import check_number


def cubic_sparsity(progress: float, final: float, initial: float = 0.0) -> float:
    """Returns the sparsity at a point of the schedule: ``s_f + (s_i - s_f) (1 - progress)^3``.

    It rises fast at first, while many weights are redundant, and slowly at the end.

    Args:
        progress: Fraction of the way from the schedule's begin to its end; values outside [0, 1] are clamped.
        final: Sparsity at the end.
        initial: Sparsity at the begin.
    """
    left = 1.0 - min(1.0, max(0.0, progress))
    return final + (initial - final) * left**3


def ticket_sparsity(round_number: int, amount: float) -> float:
    """Returns the sparsity after rounds that each prune a fraction of the remaining weights: ``1 - (1 - amount)^n``.

    Args:
        round_number: Number of rounds so far; 0 gives a dense model.
        amount: Fraction of the remaining weights that each round prunes.
    """
    return 1.0 - (1.0 - amount) ** round_number


def check_fraction(value: float, what: str, usual: str) -> None:
    """Checks that a fraction of the weights is in (0, 1).

    Raises:
        DloError: If it is not.
    """
    check_number(what, value, "above 0 and below 1, a fraction of the weights", usual)
