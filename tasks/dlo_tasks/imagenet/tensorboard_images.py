"""Display of a classifier's images in TensorBoard, if the run has that logger."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from dlo_tasks.imagenet import image_grids
from dlo_tasks.imagenet.sample_metrics import Confusion


def show_images(trainer: Trainer, batch: Any, count: int, num_classes: int) -> None:
    """Shows the first `count` images of a batch with their labels, as the model gets them."""
    board = _board(trainer)
    if board is None:
        return
    data = trainer.datamodule  # type: ignore[attr-defined]
    mean, std = getattr(data, "mean", None), getattr(data, "std", None)
    images = image_grids.denormalise(batch[0][:count], mean, std).cpu()
    labels = image_grids.target_labels(batch[1][:count], _class_names(trainer, num_classes))
    board.add_image("train/images", image_grids.image_grid(images, labels), trainer.global_step)


def show_confusion(trainer: Trainer, confusion: Confusion, stage: str) -> None:
    """Shows the confusion matrix of all ranks, if it has counts; every rank must call this."""
    if not confusion.update_called:
        return
    counts = confusion.compute()  # collective: before ranks without a board return
    board = _board(trainer)
    if board is not None:
        picture = image_grids.confusion_picture(counts, _class_names(trainer, confusion.num_classes))
        board.add_image(f"{stage}/confusion", picture, trainer.global_step)


def _class_names(trainer: Trainer, num_classes: int) -> list[str]:
    names = getattr(trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
    return [str(name) for name in names] if names else [str(i) for i in range(num_classes)]


def _board(trainer: Trainer) -> Any:
    """Returns TensorBoard's writer; None on other ranks and with other loggers."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return loggers[0].experiment if loggers and trainer.is_global_zero else None
