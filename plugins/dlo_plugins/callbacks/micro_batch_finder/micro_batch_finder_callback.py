"""Search for the largest micro-batch that fits in memory, by trials.

No rank may wait for another that is out of memory. Where forward and backward communicate, the trials run in processes
of their own, which may die (:mod:`~dlo_plugins.callbacks.micro_batch_finder.trial_ranks`). Elsewhere they run in this
one, without the all-reduce of gradients: after each part of a trial, the ranks exchange its outcome over a process
group of their own, and then all of them continue in the same way.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from dlo_framework.atomic_file import write_atomic
from dlo_framework.data import Position, data_parallel_coordinates
from dlo_framework.distributed.norms import shards_state
from dlo_framework.errors import DloError
from dlo_framework.rehearsal import BeforeTraining, Rehearsal, rehearse, run_folder
from dlo_framework.snapshot import training_loaders
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.callbacks.micro_batch_finder.batch_search import (
    ActivationBudget,
    BatchPool,
    count_samples,
    find_largest,
    is_out_of_memory,
    keep_global_batch,
)
from dlo_plugins.callbacks.micro_batch_finder.trial_child import TrialChild, end_with_rank, mute, trial_order
from dlo_plugins.callbacks.micro_batch_finder.trial_events import TrialOrder, write_event
from dlo_plugins.callbacks.micro_batch_finder.trial_ranks import (
    Found,
    has_memory_limit,
    repeated_command,
    search_in_processes,
)

FILE = "batch_size.json"
#: Number of epochs of a run without a last epoch.
FAR = 1_000_000


class MicroBatchFinder(BeforeTraining):
    """Finds the largest micro-batch that fits in memory before training, and restores all state.

    It doubles the size until memory runs out, then bisects. Each trial trains on full batches made from the loader's:
    forward, backward and the optimizer step, so that the optimizer state takes its memory too. Under
    ProgressiveResizing, the images have their last size. All ranks find the same size. Afterwards all state is as
    before, including random numbers and the position in the data.

    If a callback has a method ``set_max_micro_batch`` (DynamicBatchSize), the size is set there. Otherwise the batch
    size does not change, being part of the recipe: the callback prints the size, with the ``batch_size`` and
    ``accumulate_grad_batches`` that make the same step from the largest micro-batches that fit, and writes them to
    ``batch_size.json`` in the run's folder. A resumed run does not search again.

    Under strategies that communicate in forward and backward, each rank starts processes for the trials, before its
    model is on the device. They repeat the program up to its fit, and may die.

    Args:
        max_size: Largest size to try, in samples per rank; None for the size of the dataset, divided by the ranks.
        steps_per_trial: Number of optimizer steps in a trial. From the second step on, the optimizer state is in
            memory.
        power_of_two: Whether to try powers of two only, which takes fewer trials.
        margin: Fraction of the found size to leave free, as memory fragments during training. It is not subtracted if
            memory did not run out, or from a power of two.
        memory_limit_bytes: Bytes that the forward pass may save for the backward pass. A CPU needs it, as the system
            ends a process that is out of memory. Of trials in processes of their own it is what a process may allocate
            once it has its model; a CPU may do without if the shell or the container limits memory.
        timeout: Seconds that a rank waits for the others after a part of a trial, or for a sign of progress of a
            process.
        own_processes: Whether trials run in processes of their own; None for "where the strategy needs it".
        command: Command that repeats the run as one of its ranks, for those processes; None for the one of this
            process.

    Raises:
        DloError: If a value is out of range, optimization is manual, ``memory_limit_bytes`` is missing on a CPU, the
            program cannot be repeated, or not a single sample fits.
    """

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True

    def __init__(
        self,
        max_size: int | None = None,
        steps_per_trial: int = 3,
        power_of_two: bool = False,
        margin: float = 0.05,
        memory_limit_bytes: int | None = None,
        timeout: float = 600.0,
        own_processes: bool | None = None,
        command: list[str] | None = None,
    ) -> None:
        for name, value in (
            ("max_size", max_size),
            ("steps_per_trial", steps_per_trial),
            ("memory_limit_bytes", memory_limit_bytes),
        ):
            if value is not None and value < 1:
                raise DloError(f"MicroBatchFinder: {name} must be at least 1, got {value}; leave it out")
        if not 0 <= margin < 1:
            raise DloError(f"MicroBatchFinder: margin must be in [0, 1), got {margin}; 0.05 is usual")
        self.max_size, self.steps_per_trial, self.power_of_two = max_size, steps_per_trial, power_of_two
        self.margin, self.memory_limit_bytes, self.timeout = margin, memory_limit_bytes, timeout
        self.own_processes, self.command = own_processes, command
        self.per_rank: int | None = None  # largest micro-batch in samples, once found
        self.trials: list[tuple[int, bool]] = []
        self._found: Found | None = None  # by processes, before the model was on the device
        self._order: TrialOrder | None = None  # of this process, if it is one of those

    def state_dict(self) -> dict[str, Any]:
        """Returns the found size, so that a resumed run has it."""
        return {"per_rank": self.per_rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the size that the resumed run has found."""
        self.per_rank = state_dict["per_rank"]

    def check_run(self, trainer: Any, module: LightningModule, datamodule: Any = None) -> None:
        """Checks that the search cannot hang, before ranks start."""
        self._check(trainer)
        if trial_order() is not None:
            mute(trainer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the search cannot hang, and that it ends; searches by processes if that is needed."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._check(trainer)
        self._order, self._found = trial_order(), None
        options: Any = trainer
        if self._order is not None:
            mute(trainer)
            end_with_rank(self._order.parent)
        elif (
            self._needs_processes(trainer)
            and trainer.global_step == 0
            and not options.fast_dev_run
            and not contract_of(trainer.strategy).loads_checkpoint(trainer)
        ):
            command = self.command or repeated_command()
            self._found = search_in_processes(trainer, command=command, timeout=self.timeout)

    def _needs_processes(self, trainer: Trainer) -> bool:
        if self.own_processes is not None:
            return self.own_processes
        return _communicates(trainer) is not None

    def _check(self, trainer: Trainer) -> None:
        communicating = _communicates(trainer)
        if self.own_processes is False and communicating is not None:
            raise DloError(
                "MicroBatchFinder: own_processes must be true where forward and backward communicate, as a rank that is"
                f" out of memory would block the others, got false under {communicating}; leave it out"
            )
        if self._needs_processes(trainer) and trial_order() is None and self.command is None:
            repeated_command()
        if trainer.strategy.root_device.type != "cpu" or self.memory_limit_bytes is not None:
            return
        if not self._needs_processes(trainer):
            raise DloError(
                "MicroBatchFinder: memory_limit_bytes must be set on a CPU, where the system ends a process that is out"
                " of memory, got none; set memory_limit_bytes to the bytes that a forward pass may save for the"
                " backward pass"
            )
        if not has_memory_limit():
            raise DloError(
                "MicroBatchFinder: memory_limit_bytes must be set on a CPU whose memory neither the shell (ulimit -v)"
                " nor a container limits, got none; set it to the bytes that a process may allocate for training"
            )

    def before_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Searches, reports, and sets the size in the callbacks that take it."""
        world_size = data_parallel_coordinates(trainer)[1]
        if self._order is not None:
            self._try_out(trainer, self._order, world_size)
        if self._found is not None:
            found, self._found = self._found, None
            present, limit, largest = found.present, found.limit, found.largest
            trials, details = list(found.outcomes.items()), found.details
        else:
            vote = Vote(trainer.world_size, self.timeout)
            try:
                with rehearse(trainer) as rehearsal:
                    present, limit, largest, trials = self._search(trainer, rehearsal, vote, world_size)
            finally:
                vote.close()
            details = {}
        self.trials = trials  # Not before: the rehearsal restores this callback too.
        if not largest:
            ended = details.get(1, {}).get("ended", "out of memory with 1")
            raise DloError(
                f"MicroBatchFinder: at least one sample a rank must fit in memory, got {ended}; use a smaller model,"
                " smaller samples or a lower"
                f" precision{'' if self.memory_limit_bytes is None else ', or raise memory_limit_bytes'}"
            )
        ran_out = any(not fits for _, fits in self.trials)
        self.per_rank = largest if self.power_of_two or not ran_out else max(1, math.floor(largest * (1 - self.margin)))
        step = present * world_size * int(trainer.accumulate_grad_batches)
        takers = [each for each in trainer.callbacks if hasattr(each, "set_max_micro_batch")]  # type: ignore[attr-defined]
        most = f"max_size {limit}" if limit == self.max_size else f"the data, {limit} samples a rank"
        self._report(trainer, world_size, step, "memory" if ran_out else most, takers, details)
        for callback in takers:
            callback.set_max_micro_batch(self.per_rank)

    def _try_out(self, trainer: Trainer, order: TrialOrder, world_size: int) -> NoReturn:
        """Searches in this process, which ends with it."""
        epochs = _last_epoch(trainer)
        _fix_image_size(epochs, trainer)
        child = TrialChild(
            trainer,
            order,
            steps=self.steps_per_trial,
            epochs=epochs,
            memory_limit_bytes=self.memory_limit_bytes,
        )

        def search(rehearsal: Rehearsal, fits: Callable[[BatchPool, int], bool]) -> int:
            first = rehearsal.next_batch()
            present, limit = count_samples(first), self._largest_allowed(trainer, world_size)
            write_event(order.events, "begin", present=present, limit=limit)
            pool = BatchPool(rehearsal.next_batch, first)
            # What the margin takes away need not be found: each size that does not fit costs processes.
            return find_largest(
                lambda size: fits(pool, size), present, limit, powers=self.power_of_two, tolerance=self.margin
            )

        child.run(search)

    def _largest_allowed(self, trainer: Trainer, world_size: int) -> int:
        lengths = [sized_len(getattr(loader, "dataset", None)) for loader in training_loaders(trainer)]
        limits = [length // world_size for length in lengths if length is not None]
        limit = min(limits + ([self.max_size] if self.max_size else []), default=0)
        if limit < 1:
            raise DloError(
                "MicroBatchFinder: max_size must be set for a loader without a length, got none; set max_size"
            )
        return limit

    def _search(
        self, trainer: Trainer, rehearsal: Rehearsal, vote: Vote, world_size: int
    ) -> tuple[int, int, int, list[tuple[int, bool]]]:
        """Returns the current size, the largest allowed one, the largest one that fits, and all trials."""
        epochs = _last_epoch(trainer)
        _fix_image_size(epochs, trainer)
        first = rehearsal.next_batch()
        present, limit = count_samples(first), self._largest_allowed(trainer, world_size)
        trial = Trial(rehearsal, BatchPool(rehearsal.next_batch, first), vote, self.memory_limit_bytes, epochs)
        trials = []

        def fits(size: int) -> bool:
            outcome = trial.fits(size, self.steps_per_trial)
            trials.append((size, outcome))
            return outcome

        return present, limit, find_largest(fits, present, limit, powers=self.power_of_two), trials

    def _report(
        self,
        trainer: Trainer,
        world_size: int,
        step: int,
        bound: str,
        takers: list[Any],
        details: Mapping[int, Mapping[str, Any]],
    ) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        assert self.per_rank is not None
        batch_size, accumulate = keep_global_batch(step, self.per_rank, world_size)
        content = {
            "per_rank": self.per_rank,
            "all_ranks": self.per_rank * world_size,
            "bound": bound,
            "batch_size": batch_size,
            "accumulate_grad_batches": accumulate,
            "trials": [{"per_rank": size, "fits": outcome, **details.get(size, {})} for size, outcome in self.trials],
        }
        write_atomic(folder / FILE, json.dumps(content, indent=2) + "\n")
        lines = [
            f"\nlargest micro-batch: {self.per_rank} samples a rank, {self.per_rank * world_size} over all;"
            f" bound by {bound}, {len(self.trials)} sizes tried"
        ]
        lines += [f"  set in {type(callback).__name__}" for callback in takers]
        if not takers:
            lines += [
                f"  for the same {step} samples a step:",
                f"    data.init_args.batch_size: {batch_size}",
                f"    trainer.accumulate_grad_batches: {accumulate}",
            ]
        print("\n".join(lines), flush=True)


def _communicates(trainer: Trainer) -> str | None:
    """Returns what communicates in forward and backward, for a message; None if nothing does."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy) or shards_state(strategy):
        return type(strategy).__name__
    synced = trainer.world_size > 1 and isinstance(strategy, DDPStrategy) and strategy._layer_sync
    return "trainer.sync_batchnorm" if synced else None


def _last_epoch(trainer: Trainer) -> int:
    return trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else FAR


def _fix_image_size(epochs: int, trainer: Trainer) -> None:
    """Makes the loaders use the image size after a number of epochs, until the rehearsal ends."""
    for loader in training_loaders(trainer):
        sampler = getattr(loader, "batch_sampler", None)
        size_at = getattr(sampler, "image_size_at", None)
        if sampler is not None and size_at is not None:
            sampler.image_size_at = _AtEpoch(size_at, epochs)


class _AtEpoch:
    """Schedule of image sizes that is constant at its value after a number of epochs."""

    def __init__(self, size_at: Callable[[Position], int], epochs: int) -> None:
        self.size_at, self.epochs = size_at, epochs

    def __call__(self, at: Position) -> int:
        return self.size_at(Position(self.epochs, 0, at.size))


class Trial:
    """Trains on batches of one size, on all ranks, until one is out of memory.

    Args:
        rehearsal: Rehearsal that restores all state afterwards.
        pool: Source of the batches.
        vote: Vote by which the ranks agree.
        limit: Limit in bytes as in :class:`~dlo_plugins.callbacks.micro_batch_finder.batch_search.ActivationBudget`.
        epochs: Number of epochs after which the batches are assumed to come.
    """

    def __init__(self, rehearsal: Rehearsal, pool: BatchPool, vote: Vote, limit: int | None, epochs: int) -> None:
        self.rehearsal, self.pool, self.vote = rehearsal, pool, vote
        self.trainer = rehearsal.trainer
        self.budget = ActivationBudget(limit, self.trainer.lightning_module)
        batches = self.trainer.num_training_batches
        # Number of a batch, counted from the first epoch; never an epoch's last, whose step Lightning runs at once.
        self.number = 2 * int(batches) * epochs if math.isfinite(batches) else 0

    def fits(self, size: int, steps: int) -> bool:
        """Returns whether no rank ran out of memory in ``steps`` steps; the same on all."""
        self.rehearsal.stop_if_asked()
        self.trainer.accumulate_grad_batches = 2
        batch: list[Any] = []
        parts: tuple[Callable[[], object], ...] = (
            lambda: batch.append(self.rehearsal.to_device(self.pool.batch(size), self.number)),
            lambda: self._train(batch.pop()),
            self._step,
        )
        for _ in range(steps):
            for part in parts:
                if self.vote.any(ran_out_of_memory(part)):
                    batch.clear()
                    self._free()
                    return False
        return True

    def _train(self, batch: Any) -> None:
        """Runs forward and backward as for the first of two batches of a step, so that gradients are not reduced."""
        with self.budget:
            self.rehearsal.train_on(batch, self.number)

    def _step(self) -> None:
        self.rehearsal.step_optimizer(self.number + 1)

    def _free(self) -> None:
        self.trainer.optimizers[0].zero_grad(set_to_none=True)
        gc.collect()
        if self.trainer.strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()


def ran_out_of_memory(action: Callable[[], object]) -> bool:
    """Calls ``action``; returns whether memory ran out. It drops the error, which refers to tensors in memory."""
    try:
        action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


class Vote:
    """Logical or of a flag over all ranks, on a process group of its own.

    A rank that is out of memory votes while others may still compute. On training's process group, its message could be
    matched with one of theirs.

    Args:
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.timeout = timeout
        self._group: Any = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def any(self, happened: bool) -> bool:
        """Returns whether the flag is set on any rank.

        Raises:
            DloError: If the others do not answer in time.
        """
        if self._group is None:
            return happened
        flag = torch.tensor(int(happened))
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise DloError(
                f"MicroBatchFinder: all ranks must finish a part of a trial within {self.timeout:g} s, got a timeout."
                " Either a rank has failed, or training_step communicates (for example by self.log with sync_dist) and"
                f" a rank that is out of memory blocks the others; log without sync_dist, or set max_size ({error})"
            ) from error
        return bool(flag)

    def close(self) -> None:
        """Destroys the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
