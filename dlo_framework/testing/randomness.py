"""Randomness of a training, made equal for one process and several ranks, or switched off, with a note.

Each rank draws its own random numbers, so that dropout, random augmentation and mixing alone make a run on several
ranks differ from that of one process. A comparison of the two must remove them.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from dlo_framework.data import hash64
from dlo_framework.data.module import ResumableDataModule
from dlo_framework.random_streams import preserved_random_state, seed_all
from dlo_framework.resume import ReplayedLoader

#: Names of attributes with the probability of a dropout, in any module: modules of transformers and torch have such
#: attributes beside ``nn.Dropout``.
_RATE = re.compile(r"(^|_)(dropout|drop|drop_path|droppath|layerdrop)(_p|_prob|_probability|_rate)?$")
#: Names of such attributes in modules whose class name matches the pattern below.
_RATE_OF_DROP = re.compile(r"^(p|prob|drop_prob|drop_rate)$")
_DROPS = re.compile(r"drop|stochasticdepth", re.IGNORECASE)


# --- the model -----------------------------------------------------------------------------------------------


def switch_off_dropout(model: nn.Module) -> str | None:
    """Sets the rate of every dropout in a model to 0: dropout, stochastic depth, layer drop.

    They are found by their attributes: ``p``, ``prob`` or ``drop_prob`` of a class with "drop" in its name;
    ``dropout``, ``attention_dropout``, ``drop_path_rate`` and the like of any other module, and of its ``config``,
    which transformers' models read in their forward pass.

    Returns:
        Modules that were switched off, such as ``12 Dropout, 6 DropPath``; None if there were none.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            attributes = getattr(holder, "__dict__", None)
            if attributes is None:
                continue
            rates = [name for name, value in attributes.items() if _is_rate(holder, name, value)]
            for name in rates:
                setattr(holder, name, 0.0)
            if rates:
                found[type(holder).__name__] += 1
        if isinstance(module, nn.RReLU) and module.lower != module.upper:
            module.lower = module.upper = (module.lower + module.upper) / 2
            found["RReLU"] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or None


def _is_rate(holder: Any, name: str, value: Any) -> bool:
    if not isinstance(value, float) or not 0 < value <= 1:
        return False
    return bool(_RATE.search(name) or (_DROPS.search(type(holder).__name__) and _RATE_OF_DROP.match(name)))


# --- the data ------------------------------------------------------------------------------------------------


class SeededDataset(Dataset):
    """Map-style dataset whose items draw random numbers seeded by their index, the same on any rank."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with preserved_random_state():  # Loading in the main process must not change the model's.
            seed_all(int(hash64(np.array([int(index)]), self.seed)[0]) >> 1)
            return self.dataset[index]


class GlobalBatches(BatchSampler):
    """Batch sampler that concatenates the batches of several ranks under Lightning's ``DistributedSampler``.

    Lightning (2.6) distributes the training data of a plain ``DataLoader`` over ranks by that sampler: shuffled, even
    if the loader does not shuffle, and seeded by ``seed_everything``.
    """

    def __init__(self, dataset: Any, batch_size: int, shares: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self.samplers: list[DistributedSampler] = [
            DistributedSampler(dataset, num_replicas=shares, rank=rank, shuffle=shuffle, seed=seed)
            for rank in range(shares)
        ]
        self.batch_size, self.drop_last = batch_size, drop_last

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of all ranks' samplers."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        ranks = [BatchSampler(sampler, self.batch_size, self.drop_last) for sampler in self.samplers]
        for batches in zip(*ranks, strict=True):
            yield [index for batch in batches for index in batch]

    def __len__(self) -> int:
        return len(BatchSampler(self.samplers[0], self.batch_size, self.drop_last))


def prepare_loaders(loaders: Any, *, seed: int, shares: int | None, shuffle: bool, notes: list[str]) -> Any:
    """Returns training loaders whose batches are the same for one process and several ranks.

    A plain ``DataLoader`` over a map-style dataset gets seeded items; for the one process it also gets the concatenated
    batches of all ranks. Other loaders are returned unchanged: dlo's own loaders are equal already, and others are not
    known.

    Args:
        loaders: Result of ``train_dataloader``: a loader, or a nested structure of loaders.
        seed: Seed of the items and of the order.
        shares: Number of data-parallel ranks whose batches make up one batch of the one process; None on a rank.
        shuffle: Whether Lightning's sampler shuffles on ranks; it does not with ``overfit_batches``.
        notes: List to which notes on the changes are added.
    """

    def prepare(loader: DataLoader) -> DataLoader:
        sampler, dataset = loader.sampler, loader.dataset
        is_plain = type(loader) in (DataLoader, ReplayedLoader) and loader.batch_size is not None
        if not is_plain or isinstance(dataset, IterableDataset) or isinstance(sampler, DistributedSampler):
            notes.append(
                f"data: {type(loader).__name__} over {type(dataset).__name__} is used unchanged; its random choices"
                " are not made equal"
            )
            return loader
        notes.append(f"data: each sample of {type(dataset).__name__} draws random numbers seeded by its index")
        seeded = SeededDataset(dataset, seed)
        options: dict[str, Any] = {"batch_size": loader.batch_size, "sampler": sampler, "drop_last": loader.drop_last}
        if shares is not None:
            assert loader.batch_size is not None
            batches = GlobalBatches(seeded, loader.batch_size, shares, loader.drop_last, shuffle, seed)
            options = {"batch_sampler": batches}
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"):
            options[name] = getattr(loader, name)
        return DataLoader(seeded, persistent_workers=loader.persistent_workers, **options)

    if isinstance(loaders, CombinedLoader):
        loaders.flattened = [prepare(item) if isinstance(item, DataLoader) else item for item in loaders.flattened]
        return loaders
    return apply_to_collection(loaders, DataLoader, prepare)


def prepare_data(owner: Any, **options: Any) -> None:
    """Replaces an object's loaders for training and validation by prepared ones; see :func:`prepare_loaders`.

    Args:
        owner: Datamodule, or module with loaders of its own; this object is changed in place.
        **options: Arguments of :func:`prepare_loaders`.
    """
    if isinstance(owner, ResumableDataModule):
        options["notes"].append(
            f"data: {type(owner).__name__} draws each sample's random numbers from seed, epoch and index: equal"
        )
        return
    owner.train_dataloader = _prepared(owner.train_dataloader, options)
    owner.val_dataloader = _prepared(owner.val_dataloader, options | {"shares": None})


def _prepared(hook: Callable[[], Any], options: dict[str, Any]) -> Callable[[], Any]:
    @functools.wraps(hook)
    def dataloader() -> Any:
        return prepare_loaders(hook(), **options)

    # Lightning (2.6) treats a hook as missing if its code is the base class's, wrapped or not.
    return dataloader


# --- callbacks and others of the run ---------------------------------------------------------------------------


def call_for_parity(parts: list[Any], shares: int) -> list[str]:
    """Calls the method ``for_parity(shares)`` of each object that has one; returns notes on the changes.

    The method makes a callback, datamodule or module do the same in one process, whose batches are the concatenated
    batches of the ranks, as on the ranks. It returns a line about the changes, or None.

    Args:
        parts: Model, data and callbacks of the run.
        shares: Number of data-parallel ranks whose batches make up one batch of this process; 1 on a rank.
    """
    lines = []
    for part in parts:
        method = getattr(part, "for_parity", None)
        line = method(shares) if callable(method) else None
        if line:
            lines.append(f"{type(part).__name__}: {line}")
    return lines
