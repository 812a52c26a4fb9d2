"""Views of images for training and evaluation: random crops with distortions, and centre crops."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_tasks.imagenet.augment import Transform, random_resized_box
from dlo_tasks.imagenet.decode import Box, decode_crop, resize_into


class View(Protocol):
    """Interface that renders an image at a given height and width."""

    size: int
    """Height and width in pixels, unless a draw asks for others."""

    def render(self, data: bytes, draw: Draw, numbers: np.ndarray, out: torch.Tensor) -> None:
        """Writes the image into ``out``, uint8 [height, width, 3]."""


class TrainView:
    """View for training: RandomResizedCrop, flip and distortions; random choices do not depend on the result's size.

    Args:
        size: Height and width in pixels, unless a draw asks for others.
        scale: Minimum and maximum area of the crop, as fractions of the image's area.
        ratio: Minimum and maximum aspect ratio (width / height) of the crop.
        flip: Probability of a horizontal flip.
        interpolation: Resampling filter, "bilinear" or "bicubic".
        distortions: Transforms of the uint8 [3, height, width] image, in order, with torch seeded by the draw.
    """

    def __init__(
        self,
        size: int,
        scale: tuple[float, float],
        ratio: tuple[float, float],
        flip: float,
        interpolation: str,
        distortions: list[Transform],
    ) -> None:
        self.size, self.scale, self.ratio, self.flip = size, scale, ratio, flip
        self.interpolation, self.distortions = interpolation, distortions

    def render(self, data: bytes, draw: Draw, numbers: np.ndarray, out: torch.Tensor) -> None:
        """Writes one random view of the image into ``out``, uint8 [height, width, 3]."""
        largest = max(out.shape[:2])
        pixels, box = decode_crop(
            data, lambda h, w: random_resized_box(h, w, numbers, self.scale, self.ratio), largest, exact=False
        )
        resize_into(out, pixels, box, self.interpolation, flip=bool(numbers[22] < self.flip))
        if self.distortions:
            torch.default_generator.manual_seed(draw.seed)
            image = out.permute(2, 0, 1)
            for distort in self.distortions:
                image = distort(image)
            out.copy_(image.permute(1, 2, 0))


class EvalView:
    """View for evaluation: resizes the shorter side, then crops the centre; pixel for pixel torchvision's result.

    Args:
        size: Height and width in pixels, unless a draw asks for others.
        crop_pct: Fraction of the shorter side that is cropped.
        interpolation: Resampling filter, "bilinear" or "bicubic".
    """

    def __init__(self, size: int, crop_pct: float, interpolation: str) -> None:
        self.size, self.crop_pct, self.interpolation = size, crop_pct, interpolation

    def render(self, data: bytes, draw: Draw, numbers: np.ndarray, out: torch.Tensor) -> None:
        """Writes the image's centre into ``out``, uint8 [height, width, 3]."""
        height, width = out.shape[:2]
        size = min(height, width)
        shorter = max(size, int(size / self.crop_pct + 1e-6))
        pixels, box = decode_crop(data, lambda h, w: Box(0, 0, h, w), shorter, exact=True)
        resized = torch.empty(*self._resized(box.height, box.width, shorter, height, width), 3, dtype=torch.uint8)
        resize_into(resized, pixels, box, self.interpolation)
        top, left = round((resized.shape[0] - height) / 2), round((resized.shape[1] - width) / 2)
        out.copy_(resized[top : top + height, left : left + width])

    @staticmethod
    def _resized(rows: int, columns: int, shorter: int, height: int, width: int) -> tuple[int, int]:
        """Returns the size to resize to: the given shorter side, but never less than the crop in either dim."""
        longer = int(shorter * max(rows, columns) / min(rows, columns))
        sides = (shorter, longer) if rows <= columns else (longer, shorter)
        if sides[0] >= height and sides[1] >= width:
            return sides
        scale = max(height / rows, width / columns)
        return max(height, int(rows * scale)), max(width, int(columns * scale))
