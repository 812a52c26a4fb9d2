"""Training steps that are undone, run by the run's own hooks, strategy and optimizer.

The learning-rate finder and the batch-size finder share this: real batches through the real hooks, the real optimizer
under the real strategy and precision, and afterwards the exact state of a run that never did it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.snapshot import take_snapshot, training_loaders
from dlo_framework.stop import GracefulStop
from dlo_framework.watch.monitor import RunMonitor, batch_loss
from dlo_framework.watch.summary import RunRecord


class Rehearsal:
    """Runs training steps on the side; :func:`rehearse` makes one and undoes all that it did."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._batches: Iterator[Any] = self.batches()

    def batches(self) -> Iterator[Any]:
        """Yields this rank's training batches, on the CPU, and restarts at the end of an epoch.

        It uses its own iterators: the trainer's are not advanced. A ``DataLoader`` is copied for it, so that one with
        persistent workers keeps them.

        Raises:
            DloError: if a loader cannot be iterated a second time.
        """
        trained: Any = self.trainer.fit_loop._combined_loader
        loaders = [_iterate_again(loader) for loader in training_loaders(self.trainer)]
        source = CombinedLoader(trained.iterables, trained._mode)
        source.flattened, source.limits = loaders, trained.limits
        limit = self.trainer.num_training_batches
        try:
            while True:
                epoch = iter(source)
                number = 0
                while number < limit:
                    try:
                        batch, _, _ = next(epoch)
                    except StopIteration:
                        break
                    number += 1
                    yield batch
                if not number:
                    raise DloError(
                        "the training loader must yield a batch, got none; check the data and limit_train_batches"
                    )
        finally:
            source.reset()  # Ends the workers of the copies.

    def next_batch(self) -> Any:
        """Returns the next batch of :meth:`batches`."""
        return next(self._batches)

    def close(self) -> None:
        """Closes the loaders' iterators."""
        self._batches.close()  # type: ignore[attr-defined]

    def stop_if_asked(self) -> None:
        """Ends the run if Ctrl-C or SIGTERM has requested it; all ranks must call it equally often.

        Raises:
            RunStopped: if so, which undoes the rehearsal, as any error does.
        """
        options: Any = self.trainer
        for callback in options.callbacks:
            if isinstance(callback, GracefulStop):
                callback.stop_aside()

    def optimizer_step(self) -> torch.Tensor:
        """Trains for one optimizer step, on the batches of an epoch's first window.

        Returns:
            The mean of their losses on this rank, a scalar on the device; NaN if ``training_step`` returned none.

        Raises:
            RunStopped: if the run was asked to stop.
        """
        self.stop_if_asked()
        losses = []
        for number in itertools.count():
            loss = batch_loss(self.trainer, self.train_on(self.to_device(self.next_batch(), number), number))
            if loss is not None:
                losses.append(loss)
            if not self.trainer.fit_loop._should_accumulate():
                break
        if not losses:
            return torch.tensor(torch.nan, device=self.trainer.strategy.root_device)
        return torch.stack(losses).mean()

    def to_device(self, batch: Any, number: int) -> Any:
        """Returns a batch on the device, after all hooks that the epoch's batch ``number`` would pass through."""
        trainer, module = self.trainer, self.trainer.lightning_module
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = number
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def train_on(self, batch: Any, number: int) -> Any:
        """Trains on one micro-batch, as if it were the epoch's batch ``number``, which determines the optimizer step.

        This is the part of ``_TrainingEpochLoop.advance`` (Lightning 2.6) between the hooks of the batch's start and
        end, which callbacks count as progress: schedules, logs, checkpoints.

        Returns:
            The batch's outputs in the form that Lightning passes to hooks.
        """
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.current.ready, loop.batch_progress.is_last_batch = number + 1, False
        connector: Any = trainer._logger_connector
        connector.on_batch_start(batch)
        arguments = loop._build_kwargs(OrderedDict(), batch, number)
        return loop.automatic_optimization.run(trainer.optimizers[0], number, arguments)

    def step_optimizer(self, number: int) -> None:
        """Steps the optimizer with the current gradients, as if after the epoch's batch ``number``.

        It includes all parts of a step: unscaling, hooks, clipping. It is ``_AutomaticOptimization`` (Lightning 2.6)
        with a closure that computes nothing.
        """
        loop = self.trainer.fit_loop.epoch_loop
        loop.batch_progress.current.ready = number + 1
        loss = torch.zeros((), device=self.trainer.strategy.root_device)
        loop.automatic_optimization._optimizer_step(number, lambda: loss)


