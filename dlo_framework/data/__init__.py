"""Data loading that resumes exactly: the order of the samples is a pure function of the seed.

* :class:`ResumableBatchSampler` decides which samples each rank sees, and gives each its own random seed.
* :class:`ResumableLoader` loads them and counts how many the trainer has received.
* :class:`ResumableDataModule` builds such loaders for a Lightning trainer and saves their position in checkpoints.
"""

from dlo_framework.data.evaluation import step_samples
from dlo_framework.data.hashing import hash64, uniform
from dlo_framework.data.loader import CountedBatch, ResumableLoader, seed_all
from dlo_framework.data.module import ResumableDataModule, data_parallel_coordinates, gradient_ranks
from dlo_framework.data.sampler import VOID, Draw, Position, ResumableBatchSampler, Window
from dlo_framework.data.workers import ignore_stop_signals

__all__ = [
    "VOID",
    "CountedBatch",
    "Draw",
    "Position",
    "ResumableBatchSampler",
    "ResumableDataModule",
    "ResumableLoader",
    "Window",
    "data_parallel_coordinates",
    "gradient_ranks",
    "hash64",
    "ignore_stop_signals",
    "seed_all",
    "step_samples",
    "uniform",
]
