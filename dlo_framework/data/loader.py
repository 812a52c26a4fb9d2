"""Data loader that resumes in mid-epoch without repeating or skipping a sample, for any number of workers.

It keeps the signals that stop a run from ending its workers, because senders often signal the whole process group: a
terminal sends Ctrl-C to all processes of its foreground group; ``timeout`` and batch systems send SIGTERM to all of a
job. If a worker ended on it, the run would fail before it has saved.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from dlo_framework.data.sampler import Draw, InOrderBatchSampler, Position, ResumableBatchSampler, Window
from dlo_framework.errors import DloError, check_number
from dlo_framework.random_streams import preserved_random_state, seed_all


@runtime_checkable
class BatchDataset(Protocol):
    """Dataset that loads full batches itself, and takes all its randomness from the draws' seeds.

    One that seeds no global generator may set ``uses_global_random = False``, which saves 0.1 ms a batch: the loader
    then does not restore their states in the main process.
    """

    def __len__(self) -> int: ...

    def fetch(self, draws: list[Draw]) -> Any:
        """Returns the collated batch, or a :class:`CountedBatch` if it leaves out some draws."""


@runtime_checkable
class ReadAheadDataset(Protocol):
    """Dataset that begins to fetch the data of coming batches, so that reading them later does not wait."""

    batches_ahead: int
    """Number of batches that are announced before they are loaded; 0 for none."""

    def read_ahead(self, draws: list[Draw]) -> None:
        """Begins to fetch the data of a batch; called in the main process, and must return at once."""


class CountedBatch(NamedTuple):
    """Batch with the number of its samples.

    Attributes:
        batch: Batch for the trainer.
        samples: Number of samples in it. 0 if all were left out; the batch then holds a placeholder of one sample,
            whose step is undone.
    """

    batch: Any
    samples: int


class ResumableLoader:
    """Loads batches for one rank and counts the samples that the trainer has received.

    Args:
        dataset: Map-style dataset of tensors, arrays or ``(input, target)`` tuples, whose items may use Python's,
            NumPy's and torch's global random numbers freely (they are seeded per sample), or a :class:`BatchDataset`.
        batch_size: Number of samples per batch on this rank.
        shuffle: Whether to draw a new order each epoch; for this and the next five see :class:`ResumableBatchSampler`.
        seed: Seed of the order and of each sample's random numbers.
        rank: This process's index among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        drop_last: True for training, False for evaluation.
        repeats: Number of differently augmented copies of an image in a batch.
        window_at: Function that plans optimizer steps whose batch size changes; see :class:`ResumableBatchSampler`.
        image_size_at: Function that plans the size of a batch's images; see :class:`ResumableBatchSampler`.
        batch_sampler: Sampler to use in place of the one that the arguments above describe.
        num_workers: Number of loading processes; 0 loads in this process, and leaves its random state unchanged.
        pin_memory: Whether to pin the batches' memory, which an accelerator copies without waiting.
        prefetch_factor: Number of batches that each worker prepares ahead; default 2.
        persistent_workers: Whether to keep the workers between epochs.
        collate_fn: Function that builds a batch from a list of items; a :class:`BatchDataset` does not use it.
        in_work: Function that returns whether the trainer is still busy with the batch that it received last. If so,
            :meth:`state_dict` does not count that batch, and a run that was stopped there repeats it.
        before_step: Function called before a batch is handed out, with the number of its samples; it returns whether a
            step without samples will be undone. See :func:`dlo_framework.data.evaluation.count_samples`.

    Raises:
        DloError: if ranks are left without a sample in evaluation, and there is no ``before_step``.

    It is not a ``DataLoader``: Lightning would insert a ``DistributedSampler`` into one. It holds one, with a generator
    of its own, so that starting an epoch never advances the global random state.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool,
        repeats: int = 1,
        window_at: Callable[[Position], Window] | None = None,
        image_size_at: Callable[[Position], int] | None = None,
        batch_sampler: ResumableBatchSampler | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        in_work: Callable[[], bool] | None = None,
        before_step: Callable[[int], bool] | None = None,
    ) -> None:
        check_number("num_workers", num_workers, "at least 0")
        self.dataset = dataset
        self.num_workers = num_workers
        kind = ResumableBatchSampler if shuffle else InOrderBatchSampler
        self.batch_sampler = batch_sampler or kind(
            len(dataset),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            repeats=repeats,
            window_at=window_at,
            image_size_at=image_size_at,
        )
        if before_step is None and self.batch_sampler.leaves_ranks_out:
            raise DloError(
                f"{self.batch_sampler.world_size} ranks must have a sample of each batch, got {len(dataset)} samples in"
                f" batches of {self.batch_sampler.global_batch_size}; make the loader with"
                " ResumableDataModule.eval_loader, or set a batch_size of 2 or more, or fewer ranks than samples"
            )
        self._options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers > 0:
            self._options["persistent_workers"] = persistent_workers
            self._options["prefetch_factor"] = prefetch_factor or 2
            self._options["worker_init_fn"] = ignore_stop_signals
        self._collate = collate_fn
        self._in_work, self._before_step = in_work, before_step
        self._loader: DataLoader | None = None
        self._batches = _Batches(self.batch_sampler, dataset if isinstance(dataset, ReadAheadDataset) else None)
        self._epoch = 0
        self._samples = 0  # samples handed out in this epoch, over all ranks
        self._samples_before = 0  # the same without the batch that was handed out last
        self._resume: tuple[int, int] | None = None
        self._iterations: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()

    @property
    def sampler(self) -> ResumableBatchSampler:
        """The sampler, whose ``set_epoch`` Lightning calls before each epoch."""
        return self.batch_sampler

    @property
    def batch_size(self) -> int:
        """The number of samples per batch on this rank."""
        return self.batch_sampler.batch_size

    @property
    def global_batch_size(self) -> int:
        """The number of samples per batch over all data-parallel ranks, if it does not change."""
        return self.batch_sampler.global_batch_size

    @property
    def makes_new_batches(self) -> bool:
        """Whether each batch has memory of its own: torch's collation copies, a dataset's own may not."""
        return self._collate is default_collate and not isinstance(self.dataset, BatchDataset)

    @property
    def position(self) -> Position:
        """The position at which the trainer's last batch begins."""
        return Position(self._epoch, self._samples_before, self.batch_sampler.size)

    def __len__(self) -> int:
        """The number of batches in a full epoch, also when this one was resumed in the middle."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so nothing happens before the first batch is requested: Lightning creates iterators that it never
        # uses, and calls set_epoch after it has created the one that it does.
        iteration = self._iterate()
        self._iterations.add(iteration)
        return iteration

    def _iterate(self) -> Generator[Any, None, None]:
        sampler = self.batch_sampler
        resume, self._resume = self._resume, None
        start = resume[1] if resume is not None and resume[0] == sampler.epoch else 0
        self._epoch, self._samples, self._samples_before = sampler.epoch, start, start
        spans = sampler.spans_from(start)
        if sampler.window_at is not None:
            spans = iter(list(spans))  # Before the yield: a schedule may plan the next epoch meanwhile.
        for loaded, (first, past) in zip(self._start(start), spans, strict=False):
            if isinstance(loaded, DloError):
                self.close()
                raise loaded
            self._samples_before, self._samples = first, past
            counts = self._before_step is not None and self._before_step(loaded.samples)
            if counts or loaded.samples:
                yield loaded.batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the epoch: ``{"epoch", "samples"}``, the samples counted over all ranks.

        Samples that workers prefetched do not count, only those that the trainer has received and completed.
        """
        busy = self._in_work is not None and self._in_work()
        return {"epoch": self._epoch, "samples": self._samples_before if busy else self._samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next iteration of ``state["epoch"]`` begin after ``state["samples"]`` samples.

        At the end of an epoch the next iteration starts the next epoch. The state is valid for any number of ranks and
        workers and any batch size. It is dropped if another epoch is iterated first.
        """
        epoch, samples = int(state["epoch"]), int(state["samples"])
        if epoch < 0 or not 0 <= samples <= self.batch_sampler.size:
            raise DloError(
                f"the dataset must have at least {samples} samples, which epoch {epoch} had before the checkpoint, got "
                f"{self.batch_sampler.size}; resume with the data that the run began with"
            )
        self._epoch, self._samples, self._samples_before = epoch, samples, samples
        self._resume = (epoch, samples)
        self.batch_sampler.set_epoch(epoch)
        if next(self.batch_sampler.spans_from(samples), None) is None:
            self.batch_sampler.set_epoch(epoch + 1)

    def close(self) -> None:
        """Ends the workers, in mid-epoch too. The loader can be used again; it then starts new ones."""
        for iteration in list(self._iterations):
            if inspect.getgeneratorstate(iteration) == inspect.GEN_SUSPENDED:
                iteration.close()  # The caller that began it may keep it for long, and with it the workers.
        self._loader = None

    def _start(self, samples: int) -> Iterator[Any]:
        self._batches.first_sample = samples
        if self._loader is None:
            # Built at first use: inside `train_dataloader()` Lightning records every DataLoader's arguments.
            self._loader = DataLoader(
                _Fetcher(self.dataset, self._collate),
                batch_sampler=self._batches,
                collate_fn=_as_is,
                generator=torch.Generator().manual_seed(0),
                **self._options,
            )
        with stop_signals_held() if self.num_workers else contextlib.nullcontext():
            return iter(self._loader)


class _Batches:
    """Iterable of the inner loader: the sampler's batches from the position where the epoch begins.

    Each is yielded after the ``batches_ahead`` batches that follow it were announced to the dataset.

    It holds references to the sampler and the dataset only. With one to the loader, both would wait for the garbage
    collector, which ends workers out of order: each then takes five seconds to notice.
    """

    def __init__(self, sampler: ResumableBatchSampler, announced_to: ReadAheadDataset | None) -> None:
        self.sampler, self.announced_to = sampler, announced_to
        self.first_sample = 0

    def __iter__(self) -> Iterator[list[Draw]]:
        batches, dataset = self.sampler.batches_from(self.first_sample), self.announced_to
        if dataset is None or not dataset.batches_ahead:
            yield from batches
            return
        waiting: deque[list[Draw]] = deque()
        for draws in batches:
            dataset.read_ahead(draws)
            waiting.append(draws)
            if len(waiting) > dataset.batches_ahead:
                yield waiting.popleft()
        yield from waiting

    def __len__(self) -> int:
        return len(self.sampler)


def _as_is(batch: Any) -> Any:
    return batch


class _Fetcher(Dataset):
    """Loads a list of draws, in a worker or in the main process."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        self._fetches = isinstance(dataset, BatchDataset)  # A check of a protocol takes longer than a small batch.
        self._restores = getattr(dataset, "uses_global_random", True)

    def __getitems__(self, draws: list[Draw]) -> CountedBatch | DloError:
        in_worker = get_worker_info() is not None
        samples = sum(draw.real for draw in draws)
        if not samples:
            draws = [draws[0]._replace(real=True)]
        try:
            with preserved_random_state() if self._restores and not in_worker else contextlib.nullcontext():
                if self._fetches:
                    batch = self._dataset.fetch(draws)
                else:
                    items = []
                    for draw in draws:
                        seed_all(draw.seed)
                        items.append(self._dataset[draw.index])
                    batch = self._collate(items)
        except DloError as error:
            if not in_worker:
                raise
            return error  # as a value: torch would wrap it in the worker's traceback
        if isinstance(batch, CountedBatch):
            return batch._replace(samples=min(samples, batch.samples))
        return CountedBatch(batch, samples)


#: Signals that ask a run to stop.
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def ignore_stop_signals(worker: int = 0) -> None:
    """Makes this loading process ignore requests to stop, because the run ends it in the end: a ``worker_init_fn``.

    SIGINT, SIGTERM and SIGUSR1 stay blocked. But SIGTERM from the run's own process counts, because ``torch`` and
    ``multiprocessing`` end a worker with it that does not exit by itself; on systems that do not report the sender of a
    signal (macOS), it counts from every sender.

    Args:
        worker: Number of the worker, from ``DataLoader``.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Threads that start later inherit it.
    run = multiprocessing.parent_process()
    if hasattr(signal, "sigwaitinfo") and run is not None and run.pid is not None:
        threading.Thread(target=_end_when_told_by, args=(run.pid,), daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Blocks requests to stop while workers start, which inherit that: none receives one too early."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_told_by(run: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != run:
        pass
    os._exit(0)
