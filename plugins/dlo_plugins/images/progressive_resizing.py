"""Progressive resizing: small images at the start of training, where a step is cheap, large ones at the end.

Howard et al. (fast.ai) 2018, DAWNBench; Tan and Le 2021, "EfficientNetV2: Smaller Models and Faster Training"
(arXiv 2104.00298), which grows the size in stages. Departures: EfficientNetV2 grows regularisation too, which the
recipe does here. FFCV's ImageNet recipes (Leclerc et al. 2023, arXiv 2306.12517) round the size to the nearest multiple
once an epoch; here it is rounded down at each batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.batches import batch_size, replace_entries
from dlo_framework.data import Position, ResumableDataModule, ResumableLoader, data_parallel_coordinates
from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError, check_number, check_one_of
from dlo_framework.models.model_sizes import accept_any_size, check_sizes, size_multiple
from dlo_framework.progress import (
    DataHook,
    RunPosition,
    any_percentage,
    check_max_epochs,
    loader_batch_size,
    parse_position,
    value_at,
)
from dlo_framework.watch.media import is_logged, log_scalars

_MULTIPLE = 32  # for a model that takes any size: the stride of most convolutional networks


class ProgressiveResizing(BatchTransform):
    """Trains on images whose size grows: most of the run costs a fraction of its cost at the last size.

    The size of a batch depends only on its position in the data: it is the same on every rank, with any accumulation,
    and after a resume. If the datamodule can size its images (ImageFolderData, DigitsData), it decodes and crops them
    at that size, which saves the loader's time too. Other loaders' images are resized on the device, antialiased. All
    timm ViTs and CoAtNets take sizes that are multiples of their stride: they keep their parameters, made for the
    data's ``image_size``, and interpolate their position embeddings or biases. Validation uses the data's own size.

    Set either ``sizes`` or ``start_size``. A point of the run is a number of epochs, ``"3 epochs"``, ``"73%"`` of
    ``trainer.max_epochs``, or ``"500000 samples"``.

    Args:
        sizes: Points, each with the height and width in pixels from there on: ``{0: 160, "73%": 192}``.
        start_size: First size, of one that grows.
        end_size: Last size; None for the datamodule's ``image_size``.
        begin: Point at which the growth begins; the default is Composer's.
        end: Point at which the last size is reached; the default is Composer's. The rest of the run at this size
            decides the accuracy.
        stages: Number of equally long stages, the first with ``start_size`` and the last with ``end_size``
            (EfficientNetV2 has 4); None to grow in proportion to the samples seen.
        multiple: Multiple in pixels to which sizes are rounded down; None for the model's own (the patch of a ViT, the
            stride of a CoAtNet), else 32. A compiled model compiles once for each size.
        image_key: Key of the images, if batches are dicts and the datamodule cannot size its images.

    Raises:
        DloError: If the model or the data cannot have a size, a percentage has no ``max_epochs``, or the model takes
            only one size.
    """

    example = "{sizes: {0: 8, 50%: 16}}"

    #: Its batches have several shapes in a run.
    changes_batch_shapes = True

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
        check_one_of("ProgressiveResizing", sizes=sizes, start_size=start_size)
        if sizes is not None and (end_size, stages) != (None, None):
            raise DloError(
                f"ProgressiveResizing: end_size and stages must not be set with sizes, got {end_size} and {stages};"
                " leave them out, or set start_size"
            )
        check_number("ProgressiveResizing: stages", stages, "at least 2, the first and the last size", "set 4")
        check_number("ProgressiveResizing: multiple", multiple, "at least 1 pixel", "leave it out")
        self.start_size, self.end_size, self.stages = start_size, end_size, stages
        self.multiple, self.image_key = multiple, image_key
        self.begin, self.end = parse_position(begin, "ProgressiveResizing"), parse_position(end, "ProgressiveResizing")
        self.steps = {parse_position(point, "ProgressiveResizing"): size for point, size in (sizes or {}).items()}
        self._points = [*self.steps] if self.steps else [self.begin, self.end]
        self.needs_max_epochs = any_percentage(self._points)
        if sizes is not None and all(point.value for point in self.steps):
            raise DloError(
                f"ProgressiveResizing: sizes must have the first size of the run under 0, got {sizes}; add 0: 160"
            )
        check_multiples([*self.steps.values(), start_size or 1, end_size or 1], 1, "ProgressiveResizing")
        self._schedule: StepSizes | GrowingSize | None = None
        self._max_epochs = math.inf
        self._hook = DataHook("image_size_at", "ProgressiveResizing", "size the data's images")
        self._multiple = 1  # multiple in pixels for the sides of images that are not square
        self._global_batch = 0
        self._logged_step = -1

    # --- the schedule --------------------------------------------------------------------------------------

    @property
    def schedule(self) -> StepSizes | GrowingSize:
        """Schedule of the size; it exists from ``on_fit_start`` on."""
        assert self._schedule is not None, "used before on_fit_start"
        return self._schedule

    def size_at(self, at: Position) -> int:
        """Returns the height and width in pixels of the images in a batch that begins at ``at``."""
        return self.schedule.size_at(at, self._max_epochs)

    def area_factor(self, at: Position) -> float:
        """Returns the ratio of the last image area to that at ``at``, by which batches may be larger."""
        return (self.schedule.final_size(at.size, self._max_epochs) / self.size_at(at)) ** 2

    # --- before training -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the schedule in the datamodule, if that can size its images."""
        if stage != "fit":
            return
        self._max_epochs = check_max_epochs(self._points, trainer.max_epochs, "ProgressiveResizing")
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, ResumableDataModule) and datamodule.sizes_images:
            self._hook.set(datamodule, self.size_at)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the built model accept other sizes, and checks that it does."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        accept_any_size(pl_module)
        base = DataDescription(datamodule).image_size
        self._schedule = self._make_schedule(pl_module, base)
        sizes = self._schedule.all_sizes()
        check_sizes(pl_module, [(size, size) for size in sizes], (base or sizes[-1],) * 2)

    def _make_schedule(self, pl_module: LightningModule, base: int | None) -> StepSizes | GrowingSize:
        accepted = size_multiple(pl_module)
        self._multiple = self.multiple or accepted or 1
        if self.multiple is not None and accepted is not None and self.multiple % accepted:
            raise DloError(
                f"ProgressiveResizing: multiple must be a multiple of the model's {accepted} pixels, got"
                f" {self.multiple}; set {math.lcm(self.multiple, accepted)}, or leave it out"
            )
        if self.start_size is None:
            check_multiples(self.steps.values(), self._multiple, "ProgressiveResizing.sizes")
            return StepSizes(self.steps)
        last = self.end_size or base
        if last is None:
            raise DloError(
                "ProgressiveResizing: end_size must be set if the datamodule has no image_size, got none; set end_size"
            )
        multiple = self.multiple or accepted or _MULTIPLE
        check_multiples([self.start_size, last], multiple, "ProgressiveResizing")
        if {self.begin.unit, self.end.unit} != {"samples"} and "samples" in {self.begin.unit, self.end.unit}:
            raise DloError(
                "ProgressiveResizing: begin and end must have the same unit if one is in samples, got"
                f" {self.begin.unit} and {self.end.unit}; write both in samples"
            )
        begin, end = (point.epochs(1, self._max_epochs) for point in (self.begin, self.end))
        if begin >= end:
            raise DloError(
                f"ProgressiveResizing: begin must be before end, got {begin:g} and {end:g}"
                f" {'samples' if self.end.unit == 'samples' else 'epochs'}; the defaults are 50% and 80%"
            )
        if self.end.unit != "samples" and end > self._max_epochs:
            raise DloError(
                f"ProgressiveResizing: end must be within the run's {self._max_epochs:g} epochs, got {end:g} epochs;"
                " set end: '80%'"
            )
        return GrowingSize(self.start_size, last, self.begin, self.end, multiple, self.stages)

    # --- training ------------------------------------------------------------------------------------------

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with its images resized, unless the datamodule sizes them."""
        if self._hook.is_set:
            return batch
        images = images_of(batch, self.image_key)
        height, width = images.shape[-2:]
        if not self._global_batch:
            self._begin(trainer, batch, min(height, width))
        size = self.size_at(self._position(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready))
        sides = resized_sides(height, width, size, self._multiple)
        return replace_images(batch, resize_images(images, *sides), self.image_key)

    def _begin(self, trainer: Trainer, batch: Any, given: int) -> None:
        """Checks the loader's images and length at the first batch."""
        largest = self.schedule.all_sizes()[-1]
        if given < largest:
            raise DloError(
                f"ProgressiveResizing: the loader's images must have at least the schedule's largest size of {largest}"
                f" pixels, got {given}; load them at {largest}, or end the schedule at {given}"
            )
        if not math.isfinite(trainer.num_training_batches):
            raise DloError(
                "ProgressiveResizing: the training loader must have a length, got none;"
                " set trainer.limit_train_batches to the number of batches that make up an epoch"
            )
        self._global_batch = (loader_batch_size(trainer) or batch_size(batch)) * data_parallel_coordinates(trainer)[1]

    def _position(self, trainer: Trainer, batches: int) -> Position:
        """Returns the position of the batch that follows ``batches`` batches of its epoch."""
        loader = trainer.train_dataloader
        if isinstance(loader, ResumableLoader):
            return loader.position
        size = self._global_batch
        return Position(trainer.current_epoch, batches * size, int(trainer.num_training_batches) * size)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Logs the size as ``data/image_size``, every ``trainer.log_every_n_steps``."""
        step = trainer.global_step
        if not is_logged(trainer, step + 1) or step == self._logged_step:
            return
        self._logged_step = step
        size = self.size_at(self._position(trainer, batch_idx))
        log_scalars(trainer, {"data/image_size": float(size)}, step + 1)

    def release(self, trainer: Trainer) -> None:
        """Removes the schedule from the datamodule. The model still accepts all sizes."""
        super().release(trainer)
        self._hook.remove()
        self._global_batch, self._logged_step = 0, -1


_EPSILON = 1e-9  # relative; a rounding error must not delay a step of growth by a batch


@dataclass(frozen=True)
class StepSizes:
    """Schedule of sizes that begin at given points.

    Attributes:
        sizes: Height and width in pixels from each point on, in any order.
    """

    sizes: dict[RunPosition, int]

    def size_at(self, at: Position, max_epochs: float) -> int:
        """Returns the size of a batch that begins at ``at``."""
        size = value_at(self.sizes, at, max_epochs)
        assert size is not None, "one of the points is the start of the run"
        return size

    def all_sizes(self) -> list[int]:
        """Returns every size there is, ascending."""
        return sorted(set(self.sizes.values()))

    def final_size(self, size: int, max_epochs: float) -> int:
        """Returns the last size, in a run with epochs of ``size`` samples."""
        return self.sizes[max(self.sizes, key=lambda point: point.epochs(size, max_epochs))]


@dataclass(frozen=True)
class GrowingSize:
    """Schedule of a size that grows from one point to another, and is constant before and after.

    Attributes:
        start: First height and width, in pixels.
        end: Last height and width, in pixels.
        begin: Point at which the growth begins.
        finish: Point at which the last size is reached.
        multiple: Multiple in pixels to which sizes are rounded down.
        stages: Number of equally long stages with one size each (EfficientNetV2), including the first and the last
            size; None to grow in proportion to the samples seen.
    """

    start: int
    end: int
    begin: RunPosition
    finish: RunPosition
    multiple: int
    stages: int | None = None

    def size_at(self, at: Position, max_epochs: float) -> int:
        """Returns the size of a batch that begins at ``at``."""
        begin, finish = (point.epochs(at.size, max_epochs) for point in (self.begin, self.finish))
        if at.epochs >= finish:
            return self.end
        return self._size(max(0.0, (at.epochs - begin) / (finish - begin)))

    def _size(self, grown: float) -> int:
        """Returns the size at a fraction of the growth, ``grown`` between 0 and 1."""
        if self.stages is not None:
            grown = min(math.floor(grown * self.stages * (1 + _EPSILON)), self.stages - 1) / (self.stages - 1)
        return round_down((self.start + grown * (self.end - self.start)) * (1 + _EPSILON), self.multiple)

    def all_sizes(self) -> list[int]:
        """Returns every size there is, ascending."""
        if self.stages is not None:
            return sorted({self._size(stage / self.stages) for stage in range(self.stages)} | {self.end})
        low, high = sorted((self.start, self.end))
        return [*range(round_down(low, self.multiple), high, self.multiple), high]

    def final_size(self, size: int, max_epochs: float) -> int:
        """Returns the last size."""
        return self.end


def round_down(size: float, multiple: int) -> int:
    """Returns the largest multiple of at most ``size``, and at least one multiple."""
    return max(multiple, math.floor(size / multiple) * multiple)


def check_multiples(sizes: Iterable[int], multiple: int, what: str) -> None:
    """Checks that sizes are multiples of ``multiple``.

    Raises:
        DloError: If one is not; the message has the nearest multiples.
    """
    for size in sizes:
        if size < 1 or size % multiple:
            down = max(0, size // multiple * multiple)
            near = " or ".join(str(fit) for fit in (down, down + multiple) if fit)
            raise DloError(f"{what}: sizes must be multiples of {multiple} pixels, got {size}; set {near}")


# --- batches -----------------------------------------------------------------------------------------------


def images_of(batch: Any, image_key: str) -> Tensor:
    """Returns the images of a batch, [B, C, H, W]: the batch itself, its first item, or a dict's item by key.

    Raises:
        DloError: If the batch has no images there.
    """
    images = batch
    if isinstance(batch, dict):
        images = batch.get(image_key)
    elif isinstance(batch, tuple | list) and batch:
        images = batch[0]
    if isinstance(images, Tensor) and images.ndim == 4:
        return images
    held = f"a dict of {', '.join(map(repr, batch))}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
    raise DloError(
        "ProgressiveResizing: a batch must have images [B, C, H, W] as its first item, or under image_key in a dict,"
        f" got none in {held} with image_key: {image_key!r}; set image_key, or return the images first"
    )


def replace_images(batch: Any, images: Tensor, image_key: str) -> Any:
    """Returns a copy of the batch with other images."""
    if isinstance(batch, Tensor):
        return images
    return replace_entries(batch, {image_key if isinstance(batch, dict) else 0: images})


def resized_sides(height: int, width: int, size: int, multiple: int) -> tuple[int, int]:
    """Returns the height and width with ``size`` as the shorter side, at the same aspect ratio up to rounding."""
    shorter = min(height, width)
    sides = (size if side == shorter else round_down(side * size / shorter, multiple) for side in (height, width))
    return next(sides), next(sides)


def resize_images(images: Tensor, height: int, width: int) -> Tensor:
    """Returns images in another size, bilinear and antialiased, in the same dtype and memory format.

    Args:
        images: Images [B, C, H, W]; integers are rounded.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
    """
    if images.shape[-2:] == (height, width):
        return images
    wide = images if images.dtype in (torch.float32, torch.float64) else images.float()
    resized = F.interpolate(wide, (height, width), mode="bilinear", align_corners=False, antialias=True)
    return resized.to(images.dtype) if images.is_floating_point() else resized.round_().to(images.dtype)
