"""Progressive resizing: train on small images first, and on large ones at the end.

Howard et al. (fast.ai) 2018, DAWNBench; Tan and Le 2021, "EfficientNetV2: Smaller Models and Faster Training"
(arXiv 2104.00298), which grows regularisation too: that is left to the recipe. FFCV's ImageNet recipes (Leclerc et al.
2023, arXiv 2306.12517) round the size to the nearest multiple once an epoch, here it is rounded down at each batch.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.data import Position, ResumableDataModule, data_parallel_coordinates
from dlo_framework.errors import DloError
from dlo_framework.model_sizes import accept_any_size, check_sizes, size_multiple
from dlo_framework.task import batch_length
from dlo_plugins.points import any_percentage, check_max_epochs, parse_point
from dlo_plugins.resizing import (
    Growth,
    Steps,
    check_multiples,
    images_of,
    resize_images,
    resized_sides,
    with_images,
)

_MULTIPLE = 32  # of a model that takes any size: the stride of most convolutional networks


class ProgressiveResizing(BatchTransform):
    """Trains on images whose size grows: most of the run costs a fraction of what it would at the last size.

    The size of a batch follows from its place in the data alone: it is the same on every rank, whatever the
    accumulation, and after a resume. Where the datamodule can (ImageFolderData, DigitsData), images are decoded and
    cropped at that size, which saves the loader's time as well; any other loader's are resized on the device,
    antialiased. Every timm ViT and CoAtNet takes all sizes that its stride divides: it keeps its parameters, made for
    the data's ``image_size``, and interpolates its position embeddings or biases. Validation is at the data's own
    size.

    Give either ``sizes`` or ``start_size``. A point of the run is a number of epochs, ``"3 epochs"``, ``"73%"`` of
    ``trainer.max_epochs``, or ``"500000 samples"``.

    Args:
        sizes: points and the size from there on, height and width in pixels: ``{0: 160, "73%": 192}``.
        start_size: the size at first, of one that grows.
        end_size: its last size; None for the datamodule's ``image_size``.
        begin: where it begins to grow. Composer's default, as is the next.
        end: where it has its last size. The rest of the run, at this size, is where accuracy is made.
        stages: grow in that many equally long stages, of which the first has ``start_size`` and the last ``end_size``
            (EfficientNetV2 has 4); None to grow in proportion to the samples seen.
        multiple: sizes are rounded down to multiples of it; None for what the model accepts, the patch of a ViT and
            the stride of a CoAtNet, else 32. Each size is one more compilation of a compiled model.
        image_key: where the images are, if batches are dicts and the datamodule cannot size its images.

    Raises:
        DloError: on sizes that the model or the data cannot have, a percentage without ``max_epochs``, and a model
            that takes one size only.
    """

    order = 10

    def __init__(
        self,
        sizes: dict[str | float, int] | None = None,
        start_size: int | None = None,
        end_size: int | None = None,
        begin: str | float = "50%",
        end: str | float = "80%",
        stages: int | None = None,
        multiple: int | None = None,
        image_key: str = "image",
    ) -> None:
        if (sizes is None) == (start_size is None):
            raise DloError("ProgressiveResizing: give one of sizes and start_size")
        if sizes is not None and (end_size, stages) != (None, None):
            raise DloError("ProgressiveResizing: end_size and stages belong to start_size; sizes has them in itself")
        if stages is not None and stages < 2:
            raise DloError(f"ProgressiveResizing: stages is at least 2, the first and the last size, but was {stages}")
        if multiple is not None and multiple < 1:
            raise DloError(f"ProgressiveResizing: multiple is at least 1 pixel, but was {multiple}")
        self.start_size, self.end_size, self.stages = start_size, end_size, stages
        self.multiple, self.image_key = multiple, image_key
        self.begin, self.end = parse_point(begin, "ProgressiveResizing"), parse_point(end, "ProgressiveResizing")
        self.steps = {parse_point(point, "ProgressiveResizing"): size for point, size in (sizes or {}).items()}
        self._points = [*self.steps] if self.steps else [self.begin, self.end]
        self.needs_max_epochs = any_percentage(self._points)
        if sizes is not None and all(point.value for point in self.steps):
            raise DloError(f"ProgressiveResizing: sizes says what the run begins with, under 0, but was {sizes}")
        check_multiples([*self.steps.values(), start_size or 1, end_size or 1], 1, "ProgressiveResizing")
        self._schedule: Steps | Growth | None = None
        self._max_epochs = math.inf
        self._sized_by_data = False
        self._multiple = 1  # that sides of images that are not square are rounded to
        self._global_batch = 0
        self._logged_step = -1

    # --- the schedule --------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Steps | Growth:
        """The size at each place in the run; there from ``on_fit_start`` on."""
        assert self._schedule is not None, "asked for before on_fit_start"
        return self._schedule

    def size_at(self, at: Position) -> int:
        """Returns the height and width in pixels of a batch's images, from where it begins."""
        return self.schedule.size_at(at, self._max_epochs)

    def area_factor(self, at: Position) -> float:
        """Returns the area of an image of the last size over that of one at ``at``: batches may be so much larger."""
        return (self.schedule.final_size(at.size, self._max_epochs) / self.size_at(at)) ** 2

    # --- before training -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hands the schedule to the datamodule, if that can make images of a given size."""
        if stage != "fit":
            return
        self._max_epochs = check_max_epochs(self._points, trainer.max_epochs, "ProgressiveResizing")
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, ResumableDataModule) and datamodule.sizes_images:
            if datamodule.image_size_at is not None:
                raise DloError("ProgressiveResizing: two callbacks size the data's images; remove one of them")
            datamodule.image_size_at, self._sized_by_data = self.size_at, True
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the model accept other sizes, and checks that it does, now that it is built."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        accept_any_size(pl_module)
        base = getattr(datamodule, "image_size", None)
        self._schedule = self._make_schedule(pl_module, base)
        sizes = self._schedule.all_sizes()
        check_sizes(pl_module, [(size, size) for size in sizes], (base or sizes[-1],) * 2)

    def _make_schedule(self, pl_module: LightningModule, base: int | None) -> Steps | Growth:
        accepted = size_multiple(pl_module)
        self._multiple = self.multiple or accepted or 1
        if self.multiple is not None and accepted is not None and self.multiple % accepted:
            raise DloError(
                f"ProgressiveResizing: the model takes multiples of {accepted} pixels, so that multiple is one too, but"
                f" was {self.multiple}; use {math.lcm(self.multiple, accepted)}, or leave it out"
            )
        if self.start_size is None:
            check_multiples(self.steps.values(), self._multiple, "ProgressiveResizing.sizes")
            return Steps(self.steps)
        last = self.end_size or base
        if last is None:
            raise DloError("ProgressiveResizing: end_size is not given, and the data tell no image_size; set end_size")
        multiple = self.multiple or accepted or _MULTIPLE
        check_multiples([self.start_size, last], multiple, "ProgressiveResizing")
        if {self.begin.unit, self.end.unit} != {"samples"} and "samples" in {self.begin.unit, self.end.unit}:
            raise DloError("ProgressiveResizing: give begin and end in the same unit, where one is in samples")
        begin, end = (point.epochs(1, self._max_epochs) for point in (self.begin, self.end))
        if begin >= end:
            raise DloError(
                f"ProgressiveResizing: it begins to grow before it ends, but begin is {begin:g} and end {end:g}"
                f" {'samples' if self.end.unit == 'samples' else 'epochs'}"
            )
        if self.end.unit != "samples" and end > self._max_epochs:
            raise DloError(
                f"ProgressiveResizing: end is after {end:g} epochs and the run has {self._max_epochs:g}: it would never"
                " see the last size; use end: '80%'"
            )
        return Growth(self.start_size, last, self.begin, self.end, multiple, self.stages)

    # --- training ------------------------------------------------------------------------------------------

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with its images resized, unless the data have them at their size already."""
        if self._sized_by_data:
            return batch
        images = images_of(batch, self.image_key)
        height, width = images.shape[-2:]
        if not self._global_batch:
            self._begin(trainer, batch, min(height, width))
        size = self.size_at(self._position(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready))
        sides = resized_sides(height, width, size, self._multiple)
        return with_images(batch, resize_images(images, *sides), self.image_key)

    def _begin(self, trainer: Trainer, batch: Any, given: int) -> None:
        """Checks the loader's images and length, with the first batch."""
        largest = self.schedule.all_sizes()[-1]
        if given < largest:
            raise DloError(
                f"ProgressiveResizing: the loader's images are resized down, but they have {given} pixels and the"
                f" schedule goes up to {largest}; load them at {largest}, or end the schedule at {given}"
            )
        if not math.isfinite(trainer.num_training_batches):
            raise DloError(
                "ProgressiveResizing: the training loader has no length, so that there is no place in an epoch;"
                " set trainer.limit_train_batches to the number of batches that make up an epoch"
            )
        per_rank = getattr(trainer.train_dataloader, "batch_size", None)
        per_rank = per_rank if isinstance(per_rank, int) else batch_length(batch)
        self._global_batch = per_rank * data_parallel_coordinates(trainer)[1]

    def _position(self, trainer: Trainer, batches: int) -> Position:
        """Returns where the batch begins that has ``batches`` of its epoch before it."""
        loader = trainer.train_dataloader
        known = getattr(loader, "position", None)
        if isinstance(known, Position):
            return known
        size = self._global_batch
        return Position(trainer.current_epoch, batches * size, int(trainer.num_training_batches) * size)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Logs the size as ``data/image_size``, on the steps that are logged."""
        step = trainer.global_step
        if (step + 1) % trainer.log_every_n_steps or step == self._logged_step:  # type: ignore[attr-defined]
            return
        self._logged_step = step
        size = self.size_at(self._position(trainer, batch_idx))
        for logger in trainer.loggers:
            logger.log_metrics({"data/image_size": float(size)}, step=step + 1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the schedule back from the datamodule. The model goes on accepting all sizes."""
        super().teardown(trainer, pl_module, stage)
        self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Takes the schedule back from the datamodule: Lightning calls no ``teardown`` then."""
        super().on_exception(trainer, pl_module, exception)
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if self._sized_by_data and datamodule is not None:
            datamodule.image_size_at = None
        self._sized_by_data, self._global_batch, self._logged_step = False, 0, -1
