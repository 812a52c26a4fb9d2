"""The largest micro-batch that memory holds, found by trying.

No rank may be left waiting for another that has run out of memory. So a trial's forward and backward passes run
without the all-reduce of gradients, and after each part of it the ranks tell each other how it went, over a process
group that nothing else uses: only then do they go on, all the same way.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from dlo_framework.data import Position, data_parallel_coordinates
from dlo_framework.distributed.norms import divides_state
from dlo_framework.errors import DloError
from dlo_framework.rehearsal import BeforeTraining, Rehearsal, rehearse, run_folder
from dlo_framework.snapshot import training_loaders
from dlo_framework.whole_file import write_whole
from dlo_plugins.batch_search import Budget, Pool, is_out_of_memory, keep_global_batch, largest, samples

FILE = "batch_size.json"
#: Epochs, where a run has no last one.
FAR = 1_000_000


class MicroBatchFinder(BeforeTraining):
    """Finds the largest micro-batch that memory holds, before training, and puts everything back.

    It doubles the size until memory runs out, then bisects. Each trial trains on whole batches, made of the loader's:
    forward, backward and the optimizer's step, whose state then takes its memory too. Under ProgressiveResizing, the
    images have their last size. All ranks arrive at the same size. Nothing of it is left afterwards, the random state
    and the place in the data included.

    A callback with a method ``set_max_micro_batch`` is told: DynamicBatchSize. Otherwise the batch stays as the
    config has it, for it belongs to the recipe: what was found is printed, with the ``batch_size`` and
    ``accumulate_grad_batches`` that make the same step of the largest micro-batches that fit, and written to
    ``batch_size.json`` in the run's folder. A resumed run does not search again.

    Args:
        max_size: the largest size to try, in samples of one rank; None for the dataset's, shared among the ranks.
        steps_per_trial: optimizer steps of a trial. The second is the first with the optimizer's state in memory.
        power_of_two: try powers of two only, which takes fewer trials.
        margin: the fraction of what was found to leave free, since memory fragments as training goes on; not taken
            off where memory did not run out, or off a power of two.
        memory_limit_bytes: on a CPU, whose system would end the process instead: how many bytes the forward pass
            may keep for the backward pass.
        timeout: seconds that a rank waits for the others after a part of a trial.

    Raises:
        DloError: on values out of range, manual optimization, a strategy or layers that communicate within the
            forward pass, a CPU without ``memory_limit_bytes``, and if not even one sample fits.
    """

    def __init__(
        self,
        max_size: int | None = None,
        steps_per_trial: int = 3,
        power_of_two: bool = False,
        margin: float = 0.05,
        memory_limit_bytes: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (
            ("max_size", max_size),
            ("steps_per_trial", steps_per_trial),
            ("memory_limit_bytes", memory_limit_bytes),
        ):
            if value is not None and value < 1:
                raise DloError(f"MicroBatchFinder: {name} is at least 1, but was {value}")
        if not 0 <= margin < 1:
            raise DloError(f"MicroBatchFinder: margin lies in [0, 1), but was {margin}; 0.05 is usual")
        self.max_size, self.steps_per_trial, self.power_of_two = max_size, steps_per_trial, power_of_two
        self.margin, self.memory_limit_bytes, self.timeout = margin, memory_limit_bytes, timeout
        self.per_rank: int | None = None  # as found
        self.trials: list[tuple[int, bool]] = []

    def state_dict(self) -> dict[str, Any]:
        """What was found, so that a resumed run still knows."""
        return {"per_rank": self.per_rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what the run that is resumed had found."""
        self.per_rank = state_dict["per_rank"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the search cannot hang and can end."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        independent = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
        if not independent or divides_state(trainer.strategy):
            raise DloError(
                f"MicroBatchFinder: under {type(trainer.strategy).__name__} ranks wait for each other within"
                " forward and backward, so one that runs out of memory would stop all; search with --trainer.strategy"
                " ddp on a model that fits, or remove it"
            )
        if trainer.world_size > 1 and isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._layer_sync:
            raise DloError(
                "MicroBatchFinder: synchronised batch norm makes ranks wait for each other within the forward pass;"
                " search with --trainer.sync_batchnorm false, which takes the same memory"
            )
        if trainer.strategy.root_device.type == "cpu" and self.memory_limit_bytes is None:
            raise DloError(
                "MicroBatchFinder: a CPU does not say that its memory has run out, the system ends the process; give"
                " memory_limit_bytes, the bytes that a forward pass may keep for the backward pass"
            )

    def before_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Searches, reports, and tells who can use it."""
        world_size = data_parallel_coordinates(trainer)[1]
        vote = Vote(trainer.world_size, self.timeout)
        try:
            with rehearse(trainer) as rehearsal:
                present, limit, found, trials = self._search(trainer, rehearsal, vote, world_size)
        finally:
            vote.close()
        self.trials = trials  # Not before: the rehearsal puts this callback back too.
        if not found:
            raise DloError(
                "MicroBatchFinder: not even one sample a rank fits in memory; use a smaller model, smaller samples or"
                f" a lower precision{'' if self.memory_limit_bytes is None else ', or raise memory_limit_bytes'}"
            )
        ran_out = any(not fits for _, fits in self.trials)
        self.per_rank = found if self.power_of_two or not ran_out else max(1, math.floor(found * (1 - self.margin)))
        step = present * world_size * int(trainer.accumulate_grad_batches)
        told = [each for each in trainer.callbacks if hasattr(each, "set_max_micro_batch")]  # type: ignore[attr-defined]
        most = f"max_size {limit}" if limit == self.max_size else f"the data, {limit} samples a rank"
        self._report(trainer, world_size, step, "memory" if ran_out else most, told)
        for callback in told:
            callback.set_max_micro_batch(self.per_rank)

    def _search(
        self, trainer: Trainer, rehearsal: Rehearsal, vote: Vote, world_size: int
    ) -> tuple[int, int, int, list[tuple[int, bool]]]:
        """Returns the present size, the largest one allowed, the largest one that fits, and all that were tried."""
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else FAR
        _size_images_as_at(epochs, trainer)
        first = rehearsal.next_batch()
        present = samples(first)
        lengths = [sized_len(getattr(loader, "dataset", None)) for loader in training_loaders(trainer)]
        limits = [length // world_size for length in lengths if length is not None]
        limit = min(limits + ([self.max_size] if self.max_size else []), default=0)
        if limit < 1:
            raise DloError("MicroBatchFinder: the loader does not say how much data there are; give max_size")
        trial = Trial(rehearsal, Pool(rehearsal.next_batch, first), vote, self.memory_limit_bytes, epochs)
        trials = []

        def fits(size: int) -> bool:
            outcome = trial.fits(size, self.steps_per_trial)
            trials.append((size, outcome))
            return outcome

        return present, limit, largest(fits, present, limit, powers=self.power_of_two), trials

    def _report(self, trainer: Trainer, world_size: int, step: int, bound: str, told: list[Any]) -> None:
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
            "trials": [{"per_rank": size, "fits": outcome} for size, outcome in self.trials],
        }
        write_whole(folder / FILE, json.dumps(content, indent=2) + "\n")
        lines = [
            f"\nlargest micro-batch: {self.per_rank} samples a rank, {self.per_rank * world_size} over all;"
            f" bound by {bound}, {len(self.trials)} sizes tried"
        ]
        lines += [f"  told to {type(callback).__name__}" for callback in told]
        if not told:
            lines += [
                f"  for the same {step} samples a step:",
                f"    data.init_args.batch_size: {batch_size}",
                f"    trainer.accumulate_grad_batches: {accumulate}",
            ]
        print("\n".join(lines), flush=True)


def _size_images_as_at(epochs: int, trainer: Trainer) -> None:
    """Has the loaders make images of the size that they will have after so many epochs, until the rehearsal ends."""
    for loader in training_loaders(trainer):
        sampler = getattr(loader, "batch_sampler", None)
        size_at = getattr(sampler, "image_size_at", None)
        if sampler is not None and size_at is not None:
            sampler.image_size_at = _AtEpoch(size_at, epochs)


class _AtEpoch:
    """A schedule of image sizes that stands still."""

    def __init__(self, size_at: Callable[[Position], int], epochs: int) -> None:
        self.size_at, self.epochs = size_at, epochs

    def __call__(self, at: Position) -> int:
        return self.size_at(Position(self.epochs, 0, at.size))


class Trial:
    """Trains on batches of one size, on all ranks, as long as none runs out of memory.

    Args:
        rehearsal: takes back what is done here.
        pool: gives the batches.
        vote: how the ranks agree.
        limit: see :class:`~dlo_plugins.batch_search.Budget`.
        epochs: after how many epochs of the run the batches are taken to come.
    """

    def __init__(self, rehearsal: Rehearsal, pool: Pool, vote: Vote, limit: int | None, epochs: int) -> None:
        self.rehearsal, self.pool, self.vote = rehearsal, pool, vote
        self.trainer = rehearsal.trainer
        self.budget = Budget(limit, self.trainer.lightning_module)
        batches = self.trainer.num_training_batches
        # Counted as batches of the first epoch. Not the epoch's last one, whose step Lightning would not delay.
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
        """Forward and backward, as for the first of two batches of a step: gradients are not reduced."""
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
    """Calls ``action``; returns whether memory ran out. The error, which holds what was in memory, is let go."""
    try:
        action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


class Vote:
    """Tells all ranks whether something has happened on any, over a process group of its own.

    A rank that has run out of memory asks while others may still be at work. On the group that training uses, its
    question could be taken for a part of theirs.

    Args:
        world_size: the number of ranks.
        timeout: seconds to wait for the others.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.timeout = timeout
        self._group: Any = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def any(self, happened: bool) -> bool:
        """Returns whether it has happened on any rank.

        Raises:
            DloError: if the others do not answer in time.
        """
        if self._group is None:
            return happened
        flag = torch.tensor(int(happened))
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise DloError(
                f"MicroBatchFinder: after {self.timeout:g} s not all ranks had finished a part of a trial. Either one"
                " has failed, or training_step communicates (self.log with sync_dist, say) and one that runs out of"
                f" memory leaves the others waiting; log without sync_dist, or give max_size ({error})"
            ) from error
        return bool(flag)

    def close(self) -> None:
        """Gives the group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