def check_rehearsable(who: str, module: LightningModule) -> None:
    """Refuses modules that step their optimizers themselves, or fetch their batches.

    Args:
        who: Name of the callback, for the message.
        module: Module whose ``training_step`` is checked.

    Raises:
        DloError: for such a module.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise DloError(f"{who}: {name}.automatic_optimization must be True, got False; remove {who}")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise DloError(f"{who}: {name}.training_step must take batch, got dataloader_iter; change it, or remove {who}")


@contextlib.contextmanager
def rehearse(trainer: Trainer) -> Iterator[Rehearsal]:
    """Lets a callback train on the side, from ``on_train_epoch_start`` on, and undoes it, however it ends.

    Nothing is logged, the monitor's clock is stopped, and afterwards the run is in the same state as before; see
    :class:`~dlo_framework.snapshot.Snapshot`. Under DDP on more than two ranks, gradients may then differ in their last
    bits from those of a run without it: DDP reorders its buckets after its first step.
    """
    options: Any = trainer
    for callback in options.callbacks:
        if isinstance(callback, RunMonitor):
            callback.pause()
    with contextlib.ExitStack() as stack:
        stack.callback(take_snapshot(trainer).restore)
        stack.callback(setattr, trainer, "loggers", trainer.loggers)
        options.loggers = [DummyLogger() for _ in trainer.loggers]
        rehearsal = Rehearsal(trainer)
        stack.callback(rehearsal.close)
        yield rehearsal


class BeforeTraining(Callback, ABC):
    """Callback that trains on the side once, before the first batch of a run that is not resumed.

    It does so in ``on_train_epoch_start``: by then ``on_train_start`` has been called everywhere, in the module too.
    And it moves before all other callbacks, so that none has begun the epoch.
    """

    #: Order among several such callbacks.
    turn = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the module; moves to its position among the callbacks."""
        if stage == "fit":
            check_rehearsable(type(self).__name__, pl_module)
            options: Any = trainer
            options.callbacks = sorted(options.callbacks, key=_turn)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calls :meth:`before_training`, once."""
        options: Any = trainer
        begun = trainer.global_step > 0 or trainer.current_epoch > 0 or options.ckpt_path is not None
        if not begun and not options.fast_dev_run:
            self.before_training(trainer, pl_module)

    @abstractmethod
    def before_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does the callback's work."""


def _turn(callback: Callback) -> float:
    return callback.turn if isinstance(callback, BeforeTraining) else float("inf")


def run_folder(trainer: Trainer) -> Path:
    """Returns the folder of a run's files, the same on every rank; all ranks must call it."""
    options: Any = trainer
    for callback in options.callbacks:
        if isinstance(callback, RunRecord):
            return callback.folder
    return Path(options.log_dir or options.default_root_dir)


def _iterate_again(loader: Any) -> Any:
    """Returns an iterable of a loader's batches that does not advance the existing iterator."""
    if isinstance(loader, DataLoader):
        second = copy.copy(loader)
        second._iterator = None  # A DataLoader keeps persistent workers in it (torch 2.11).
        return second
    if isinstance(loader, Iterator) and not hasattr(loader, "load_state_dict"):
        raise DloError(
            f"the training loader must be iterable more than once, to try out its batches before training, got a"
            f" {type(loader).__name__}; return an object whose __iter__ restarts, such as a DataLoader"
        )
    return loader
