"""Callbacks that change training batches once they are on the device, such as mixing or resizing images.

Lightning gives callbacks the batch to look at, not to change (Lightning issue #1733). What happens to a batch last,
before any hook sees it, is ``strategy.batch_to_device``: it moves the batch and runs the data hooks of datamodule and
module. :class:`BatchTransform` adds one more thing to it while a run trains, so that it works with every module, every
datamodule and every strategy, and ``on_train_batch_start``, ``training_step`` and ``on_train_batch_end`` are all given
the transformed batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, default_collate

_TRANSFER = "batch_to_device"
_DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransform(Callback, ABC):
    """A callback that changes each training batch after its transfer to the device; evaluation is left alone.

    A subclass implements :meth:`transform`. Where it has a ``setup``, ``teardown`` or ``on_exception`` of its own, it
    calls ``super``'s too. Batches pass through the transforms of all callbacks in the order of :attr:`order`.

    Example:
        ```python
        class Noise(BatchTransform):
            order = 15

            def transform(self, trainer, pl_module, batch):
                images, targets = batch
                return images + 0.01 * torch.randn_like(images), targets
        ```
    """

    #: Transforms with a lower number come first: resizing has 10, mixing 20.
    order: int = 0

    @abstractmethod
    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch to train on.

        The tensors that it returns are those of ``batch``, or are made for this batch alone. Those of ``batch`` may be
        written to only where :func:`batches_are_new` says so.

        Args:
            trainer: the trainer, in its training stage.
            pl_module: the module that is trained.
            batch: the batch on its device, after the data hooks and the transforms of lower order.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Joins the transfer of batches, in each process of its own: nothing has to travel to a launched one."""
        if stage == "fit":
            join_transfer(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the transfer as it was."""
        leave_transfer(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the transfer as it was: Lightning calls no ``teardown`` then."""
        leave_transfer(trainer)


class BatchCopier(Callback, ABC):
    """A callback that copies batches to the device in its own way; one that has joined the transfer is asked first."""

    @abstractmethod
    def copy_batch(self, batch: Any) -> Any:
        """Returns the batch on the device."""


class _Transfer:
    """A strategy's ``batch_to_device``, followed by the transforms of the trainer's callbacks while it trains.

    Where a callback copies batches, and neither module nor datamodule does so itself, it does before that.
    """

    def __init__(self, trainer: Trainer, transfer: Callable[..., Any], was_own: bool) -> None:
        self.trainer: Any = trainer
        self.transfer, self.was_own = transfer, was_own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self.trainer
        copier = next((callback for callback in trainer.callbacks if isinstance(callback, BatchCopier)), None)
        if copier is not None and args and not _transfers_itself(trainer):
            args = (copier.copy_batch(args[0]), *args[1:])
        batch = self.transfer(*args, **kwargs)
        if not trainer.training or batch is None:
            return batch
        transforms = [callback for callback in trainer.callbacks if isinstance(callback, BatchTransform)]
        for callback in sorted(transforms, key=lambda callback: callback.order):
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.transform"):
                batch = callback.transform(trainer, trainer.lightning_module, batch)
        return batch


def _transfers_itself(trainer: Any) -> bool:
    parts = [part for part in (getattr(trainer, "datamodule", None), trainer.lightning_module) if part is not None]
    return any(is_overridden("transfer_batch_to_device", part) for part in parts)


def join_transfer(trainer: Trainer) -> None:
    """Puts the transforms behind ``trainer.strategy.batch_to_device``, once a trainer.

    The method is hidden by an attribute of that one strategy object, until :func:`leave_transfer`. Lightning (2.6)
    moves every batch of its loops through it, and nothing but batches: model summaries and loggers that trace the graph
    move ``example_input_array`` past it.
    """
    own = vars(trainer.strategy)
    if not isinstance(own.get(_TRANSFER), _Transfer):
        transfer = _Transfer(trainer, trainer.strategy.batch_to_device, was_own=_TRANSFER in own)
        setattr(trainer.strategy, _TRANSFER, transfer)


def leave_transfer(trainer: Trainer) -> None:
    """Undoes :func:`join_transfer`; does nothing where that has been done."""
    current = vars(trainer.strategy).get(_TRANSFER)
    if not isinstance(current, _Transfer):
        return
    if current.was_own:
        setattr(trainer.strategy, _TRANSFER, current.transfer)
    else:
        delattr(trainer.strategy, _TRANSFER)


def batches_are_new(trainer: Trainer) -> bool:
    """Returns whether the tensors of a training batch are surely held by nobody else, so that they may be written to.

    On a CPU nothing is copied on the way from the dataset to the training step: a loader with ``batch_size=None``, or
    a ``collate_fn`` or data hook of one's own, may hand out the dataset's very memory, and what is written there is
    read again in the next epoch. So only two cases count as new: torch's default collation, which stacks samples into
    new memory, with no data hook after it; and a datamodule or module that declares ``makes_new_batches = True``, by
    which it promises it of the batches that leave its hooks.
    """
    datamodule = getattr(trainer, "datamodule", None)
    parts = [part for part in (datamodule, trainer.lightning_module) if part is not None]
    declared = [getattr(part, "makes_new_batches", False) for part in parts]
    for part, is_declared in zip(parts, declared, strict=True):
        if not is_declared and any(is_overridden(hook, part) for hook in _DATA_HOOKS):
            return False
    return any(declared) or _collates_anew(trainer.train_dataloader)


def _collates_anew(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return loader.collate_fn is default_collate
    return bool(getattr(loader, "makes_new_batches", False))
