"""Base class of datamodules: loaders for the trainer's ranks, whose position is saved in checkpoints."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import default_collate

from dlo_framework.batches import tree_leaves
from dlo_framework.data.evaluation import count_samples
from dlo_framework.data.loader import ResumableLoader
from dlo_framework.data.sampler import Position, ResumableBatchSampler, Window
from dlo_framework.errors import DloError, check_number
from dlo_framework.strategy_abilities import ArrangesRanks
from dlo_framework.strategy_contract import contract_of, data_share

#: Most loading processes by default: on a CPU, which also computes, and elsewhere.
_MAX_WORKERS_ON_CPU, _MAX_WORKERS = 8, 32


def data_parallel_coordinates(trainer: Trainer | None) -> tuple[int, int]:
    """Returns (rank, world size) among the ranks that see different data; (0, 1) without a parallel strategy.

    Ranks that share one model replica (tensor, pipeline and context parallelism) have equal coordinates.
    """
    return (0, 1) if trainer is None else data_share(trainer.strategy)


def gradient_ranks(trainer: Trainer | None) -> int:
    """Returns how many ranks gradients are averaged over: those with different data, or parts of a sequence."""
    mesh = contract_of(trainer.strategy).find_ability(ArrangesRanks) if trainer is not None else None
    return data_parallel_coordinates(trainer)[1] if mesh is None else mesh.gradient_ranks


def per_rank_batch(batch_size: int, world_size: int, name: str = "batch_size") -> int:
    """Returns how many samples of a global batch of ``batch_size`` each of ``world_size`` ranks loads.

    Raises:
        DloError: if the ranks do not divide the batch; the message names the nearest sizes that work.
    """
    check_number(name, batch_size, "at least 1")
    if batch_size % world_size:
        below, above = batch_size // world_size * world_size, -(-batch_size // world_size) * world_size
        fix = f"{below} or {above}" if below else f"{above}"
        raise DloError(
            f"{name}, the global batch, must be divisible by the {world_size} data-parallel ranks, got "
            f"{batch_size}; set {name}={fix}"
        )
    return batch_size // world_size


class ResumableDataModule(LightningDataModule):
    """Builds resumable loaders. Subclasses return them from Lightning's ``*_dataloader`` hooks.

    Args:
        batch_size: Number of images per micro-step over **all** data-parallel ranks together. The number of ranks then
            changes neither the loss curve nor the learning rate that fits it. Must be divisible by the ranks.
        eval_batch_size: Global batch size of validation, test and prediction; default: ``batch_size``, rounded up to a
            multiple of the ranks. It changes no metric.
        num_workers: Number of loading processes on each rank; 0 loads in the main process. Default: one per CPU core of
            this rank, at most 8; on an accelerator, one core less and at most 32. The cores are those that the process
            may use, divided by the ranks of its node, or SLURM's `--cpus-per-task` if each rank is a task. It changes
            speed only, never the data.
        prefetch_factor: Number of batches that each worker prepares ahead; default 2.
        pin_memory: Whether to load into pinned memory, which speeds up copies to an accelerator. Default: True if the
            run has one.
        persistent_workers: Whether to keep the workers between epochs, which saves their start.
        seed: Seed of the order of the data and of the augmentation; each sample's random choices follow from it, the
            epoch and the sample's index.

    A callback may set attributes in its ``setup`` hook, before the loaders are made: ``window_at`` plans optimizer
    steps whose batch size changes (DynamicBatchSize), ``image_size_at`` the size of each training batch's images
    (ProgressiveResizing); see :class:`ResumableBatchSampler`. ``shape_batch`` changes the shape of each training batch
    before its transfer to the device, if :attr:`shapes_batches` (SequenceLength). ``order_at`` reorders the samples of
    an epoch (DifficultyOrder).
    """

    #: Whether the datasets make images of the size that a draw requests.
    sizes_images = False
    #: Whether ``shape_batch`` is applied.
    shapes_batches = False

    def __init__(
        self,
        *,
        batch_size: int,
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
        ):
            check_number(name, value, f"at least {least}")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.seed = seed
        self.window_at: Callable[[Position], Window] | None = None
        self.image_size_at: Callable[[Position], int] | None = None
        self.shape_batch: Callable[[Any], Any] | None = None
        self.order_at: Callable[[np.ndarray, int], np.ndarray] | None = None
        self._loaders: dict[str, ResumableLoader] = {}
        # The training loaders in the order of creation; the trainer keeps those that it uses.
        self._made: list[weakref.ref[ResumableLoader]] = []
        self._resume: list[dict[str, int]] = []

    @property
    def overfits(self) -> bool:
        """Whether the trainer repeats a few batches (`overfit_batches`), in order; False without a trainer."""
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    def train_loader(
        self,
        dataset: Any,
        *,
        repeats: int = 1,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        make_sampler: Callable[..., ResumableBatchSampler] | None = None,
    ) -> ResumableLoader:
        """Returns a shuffled loader of full batches, at the position where a resumed run continues.

        A datamodule may make several, always in the same order, and return them in a list or a mapping.

        Lightning also restores loaders, but only those created after it has read the checkpoint, which is too late when
        ``configure_optimizers`` uses ``trainer.estimated_stepping_batches`` (Lightning issue #20550). So the position
        is saved with the datamodule, which is restored before that.

        Args:
            dataset: Dataset of the loader; see :class:`ResumableLoader`.
            repeats: Number of copies of an image in a batch; see :class:`ResumableLoader`.
            collate_fn: Function that builds a batch from a list of items; see :class:`ResumableLoader`.
            make_sampler: Function that makes the sampler from the keyword arguments of :class:`ResumableBatchSampler`;
                without shuffling (``overfit_batches``), it must be a ``SequentialSampler`` too. None for the usual one.
        """
        rank, world_size = data_parallel_coordinates(self.trainer)
        options: dict[str, Any] = {
            "batch_size": per_rank_batch(self.batch_size, world_size),
            "shuffle": not self.overfits,
            "seed": self.seed,
            "rank": rank,
            "world_size": world_size,
            "drop_last": True,
            "repeats": repeats,
            "window_at": self.window_at,
            "image_size_at": self.image_size_at,
        }
        loader = ResumableLoader(
            dataset,
            **options,
            batch_sampler=make_sampler and make_sampler(**options),
            in_work=_weak(self._has_batch_in_work),
            collate_fn=collate_fn,
            **self._worker_options(),
        )
        loader.sampler.order_at = self.order_at
        if self._resume:
            self._restore(loader, self._resume.pop(0))
        self._made = [made for made in self._made if made() is not None] + [weakref.ref(loader)]
        return loader

    def eval_loader(
        self,
        dataset: Any,
        *,
        name: str = "val",
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        make_sampler: Callable[..., ResumableBatchSampler] | None = None,
    ) -> ResumableLoader:
        """Returns a loader that visits each sample once, over all ranks together, without padding.

        All ranks have equally many batches. Means that a step logs are weighted by the batches' samples, so they equal
        those of one process. If a rank has no sample in a batch, because the data has fewer samples than there are
        ranks, or yields them one by one, that rank runs the step on a sample of another rank, since a strategy may need
        all ranks in a forward, and the step is undone: see :func:`dlo_framework.data.evaluation.count_samples`.

        Args:
            dataset: Dataset of the loader; see :class:`ResumableLoader`.
            name: Key of the loader in the datamodule, which ends its workers in teardown.
            collate_fn: Function that builds a batch from a list of items.
            make_sampler: Function that makes another order than the dataset's own, from ``batch_size`` (on one rank),
                ``rank`` and ``world_size``.
        """
        rank, world_size = data_parallel_coordinates(self.trainer)
        size = self.eval_batch_size
        per_rank = (
            -(-self.batch_size // world_size) if size is None else per_rank_batch(size, world_size, "eval_batch_size")
        )
        loader = ResumableLoader(
            dataset,
            batch_size=per_rank,
            shuffle=False,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            drop_last=False,
            collate_fn=collate_fn,
            batch_sampler=make_sampler and make_sampler(batch_size=per_rank, rank=rank, world_size=world_size),
            before_step=_weak(self._count_samples),
            **self._worker_options(),
        )
        loader.sampler.evens_out &= not self._ends_early(loader)
        self._loaders[name] = loader
        return loader

    def _has_batch_in_work(self) -> bool:
        """Whether a training batch was handed out whose step is not complete: it raised, and a checkpoint is saved."""
        if self.trainer is None:
            return False
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(max(progress.ready, progress.started) > progress.processed)

    def _count_samples(self, samples: int) -> bool:
        """Passes the number of samples in a batch to the trainer's next step."""
        return self.trainer is not None and count_samples(self.trainer, samples)

    def _ends_early(self, loader: ResumableLoader) -> bool:
        """Whether the trainer's limit drops the last batch: then no other one may give samples to it."""
        if self.trainer is None:
            return False
        running = self.trainer.state.fn
        stage = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}.get(running, "val")  # type: ignore[arg-type]
        limit = getattr(self.trainer, f"limit_{stage}_batches")
        return (limit if isinstance(limit, int) else int(limit * len(loader))) < len(loader)

    def check_shares(self, trainer: Trainer) -> None:
        """Checks that the ranks of a trainer, which need not have started, can share the batches.

        Raises:
            DloError: if they cannot; the message names the nearest sizes that work.
        """
        ranks = data_parallel_coordinates(trainer)[1]
        per_rank_batch(self.batch_size, ranks)
        if self.eval_batch_size is not None and trainer.limit_val_batches:
            per_rank_batch(self.eval_batch_size, ranks, "eval_batch_size")

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training data: epoch, samples over all ranks, global batch size, seed.

        With several training loaders, it holds the position of each: ``{"loaders": [...]}``.
        """
        places = [
            {**loader.state_dict(), "batch_size": loader.global_batch_size, "seed": self.seed}
            for loader in self._training_loaders()
        ]
        return {"loaders": places} if len(places) > 1 else dict(*places)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position in a fit; validation and test do not use it."""
        if not state_dict or (self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING):
            return
        places = [dict(place) for place in state_dict.get("loaders", [state_dict])]
        loaders = self._training_loaders()
        if not loaders:
            self._resume = places
        for loader, place in zip(loaders, places, strict=False):
            self._restore(loader, place)

    def _training_loaders(self) -> list[ResumableLoader]:
        """Returns the training loaders in use, in the order of their creation."""
        made = [loader for loader in (reference() for reference in self._made) if loader is not None]
        in_use = {id(leaf) for leaf in tree_leaves(self.trainer.train_dataloader)} if self.trainer is not None else ()
        return [loader for loader in made if id(loader) in in_use] or made[-1:]

    def teardown(self, stage: str) -> None:
        """Ends the workers."""
        for loader in [*self._loaders.values(), *filter(None, (reference() for reference in self._made))]:
            loader.close()

    def on_exception(self, exception: BaseException) -> None:
        """Ends the workers of a run that was stopped or has failed: Lightning does not call ``teardown`` then.

        A second Ctrl-C skips this: a hanging worker would be waited for, and the process ends anyway.
        """
        if not isinstance(exception, KeyboardInterrupt):
            ResumableDataModule.teardown(self, "fit")

    def _restore(self, loader: ResumableLoader, state: dict[str, int]) -> None:
        loader.load_state_dict(state)
        if not state["samples"] or loader.sampler.epoch != state["epoch"]:
            return  # between epochs anything may change
        epoch = state["epoch"]
        before, now = state.get("batch_size", loader.global_batch_size), loader.global_batch_size
        if before != now:
            rank_zero_warn(
                f"batch_size was {before} when epoch {epoch} was interrupted and is {now} now: Lightning counts "
                "batches, so this epoch ends early or late; the next ones are complete"
            )
        if state.get("seed", self.seed) != self.seed:
            rank_zero_warn(
                f"seed was {state['seed']} when epoch {epoch} was interrupted and is {self.seed} now: the rest of "
                "this epoch has another order, so that some samples repeat and some are missing"
            )

    def _worker_options(self) -> dict[str, Any]:
        on_accelerator = self.trainer is not None and self.trainer.strategy.root_device.type != "cpu"
        workers = self.num_workers
        if workers is None:
            ranks = self.trainer.num_devices if self.trainer is not None else 1
            workers = default_workers(_cores_of_rank(max(1, ranks)), on_accelerator)
        return {
            "num_workers": workers,
            "prefetch_factor": self.prefetch_factor,
            "pin_memory": (
                on_accelerator and torch.accelerator.is_available() if self.pin_memory is None else self.pin_memory
            ),
            "persistent_workers": self.persistent_workers,
        }


def _weak(method: Callable[..., bool]) -> Callable[..., bool]:
    """Returns a function that calls a method of an object that it does not keep alive; False without the object.

    A loader must not keep its datamodule: a cycle of references would leave the workers to the garbage collector, which
    ends them slowly.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> bool:
        live_method = reference()
        return live_method is not None and live_method(*args)

    return call


def default_workers(cores: int, on_accelerator: bool) -> int:
    """Returns the number of loading processes for a rank with this number of cores.

    On a CPU, training itself takes all cores. On an accelerator its host process needs one, and the workers get the
    others.
    """
    if not on_accelerator:
        return min(_MAX_WORKERS_ON_CPU, cores)
    return max(1, min(_MAX_WORKERS, cores - 1))


def usable_cores() -> int:
    """Returns the number of cores that this process may use, which a container or a batch system can limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cores_of_rank(ranks: int) -> int:
    """Returns this rank's share of its node's cores; in a SLURM task, the task's own."""
    usable, own = usable_cores(), os.environ.get("SLURM_CPUS_PER_TASK", "")
    is_task = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return min(usable, int(own)) if is_task and own.isdigit() and int(own) else usable // ranks
