"""Evaluation with plain DataLoaders on several ranks, without the samples that torch's sampler repeats.

torch's DistributedSampler deals samples to ranks in turn, and repeats some so that all ranks have equally many: nine
samples on two ranks are evaluated as ten, and a mean over them is not that of one process. Lightning's sampler for
predictions repeats none, so that some ranks have a batch less, for which the others wait where a forward needs all.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dlo_framework.data.evaluation import count_samples
from dlo_framework.strategy_contract import contract_of


def without_repeats(loader: Any, trainer: Trainer) -> Any:
    """Returns a loader that evaluates each sample once, in equally many batches on all ranks.

    Loaders of training are returned unchanged, and so are those of predictions where a forward needs no other rank, and
    all but a DataLoader over torch's DistributedSampler, whether Lightning or the user has inserted it, of a number of
    samples that the ranks do not divide.

    Args:
        loader: Loader as Lightning has prepared it.
        trainer: Trainer that is going to use it.
    """
    evaluates = trainer.sanity_checking or trainer.validating or trainer.testing or trainer.predicting
    if not evaluates or not isinstance(loader, DataLoader):
        return loader
    batches: Any = loader.batch_sampler
    in_prediction = isinstance(batches, _IndexBatchSamplerWrapper)  # Lightning (2.6) notes the indices.
    if in_prediction and not contract_of(trainer.strategy).forward_needs_all_ranks:
        return loader  # Lightning's sampler repeats no sample there, and a rank with a batch less keeps nobody waiting.
    dealt = batches._batch_sampler if in_prediction else batches
    sampler = getattr(dealt, "sampler", loader.sampler)
    total = len(sampler.dataset) if isinstance(sampler, DistributedSampler) else 0  # type: ignore[arg-type]
    if not isinstance(sampler, DistributedSampler) or not total % sampler.num_replicas:
        return loader
    if type(dealt) is not BatchSampler:
        rank_zero_warn(
            f"a DistributedSampler for {sampler.num_replicas} ranks must be used by torch's BatchSampler to evaluate"
            f" each of {total} samples once, got {type(dealt).__name__}, so that some may be evaluated twice; set a"
            " batch_size, evaluate on one rank, or use ResumableDataModule.eval_loader"
        )
        return loader
    share, dealt = UnrepeatedSampler(sampler, dealt.batch_size, dealt.drop_last), copy.copy(dealt)
    dealt.sampler = share
    changed = copy.copy(loader)  # The user may iterate over the loader elsewhere too.
    # torch refuses to set the attribute of a loader that has been built.
    vars(changed)["batch_sampler"] = _IndexBatchSamplerWrapper(dealt) if in_prediction else dealt
    vars(changed)["_iterator"] = None
    return DistributedEvalLoader(changed, share, trainer)


class UnrepeatedSampler(DistributedSampler):
    """Indices that a DistributedSampler deals to a rank, without those that it repeats.

    All ranks have equally many batches: a rank without a last batch gets one, with an index that does not count.

    Args:
        source: Sampler whose order is kept.
        batch_size: Number of indices in a batch.
        drop_last: Whether an incomplete last batch is left out; then what the ranks do not divide is left out too.

    Attributes:
        samples: Number of the rank's samples that count.
    """

    def __init__(self, source: DistributedSampler, batch_size: int, drop_last: bool) -> None:
        self.source, self.batch_size = source, batch_size
        total, ranks = len(source.dataset), source.num_replicas  # type: ignore[arg-type]
        super().__init__(source.dataset, ranks, source.rank, source.shuffle, source.seed, drop_last)
        self.samples = total // ranks if drop_last else len(range(source.rank, total, ranks))
        most = self.samples if drop_last else -(-total // ranks)
        self.num_samples = self.samples + (-(-most // batch_size) > -(-self.samples // batch_size))

    def __iter__(self) -> Iterator[Any]:
        indices = list(self.source)
        return iter((indices[: self.samples] + indices[:1])[: self.num_samples])

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that a shuffled order depends on."""
        self.source.set_epoch(epoch)


class DistributedEvalLoader:
    """DataLoader of a rank that says before each batch how many of its samples count.

    Args:
        loader: DataLoader whose batches are loaded.
        share: Sampler of its indices.
        trainer: Trainer that evaluates.
    """

    def __init__(self, loader: DataLoader, share: UnrepeatedSampler, trainer: Trainer) -> None:
        self.loader, self.share, self._trainer = loader, share, weakref.ref(trainer)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        left = self.share.samples
        for batch in self.loader:
            samples = min(left, self.share.batch_size)
            left -= samples
            if not samples:
                self._forget_last_indices()
            trainer = self._trainer()
            if (trainer is not None and count_samples(trainer, samples)) or samples:
                yield batch

    def _forget_last_indices(self) -> None:
        """Removes the index of a batch that does not count from those that a prediction writer gets."""
        noted = getattr(self.loader.batch_sampler, "seen_batch_indices", None)
        if noted:
            noted[-1] = []

    @property
    def _iterator(self) -> Any:
        """Iterator of persistent workers, which Lightning (2.6) ends with a run."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the DataLoader, such as its dataset."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
