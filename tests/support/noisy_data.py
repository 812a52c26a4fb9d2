"""Data whose augmentation shows any random number that was drawn in between."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset

BATCHES, BATCH = 7, 4


class Noisy(Dataset):
    """Samples whose augmentation draws from each of the three global generators."""

    def __init__(self, samples: int = BATCHES * BATCH) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index):
        return torch.full((6,), index / 28) + torch.randn(6) + random.random() + float(np.random.rand()), index % 3
