"""Evaluation that counts each sample once: means weighted by samples; steps of ranks without a sample are undone.

The ranks' shares of a last batch differ in length. Lightning weights the values that a step logs by a batch's size,
which it reads from the first tensor, and averages the sums of the sizes over ranks as integers (2.6: 4.5 becomes 4). A
rank without a sample in a batch must still run the step: a strategy may gather parameters in a forward, and metrics are
summed over all ranks at the end.

Plain DataLoaders evaluate each sample once too. torch's DistributedSampler deals samples to ranks in turn, and repeats
some so that all ranks have equally many: nine samples on two ranks are evaluated as ten, and a mean over them is not
that of one process. Lightning's sampler for predictions repeats none, so that some ranks have a batch less, for which
the others wait where a forward needs all.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics import Metric

from dlo_framework.errors import DloError
from dlo_framework.strategy_contract import contract_of

_STEPS = {
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


def count_samples(trainer: Trainer, samples: int) -> bool:
    """Sets the number of samples that the next evaluation step counts for; called as its batch is handed out.

    The number is the weight of the values that the step logs. With 0 samples the step runs, so that collectives inside
    it find this rank, and all its effects are undone; see :func:`undone`. A prediction of no samples has no rows, or is
    None.

    Lightning (2.6) has no hook around a step that every strategy calls, so the strategy's method is replaced for one
    call.

    Args:
        trainer: Trainer that evaluates.
        samples: Number of this rank's samples in the batch.

    Returns:
        Whether the step will count so; False outside evaluation.

    Raises:
        DloError: if there are none, and the step is unknown because the trainer fetches batches ahead of it.
    """
    name = _STEPS.get(trainer.state.stage) if trainer.state.stage is not None else None
    if name is None:
        return False
    strategy: Any = trainer.strategy
    strategy.__dict__.pop(name, None)  # left by a batch without a step
    if mixes_batches(trainer):
        if samples:
            return False
        raise DloError(
            f"{name} must get one batch of one loader at a time if a rank has no sample in a batch, got loaders"
            " in parallel, one without a length, or a dataloader_iter; evaluate on fewer ranks than there are samples"
        )
    step: Callable[..., Any] = getattr(strategy, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        strategy.__dict__.pop(name, None)
        results: Any = trainer._results
        if results is not None:
            results.batch_size = torch.tensor(float(samples))
        with contextlib.nullcontext() if samples else undone(trainer.lightning_module, results):
            outputs = step(*args, **kwargs)
        if not samples:
            outputs = without_rows(outputs) if name == "predict_step" else None
        for logged in results.values() if results is not None else ():
            if logged.is_tensor and logged.meta.is_mean_reduction:
                # Floats: a mean over ranks would truncate the sums of batch sizes to integers.
                logged.cumulated_batch_size = logged.cumulated_batch_size.to(torch.float32)
        return outputs

    strategy.__dict__[name] = counted
    return True


def step_samples(trainer: Trainer | None) -> Any | None:
    """Returns the number of samples in the running evaluation step; None with a loader that is not dlo's."""
    results: Any = trainer._results if trainer is not None else None
    return None if results is None else results.batch_size


def mixes_batches(trainer: Trainer) -> bool:
    """Returns whether the batch that a loader hands out in evaluation may be another than the next step's.

    Loaders in parallel give several batches to one step, and Lightning (2.6) prefetches if their number is unknown.
    """
    if trainer.state.stage not in _STEPS:
        return False
    fetcher: Any = trainer._active_loop._data_fetcher  # type: ignore[union-attr]  # A stage of these has a loop.
    if fetcher is None or fetcher.length is None or isinstance(fetcher, _DataLoaderIterDataFetcher):
        return True
    combined = fetcher.combined_loader
    return combined._mode != "sequential" and len(combined.flattened) > 1


@contextlib.contextmanager
def undone(module: LightningModule, results: Any) -> Iterator[None]:
    """Undoes the block's changes to metrics, to logged values, and to the module's attributes and buffers.

    A value that it logs for the first time stays there with weight 0, and states of metrics that are lists get an entry
    without rows: all ranks then reduce the same values.

    Args:
        module: Module whose step runs in the block.
        results: Lightning's collection of logged values (2.6); None in prediction.
    """
    restore = [_kept_attributes(module)]
    restore += [_kept_metric(part) for part in module.modules() if isinstance(part, Metric)]
    restore.append(_kept_results(results))
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in restore:
                put_back()


