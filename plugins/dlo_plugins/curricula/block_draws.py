"""Which blocks a step leaves out: progressive layer drop.

Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping. Zhang & He, 2020,
arXiv 2010.13369. Departure: draws are a hash of (seed, step, block) and not of a generator, so that they are the same
on all ranks and after a resume.
"""

from __future__ import annotations

import math

import numpy as np

from dlo_framework.data.hashing import uniform

_STREAM = 0x4C44  # of the draws, among other hashes of the same seed


def progressive_theta(fraction: float, final: float, rate: float) -> float:
    """Returns theta, the keep probability of the deepest blocks: it falls from 1 to its final value.

    Args:
        fraction: Fraction of training, 0 to 1.
        final: Limit of theta; the paper's is 0.5.
        rate: Rate of the fall: `gamma` of the paper times the number of steps, 100 there.
    """
    return (1 - final) * math.exp(-rate * fraction) + final


def keep_probabilities(theta: float, blocks: int) -> list[float]:
    """Returns the keep probability of each block: 1 for the first, and falling linearly to almost theta at the last."""
    return [1 - number / blocks * (1 - theta) for number in range(blocks)]


def draw_kept(probabilities: list[float], step: int, seed: int) -> list[bool]:
    """Returns whether each block runs in a step.

    Args:
        probabilities: Keep probability of each block.
        step: Number of optimizer steps before this one.
        seed: Seed of the draws.
    """
    draws = uniform(np.arange(len(probabilities)), seed, step, _STREAM)
    return [bool(draw < keep) for draw, keep in zip(draws, probabilities, strict=True)]
