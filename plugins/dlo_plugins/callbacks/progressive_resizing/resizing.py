"""Mathematics of progressive resizing: the image size at each position of a run, and the resizing of batches.

Progressive resizing is fast.ai's (DAWNBench 2018); Tan and Le 2021, "EfficientNetV2" (arXiv 2104.00298) grow the size
in stages. Both start small, where a step is cheap, and end at the size that counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dlo_framework.data import Position
from dlo_framework.errors import DloError
from dlo_plugins.callbacks.run_position import RunPosition, value_at

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

    def points(self) -> list[RunPosition]:
        """Returns the points that the schedule names."""
        return list(self.sizes)


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

    def points(self) -> list[RunPosition]:
        """Returns the points that the schedule names."""
        return [self.begin, self.finish]


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
    found = batch
    if isinstance(batch, dict):
        found = batch.get(image_key)
    elif isinstance(batch, tuple | list) and batch:
        found = batch[0]
    if isinstance(found, Tensor) and found.ndim == 4:
        return found
    held = f"a dict of {', '.join(map(repr, batch))}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
    raise DloError(
        "ProgressiveResizing: a batch must have images [B, C, H, W] as its first item, or under image_key in a dict,"
        f" got none in {held} with image_key: {image_key!r}; set image_key, or return the images first"
    )


def replace_images(batch: Any, images: Tensor, image_key: str) -> Any:
    """Returns a copy of the batch with other images."""
    if isinstance(batch, dict):
        changed = dict(batch)
        changed[image_key] = images
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(images, *batch[1:])
    if isinstance(batch, tuple | list):
        return type(batch)([images, *batch[1:]])
    return images


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