def _kept_metric(metric: Metric) -> Callable[[], None]:
    """Returns a function that restores a metric, whose state torchmetrics (1.x) keeps in plain attributes."""
    before = dict(vars(metric))
    values = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
    lists = {name: list(value) for name, value in before.items() if isinstance(value, list)}

    def put_back() -> None:
        after = dict(vars(metric))
        vars(metric).update(before)
        for name, value in values.items():
            before[name].copy_(value)
        for name, items in lists.items():
            added = after[name][len(items) :] if isinstance(after[name], list) else []
            rowless = [item[:0] for item in added if isinstance(item, Tensor) and item.ndim]
            before[name][:] = items or (rowless if name in metric._defaults else [])
        metric._update_count, metric._computed = max(before["_update_count"], 1), None

    return put_back


def _kept_results(results: Any) -> Callable[[], None]:
    before = {key: dict(vars(logged)) for key, logged in results.items()} if results is not None else {}

    def put_back() -> None:
        for key, logged in results.items() if results is not None else ():
            if not logged.is_tensor:
                continue
            is_new = not logged.has_reset
            if key in before:
                vars(logged).update(before[key])
            else:
                logged.reset()
            logged.has_reset = logged.has_reset and not is_new

    return put_back


def _kept_attributes(module: LightningModule) -> Callable[[], None]:
    """Returns a function that restores the module's own attributes (lists, dicts, sets) and buffers."""
    own = {name: value for name, value in vars(module).items() if name not in _base_attributes()}
    containers: dict[int, tuple[Any, Any]] = {}
    for value in own.values():
        _keep_containers(value, containers)
    buffers = [(buffer, buffer.clone()) for buffer in module._buffers.values() if buffer is not None]
    named = dict(module._buffers)

    def put_back() -> None:
        for name in vars(module).keys() - own.keys() - _base_attributes():
            if not name.startswith("_dlo"):
                del vars(module)[name]
        vars(module).update(own)
        for container, content in containers.values():
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(content)
        module._buffers.update(named)
        for buffer, content in buffers:
            buffer.copy_(content)

    return put_back


def _keep_containers(value: Any, containers: dict[int, tuple[Any, Any]], depth: int = 3) -> None:
    """Adds a container and the containers inside it, with copies of their contents."""
    if not isinstance(value, list | dict | set | deque) or id(value) in containers or not depth:
        return
    containers[id(value)] = value, value.copy()
    if not isinstance(value, set):
        for item in value.values() if isinstance(value, dict) else value:
            _keep_containers(item, containers, depth - 1)


def _base_attributes() -> set[str]:
    """Returns the attributes that every LightningModule has: Lightning and torch change these, not a step."""
    return set(vars(LightningModule()))


def without_rows(outputs: Any) -> Any | None:
    """Returns a prediction for one sample as a prediction for none: tensors `[1, ...]` become `[0, ...]`.

    None if the prediction has another form.
    """
    if isinstance(outputs, Tensor) and outputs.ndim and len(outputs) == 1:
        return outputs[:0]
    if isinstance(outputs, list) and len(outputs) == 1:
        return []
    if isinstance(outputs, dict) and outputs:
        parts = {key: without_rows(value) for key, value in outputs.items()}
        return None if any(part is None for part in parts.values()) else parts
    if type(outputs) is tuple and outputs:
        items = tuple(without_rows(value) for value in outputs)
        return None if any(item is None for item in items) else items
    return None


# --- plain DataLoaders ------------------------------------------------------------------------------------------

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
        class_name = type(sampler if type(dealt) is BatchSampler else dealt).__name__
        rank_zero_warn(
            f"a DistributedSampler for {sampler.num_replicas} ranks must have torch's own order and BatchSampler to"
            f" evaluate each of {total} samples once, got {class_name}, so that some may be evaluated twice; set a"
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
            batches = self.loader.batch_sampler
            if counts and not samples and isinstance(batches, _IndexBatchSamplerWrapper):
                batches.seen_batch_indices[-1] = []  # A prediction writer does not get an index that does not count.
            is_counted = counts and trainer is not None and count_samples(trainer, samples)
            if is_counted or samples or not counts:
                yield batch

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the DataLoader, such as its dataset."""
        if name in ("loader", "share", "_trainer"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the DataLoader."""
        setattr(self.loader, name, value)
