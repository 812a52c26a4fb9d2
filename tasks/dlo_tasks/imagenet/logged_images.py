"""Pictures of a classifier for the run's loggers: the images of a batch, and the confusion matrix."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from dlo_framework.watch.media import log_image
from dlo_tasks.imagenet import image_grids
from dlo_tasks.imagenet.sample_metrics import Confusion


def show_images(trainer: Trainer, batch: Any, count: int, num_classes: int) -> None:
    """Shows the first `count` images of a batch with their labels, as the model gets them."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    mean, std = getattr(data, "mean", None), getattr(data, "std", None)

    def make() -> Tensor:
        images = image_grids.denormalise(batch[0][:count], mean, std).cpu()
        labels = image_grids.target_labels(batch[1][:count], _class_names(trainer, num_classes))
        return image_grids.image_grid(images, labels)

    log_image(trainer, "train/images", make)


def show_confusion(trainer: Trainer, confusion: Confusion, stage: str) -> None:
    """Shows the confusion matrix of all ranks, if it has counts; every rank must call this."""
    if not confusion.update_called:
        return
    counts = confusion.compute()  # Collective: rank 0 alone draws.
    names = _class_names(trainer, confusion.num_classes)
    log_image(trainer, f"{stage}/confusion", lambda: image_grids.confusion_picture(counts, names))


def _class_names(trainer: Trainer, num_classes: int) -> list[str]:
    names = getattr(trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
    return [str(name) for name in names] if names else [str(i) for i in range(num_classes)]
