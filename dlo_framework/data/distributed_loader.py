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

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dlo_framework.data.evaluation import count_samples, mixes_batches
from dlo_framework.strategy_contract import contract_of

#: Samplers whose rank `r` of `n` gets the samples `r`, `r + n`, `r + 2n` ... of an order, and repeated ones at the end.
_DEALING = (
    DistributedSampler,
    DistributedSamplerWrapper,
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)


def without_repeats(loader: Any, trainer: Trainer) -> Any:
    """Returns a loader that evaluates each sample once, in equally many batches on all ranks.

    A loader is returned unchanged in training, and where it repeats no sample: it has no torch DistributedSampler, of
    Lightning or of the user; its number of samples is a multiple of the ranks; its sampler drops the rest; or it is for
    predictions, with Lightning's sampler, and no forward needs the other ranks.

    Args:
        loader: Loader as Lightning has prepared it.
        trainer: Trainer that is going to use it.
    """
    evaluates = trainer.sanity_checking or trainer.validating or trainer.testing or trainer.predicting
    if evaluates and isinstance(loader, DistributedEvalLoader):  # An earlier trainer left it in a CombinedLoader.
        return DistributedEvalLoader(loader.loader, loader.share, trainer)
    if not evaluates or not isinstance(loader, DataLoader):
        return loader
    batches: Any = loader.batch_sampler
    in_prediction = isinstance(batches, _IndexBatchSamplerWrapper)  # Lightning (2.6) notes the indices.
    dealt = batches._batch_sampler if in_prediction else batches
    sampler = getattr(dealt, "sampler", loader.sampler)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return loader
    total = len(sampler.dataset)  # type: ignore[arg-type]
    if not total % sampler.num_replicas:
        return loader
    if isinstance(sampler, UnrepeatedDistributedSampler) and not contract_of(trainer.strategy).forward_needs_all_ranks:
        return loader  # A rank with a batch less keeps nobody waiting.
    if type(dealt) is not BatchSampler or type(sampler).__iter__ not in [kind.__iter__ for kind in _DEALING]:
        found = type(sampler if type(dealt) is BatchSampler else dealt).__name__
        rank_zero_warn(
            f"a DistributedSampler for {sampler.num_replicas} ranks must have torch's own order and BatchSampler to"
            f" evaluate each of {total} samples once, got {found}, so that some may be evaluated twice; set a"
            " batch_size and let Lightning insert the sampler, evaluate on one rank, or use"
            " ResumableDataModule.eval_loader"
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

    All other attributes are those of the DataLoader, to read and to set: Lightning (2.6) sets `worker_init_fn`, and
    `_iterator` to end persistent workers.

    Args:
        loader: DataLoader whose batches are loaded.
        share: Sampler of its indices.
        trainer: Trainer that evaluates.
    """

    def __init__(self, loader: DataLoader, share: UnrepeatedSampler, trainer: Trainer) -> None:
        vars(self).update(loader=loader, share=share, _trainer=weakref.ref(trainer))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        trainer = self._trainer()
        counts = trainer is None or not mixes_batches(trainer)
        if not counts:
            rank_zero_warn(
                f"a step must get one batch of one loader at a time to evaluate each of {len(self.share.dataset)}"
                " samples once, got loaders in parallel, one without a length, or a dataloader_iter, so that some may"
                " be evaluated twice; return a list of loaders, or evaluate on one rank"
            )
        left = self.share.samples
        for batch in self.loader:
            samples = min(left, self.share.batch_size)
            left -= samples
            if counts and not samples:
                self._forget_last_indices()
            is_counted = counts and trainer is not None and count_samples(trainer, samples)
            if is_counted or samples or not counts:
                yield batch

    def _forget_last_indices(self) -> None:
        """Removes the index of a batch that does not count from those that a prediction writer gets."""
        noted = getattr(self.loader.batch_sampler, "seen_batch_indices", None)
        if noted:
            noted[-1] = []

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the DataLoader, such as its dataset."""
        if name in ("loader", "share", "_trainer"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the DataLoader."""
        setattr(self.loader, name, value)
