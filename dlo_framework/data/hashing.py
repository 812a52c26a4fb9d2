"""Random numbers as pure functions: integers are hashed, and no generator is advanced.

A generator's next number depends on the number of earlier calls, and so on the number of workers, on the rank and on
where a run was stopped. A hash of (seed, epoch, index) depends on those three alone. The hash is the finaliser of
SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"), applied once per key; it is
implemented here, so that no library's new version changes the order of anyone's data.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def _scramble(x: np.ndarray) -> np.ndarray:
    x = x + _GOLDEN  # arrays of unsigned integers wrap silently, as a hash needs
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLY_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLY_2
    return x ^ (x >> np.uint64(31))


def hash64(values: np.ndarray, *keys: int) -> np.ndarray:
    """Returns a well-mixed 64-bit hash of each value, under the given keys.

    Args:
        values: Integers of any shape and integer type.
        keys: Further integers to hash with, such as (seed, epoch); their order matters.

    Returns:
        ``uint64`` array of ``values``' shape.
    """
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = _scramble(state ^ np.array([key & _WORD], dtype=np.uint64))
    return _scramble(values.astype(np.uint64) ^ state)


def uniform(values: np.ndarray, *keys: int) -> np.ndarray:
    """Returns a number in [0, 1) for each value: the top 53 bits of :func:`hash64` as ``float64``."""
    return (hash64(values, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
