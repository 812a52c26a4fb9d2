"""Validation on rectangular images near their own shape, in addition to square ones.

Howard et al. (fast.ai) 2018, "Training ImageNet in 18 minutes", DAWNBench. Departure: each image has a shape of its
own, not the mean shape of its batch, so accuracy does not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from dlo_framework.callback import PluginCallback
from dlo_framework.data import ResumableLoader
from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError, check_number
from dlo_framework.models.model_sizes import accept_any_size, check_sizes, size_multiple
from dlo_framework.progress import epochs_of_run, steps_per_epoch
from dlo_framework.random_streams import random_state, restore_random_state

_MULTIPLE = 8  # for a model that takes any size, as in fast.ai
_SUFFIX = "_rect"


class RectangularValidation(PluginCallback):
    """Validates a second time on rectangular images near their own shape, and logs both results.

    A square crop of a photograph drops a quarter to a third of it. For each metric of the square validation, such as
    ``val_acc1``, this logs ``val_acc1_rect``, to all loggers and to ``summary.json``; a checkpoint or early stopping
    can monitor it. The square validation, its metrics and the random state do not change. The datamodule must make the
    rectangles, as ImageFolderData does. The model must accept them: a ViT, a CoAtNet, or a convolutional network with
    global pooling.

    Args:
        every_n_epochs: Number of epochs between rectangular validations; there is always one after the last epoch.
            None for the last epoch only. ``dlo validate`` always runs one. A run that early stopping ends may have
            none; set a number then.
        multiple: Multiple in pixels to which the longer side is rounded down; None for the model's own (the patch of a
            ViT, the stride of a CoAtNet), else 8.
        max_ratio: Largest ratio of the longer side to the shorter one; longer images are cropped.

    Raises:
        DloError: If the datamodule makes no rectangles, or the model does not accept them.
    """

    def __init__(self, every_n_epochs: int | None = None, multiple: int | None = None, max_ratio: float = 2.0) -> None:
        check_number("RectangularValidation: every_n_epochs", every_n_epochs, "at least 1", "leave it out for the last")
        check_number("RectangularValidation: multiple", multiple, "at least 1 pixel", "leave it out")
        check_number("RectangularValidation: max_ratio", max_ratio, "at least 1, a square", "set 2")
        self.every_n_epochs, self.multiple, self.max_ratio = every_n_epochs, multiple, max_ratio
        self._loader: ResumableLoader | None = None
        self._limited_loader: ResumableLoader | None = None
        self._multiple = 0

    # --- before --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the datamodule makes rectangles."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if stage in ("fit", "validate") and DataDescription(datamodule).rectangular_val_dataloader is None:
            got = "none" if datamodule is None else f"{type(datamodule).__name__} without it"
            raise DloError(
                "RectangularValidation: the datamodule must batch images by shape (rectangular_val_dataloader),"
                f" got {got}; use ImageFolderData, or remove the callback"
            )
        limit = trainer.limit_val_batches  # 1.0 is all batches, and 1 is one.
        if stage not in ("fit", "validate") or (isinstance(limit, float) and limit >= 1.0):
            return
        if "samples" not in signature(datamodule.rectangular_val_dataloader).parameters:
            raise DloError(
                "RectangularValidation: rectangular_val_dataloader must have a parameter samples under"
                f" limit_val_batches, got {type(datamodule).__name__}'s without; add it, or leave limit_val_batches out"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the images' shapes, and checks that the model accepts them."""
        self._prepare(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does the same outside a fit."""
        if self._loader is None:
            self._prepare(trainer, pl_module)

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        accept_any_size(pl_module)
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        accepted = size_multiple(pl_module)
        multiple = self.multiple or accepted or _MULTIPLE
        if accepted is not None and multiple % accepted:
            raise DloError(
                f"RectangularValidation: multiple must be a multiple of the model's {accepted} pixels, got {multiple};"
                " leave it out"
            )
        loader: ResumableLoader = datamodule.rectangular_val_dataloader(multiple, self.max_ratio)
        shapes = sorted(loader.batch_sampler.shapes, key=lambda sides: sides[1] / sides[0])  # type: ignore[attr-defined]
        base = DataDescription(datamodule).image_size or shapes[0][0]
        check_sizes(pl_module, [shapes[0], shapes[-1]], (base, base))
        self._loader, self._multiple = loader, multiple

    def teardown(self, *_: Any, **__: Any) -> None:
        """Drops the loader, as the next validation may have other data; the datamodule ends its workers."""
        self._loader = self._limited_loader = None

    on_exception = teardown  # Lightning calls no ``teardown`` then.

    # --- validation ----------------------------------------------------------------------------------------

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Validates on rectangles after the last batch, while averaged weights are still in the model."""
        batches = trainer.num_val_batches
        last = dataloader_idx == len(batches) - 1 and batch_idx + 1 >= batches[-1]
        if not last or trainer.sanity_checking or not self._due(trainer):
            return
        random = random_state()
        try:
            values = evaluate_loader(trainer, pl_module, self._limited(trainer))
        finally:
            restore_random_state(random)
        for name, value in values.items():
            pl_module.log(
                f"{name}{_SUFFIX}", value, on_step=False, on_epoch=True, sync_dist=True, add_dataloader_idx=False
            )

    def _limited(self, trainer: Trainer) -> ResumableLoader:
        """Returns the loader of as many samples as the square validation sees under ``limit_val_batches``.

        Not of as many batches: their number depends on the ranks, and with it the samples would.
        """
        assert self._loader is not None
        sampler: Any = self._loader.batch_sampler
        samples = trainer.num_val_batches[-1] * sampler.batch_size * sampler.world_size
        if samples >= len(sampler.shapes):
            return self._loader
        if self._limited_loader is None:
            datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
            self._limited_loader = datamodule.rectangular_val_dataloader(self._multiple, self.max_ratio, samples)
        assert isinstance(self._limited_loader, ResumableLoader)
        return self._limited_loader

    def _due(self, trainer: Trainer) -> bool:
        """Returns whether to validate on rectangles after this validation."""
        if trainer.state.fn != TrainerFn.FITTING:
            return True
        epoch, batches = trainer.current_epoch + 1, trainer.fit_loop.epoch_loop.batch_progress.current
        stops = trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
        if batches.ready + (trainer.val_check_batch or 0) <= trainer.num_training_batches and not stops:
            return False  # this epoch will have another validation
        interval = trainer.check_val_every_n_epoch or 1
        stops |= epoch + interval > epochs_of_run(trainer)
        if trainer.max_steps > 0:
            stops |= trainer.global_step + interval * steps_per_epoch(trainer) > trainer.max_steps
        return stops or (self.every_n_epochs is not None and epoch % self.every_n_epochs == 0)


def evaluate_loader(trainer: Trainer, pl_module: LightningModule, loader: ResumableLoader) -> dict[str, Any]:
    """Returns the epoch values that ``validation_step`` logs over a loader, by name; call it during a validation.

    The batches go through all hooks of validation batches. The step's changes to metrics and logs are undone.
    """
    step: Any = pl_module.validation_step
    takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    with _fresh_metrics(pl_module), _own_results(trainer) as results:
        for number, given in enumerate(loader):
            batch = trainer.precision_plugin.convert_input(given)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
            results.batch, results.batch_size = batch, None
            arguments = (batch, number) if takes_number else (batch,)
            call._call_strategy_hook(trainer, "validation_step", *arguments)
        values = results.metrics(on_step=False)["callback"]
        return {name: value for name, value in values.items() if value.numel() == 1}


@contextmanager
def _fresh_metrics(pl_module: LightningModule) -> Iterator[None]:
    """Resets the module's metrics inside the block, and restores their state after it.

    A torchmetrics ``Metric`` (1.x) keeps its state in plain attributes. ``reset`` replaces tensors, and clears lists.
    """
    metrics = [part for part in pl_module.modules() if isinstance(part, Metric)]
    kept = [
        {name: list(value) if isinstance(value, list) else value for name, value in vars(metric).items()}
        for metric in metrics
    ]
    try:
        for metric in metrics:
            metric.reset()
        yield
    finally:
        for metric, content in zip(metrics, kept, strict=True):
            vars(metric).update(content)


@contextmanager
def _own_results(trainer: Trainer) -> Iterator[_ResultCollection]:
    """Collects the values logged inside the block, separately from those of the validation itself.

    ``self.log`` writes to the results of the running loop; Lightning (2.6) has no public way to redirect it. So this
    replaces the validation loop's ``_results`` inside the block, and restores it together with the logger connector's
    ``_current_fx``, by which Lightning detects the first value that a hook logs in an epoch.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    loop: Any = trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop
    connector = trainer._logger_connector
    kept, hook = loop._results, connector._current_fx
    loop._results = _ResultCollection(training=False)
    try:
        yield loop._results
    finally:
        loop._results, connector._current_fx = kept, hook
