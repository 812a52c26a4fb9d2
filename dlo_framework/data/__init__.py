"""Data loading that resumes exactly: the order of the samples is a pure function of the seed.

* :class:`ResumableBatchSampler` decides which samples each rank sees, and gives each its own random seed.
* :class:`ResumableLoader` loads them and counts how many the trainer has received.
* :class:`ResumableDataModule` builds such loaders for a Lightning trainer and saves their position in checkpoints.

For data at scale, :class:`GlobalShuffle`, :class:`BufferShuffle` and :class:`MixtureOrder` compute the sample at a
position without an array of all samples; :mod:`dlo_framework.data.remote` reads remote files through a bounded cache.
"""

from dlo_framework.data.evaluation import step_samples
from dlo_framework.data.loader import CountedBatch, ReadAheadDataset, ResumableLoader, ignore_stop_signals
from dlo_framework.data.mixture import Mixture, MixtureOrder, MixturePoint
from dlo_framework.data.module import ResumableDataModule, data_parallel_coordinates, gradient_ranks
from dlo_framework.data.sampler import (
    VOID,
    BufferShuffle,
    Draw,
    GlobalShuffle,
    InOrder,
    Permutation,
    Position,
    ResumableBatchSampler,
    SampleOrder,
    Window,
    hash64,
    uniform,
)
from dlo_framework.random_streams import seed_all

__all__ = [
    "VOID",
    "BufferShuffle",
    "CountedBatch",
    "Draw",
    "GlobalShuffle",
    "InOrder",
    "Mixture",
    "MixtureOrder",
    "MixturePoint",
    "Permutation",
    "Position",
    "ReadAheadDataset",
    "ResumableBatchSampler",
    "ResumableDataModule",
    "ResumableLoader",
    "SampleOrder",
    "Window",
    "data_parallel_coordinates",
    "gradient_ranks",
    "hash64",
    "ignore_stop_signals",
    "seed_all",
    "step_samples",
    "uniform",
]
