"""Callbacks that change training batches on the device, for example by mixing or resizing images.

Lightning's callbacks can read the batch, but not replace it (Lightning issue #1733). The last function that changes a
batch before any hook gets it is ``strategy.batch_to_device``: it moves the batch and runs the data hooks of datamodule
and module. :class:`BatchTransform` appends a step to it during training, so that it works with every module, every
datamodule and every strategy, and ``on_train_batch_start``, ``training_step`` and ``on_train_batch_end`` all get the
transformed batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, default_collate

from dlo_framework.callback import PluginCallback
from dlo_framework.data.description import LoaderDescription, ModuleDescription, run_datamodule

_TRANSFER = "batch_to_device"
_DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransform(PluginCallback, ABC):
    """Callback that changes each training batch after its transfer to the device; evaluation is unaffected.

    A subclass implements :meth:`transform`. If it overrides ``setup``, ``teardown``, ``on_exception`` or
    :meth:`release`, which both of these call, it calls ``super``'s too. The transforms of all callbacks run in
    ascending :attr:`order`.

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

        The tensors that it returns are those of ``batch``, or are made for this batch alone. It may write to those of
        ``batch`` only if :func:`batches_are_new`.

        Args:
            trainer: Trainer, in its training stage.
            pl_module: Module that is trained.
            batch: Batch on its device, after the data hooks and the transforms of lower order.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Installs the transform, in each process by itself: launched processes need not receive it."""
        if stage == "fit":
            join_transfer(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the transform."""
        self.release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the transform: Lightning does not call ``teardown`` then."""
        self.release(trainer)

    def release(self, trainer: Trainer) -> None:
        """Takes back what ``setup`` has changed, at the end of a run and after an error."""
        leave_transfer(trainer)


class BatchCopier(PluginCallback, ABC):
    """Callback that copies batches to the device in its own way; the first one in the transfer is used."""

    @abstractmethod
    def copy_batch(self, batch: Any) -> Any:
        """Returns the batch on the device."""


class _Transfer:
    """A strategy's ``batch_to_device``, followed by the transforms of the trainer's callbacks during training.

    If a callback copies batches, and neither module nor datamodule overrides the copy, it runs before that.
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
    parts = [part for part in (run_datamodule(trainer), trainer.lightning_module) if part is not None]
    return any(is_overridden("transfer_batch_to_device", part) for part in parts)


def join_transfer(trainer: Trainer) -> None:
    """Installs the transforms after ``trainer.strategy.batch_to_device``, once a trainer.

    An attribute of that one strategy object shadows the method, until :func:`leave_transfer`. Lightning (2.6) moves
    every batch of its loops through it, and nothing but batches: model summaries and loggers that trace the graph do
    not move ``example_input_array`` through it.
    """
    own = vars(trainer.strategy)
    if not isinstance(own.get(_TRANSFER), _Transfer):
        transfer = _Transfer(trainer, trainer.strategy.batch_to_device, was_own=_TRANSFER in own)
        setattr(trainer.strategy, _TRANSFER, transfer)


def leave_transfer(trainer: Trainer) -> None:
    """Undoes :func:`join_transfer`; does nothing if that has been done."""
    current = vars(trainer.strategy).get(_TRANSFER)
    if not isinstance(current, _Transfer):
        return
    if current.was_own:
        setattr(trainer.strategy, _TRANSFER, current.transfer)
    else:
        delattr(trainer.strategy, _TRANSFER)


def batches_are_new(trainer: Trainer) -> bool:
    """Returns whether a training batch's tensors have no other owner, so that they may be written to.

    On a CPU nothing is copied between the dataset and the training step: a loader with ``batch_size=None``, or a user's
    ``collate_fn`` or data hook, may return the dataset's own memory, and the next epoch would read what is written
    there. So only two cases count as new: torch's default collation, which stacks samples into new memory, with no data
    hook after it; and a datamodule or module that declares ``makes_new_batches = True``, which promises it for the
    batches that its hooks return.
    """
    datamodule = run_datamodule(trainer)
    parts = [part for part in (datamodule, trainer.lightning_module) if part is not None]
    declared = [bool(ModuleDescription(part).makes_new_batches) for part in parts]
    for part, is_declared in zip(parts, declared, strict=True):
        if not is_declared and any(is_overridden(hook, part) for hook in _DATA_HOOKS):
            return False
    return any(declared) or _collates_to_new_memory(trainer.train_dataloader)


def _collates_to_new_memory(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return loader.collate_fn is default_collate
    return bool(LoaderDescription(loader).makes_new_batches)
