"""Order of an epoch from easy to hard samples, in which each sample occurs once.

Competence-based Curriculum Learning for Neural Machine Translation. Platanios, Stretcu, Neubig, Poczos & Mitchell,
2019, arXiv 1903.09848. Departure: samples are drawn from the easiest without replacement, so that an epoch still
visits each sample once; what is left of an epoch is in random order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

#: Number of parts of an epoch in which the pool of samples stays the same.
STAGES = 100


def competence(progress: float, start: float, root: bool) -> float:
    """Returns the fraction of the samples, the easiest ones, that may be drawn.

    Args:
        progress: Progress of the curriculum, 0 to 1.
        start: Fraction at the start.
        root: Whether the fraction grows by the root of the progress, fast at first, and not in proportion to it.
    """
    progress = min(1.0, progress)
    if root:
        return float(np.sqrt(progress * (1 - start**2) + start**2))
    return start + (1 - start) * progress


def paced_order(shuffled: np.ndarray, scores: np.ndarray, pool_at: Callable[[float], float]) -> np.ndarray:
    """Returns a permutation in which each sample is among the easiest at its place in the epoch.

    The epoch has :data:`STAGES` parts. A part's samples are the first unused ones, in the shuffled order, of the
    easiest `pool_at(place)` of all, or of as many as are needed.

    Args:
        shuffled: Indices of the samples in random order, int64 `[N]`.
        scores: Difficulty of each sample, `[N]`; equal scores keep the random order.
        pool_at: Function from the fraction of the epoch before a part to the fraction of the samples in its pool.
    """
    size = len(shuffled)
    easiest = np.argsort(scores[shuffled], kind="stable")  # places in the shuffled order, by difficulty
    rank = np.empty(size, dtype=np.int64)
    rank[easiest] = np.arange(size)  # rank of each place
    edges = np.linspace(0, size, min(STAGES, size) + 1).astype(np.int64)
    used = np.zeros(size, dtype=bool)
    order = np.empty(size, dtype=np.int64)
    for first, stop in itertools.pairwise(edges):
        pool = max(int(np.ceil(pool_at(first / size) * size)), int(stop))
        free = np.flatnonzero(~used & (rank < pool))
        chosen = free[: stop - first]
        used[chosen] = True
        order[first:stop] = chosen
    return shuffled[order]
