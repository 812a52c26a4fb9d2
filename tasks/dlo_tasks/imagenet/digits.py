"""Datamodule of scikit-learn's handwritten digits: small real images that need no download."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from dlo_framework.data import Draw, ResumableLoader, hash64, uniform
from dlo_framework.errors import DloError, check_number
from dlo_tasks.imagenet.data_base import ImageData

_PIXEL_MAX = 16  # the values of scikit-learn's 8 x 8 images are 0..16
_SPLIT = 3  # key that separates the split's random numbers from those of order and augmentation


@cache
def read_digits() -> Any:
    """Returns scikit-learn's digits, which it parses from a text file for as long as a short run takes to train."""
    from sklearn.datasets import load_digits

    return load_digits()


def load_digits_images(image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the 1,797 digits: grey uint8 [N, image_size, image_size], and int64 classes [N]."""
    digits = read_digits()
    pixels = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / _PIXEL_MAX)  # [N, 1, 8, 8]
    if image_size != pixels.shape[-1]:
        pixels = F.interpolate(pixels, (image_size, image_size), mode="bilinear", antialias=True, align_corners=False)
    images = pixels.round_().clamp_(0, 255).to(torch.uint8).squeeze(1)
    return images, torch.tensor(digits.target)


def warp(
    images: torch.Tensor, angle: torch.Tensor, zoom: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns grey images rotated about their centre and enlarged, bilinear, with 0 outside.

    Args:
        images: Images, uint8 [B, S, S].
        angle: Angles in radians, anticlockwise, float [B].
        zoom: Enlargement factors, float [B]; 1.1 enlarges by a tenth.
        shift: Shifts up and left before the rotation, as fractions of S, float [2, B]; None for none.
    """
    cos, sin, none = angle.cos() / zoom, angle.sin() / zoom, torch.zeros_like(angle)
    up, left = (none, none) if shift is None else 2 * shift  # the grid goes from -1 to 1
    theta = torch.stack([cos, -sin, left, sin, cos, up], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, [len(images), 1, *images.shape[1:]], align_corners=False)
    warped = F.grid_sample(images.unsqueeze(1).float(), grid, mode="bilinear", align_corners=False)
    return warped.squeeze(1).round_().to(torch.uint8)


def digits_at(indices: torch.Tensor, image_size: int) -> torch.Tensor:
    """Returns the digits at the indices, uint8 [len(indices), image_size, image_size]."""
    return load_digits_images(image_size)[0][indices]


class ShiftedImages:
    """Batch dataset of grey images in memory, as RGB, each shifted, rotated and zoomed at random.

    The random choices do not depend on the size that a draw asks for.

    Args:
        images: Images, uint8 [N, S, S].
        targets: Class indices, int64 [N].
        shift: Maximum shift in pixels of S, up, down, left and right, filled with 0; 0 for none.
        rotation: Maximum rotation in degrees, in both directions.
        zoom: Maximum enlargement and reduction, as a fraction of the size.
        at_size: Function that returns the images at another height and width, for draws that ask for it.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        shift: int = 0,
        rotation: float = 0.0,
        zoom: float = 0.0,
        at_size: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.images = F.pad(images, (shift, shift, shift, shift))
        self.targets = targets
        self.shift, self.rotation, self.zoom = shift, rotation, zoom
        self._side = torch.arange(images.shape[-1])
        self._at_size = at_size
        self._others: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, draws: list[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns uint8 images [B, 3, S, S] and int64 targets [B]; both are functions of the draws alone."""
        index = torch.tensor([draw.index for draw in draws])
        targets = self.targets[index]
        seeds = np.array([draw.seed for draw in draws])
        places = 2 * self.shift + 1
        place = hash64(seeds) % np.uint64(places * places)
        down, right = (torch.from_numpy(p.astype(np.int64)) for p in np.divmod(place, np.uint64(places)))
        turn, grow = (torch.from_numpy(2 * uniform(seeds, key) - 1).float() for key in (1, 2))
        angle, zoom = turn * math.radians(self.rotation), 1 + grow * self.zoom
        size = draws[0].size
        if size is not None and size != (len(self._side), len(self._side)):
            shift = (torch.stack([down, right]) - self.shift) / len(self._side)
            images = warp(self._other(*size)[index], angle, zoom, shift)
        else:
            rows = (down[:, None] + self._side)[:, :, None]  # [B, S, 1]
            columns = (right[:, None] + self._side)[:, None, :]  # [B, 1, S]
            images = self.images[index[:, None, None], rows, columns]
            if self.rotation or self.zoom:
                images = warp(images, angle, zoom)
        return images.unsqueeze(1).repeat(1, 3, 1, 1), targets

    def _other(self, height: int, width: int) -> torch.Tensor:
        assert self._at_size is not None, "the images have one size only"
        assert height == width, "the images are square"
        if height not in self._others:
            self._others[height] = self._at_size(height)
        return self._others[height]


class DigitsData(ImageData):
    """Datamodule of 1,797 real handwritten digits (8 x 8 pixels, 10 classes) that ship with scikit-learn.

    It is small enough to train in a minute on a laptop, and real enough to overfit: use it for a first run, or to try a
    strategy before you use a cluster. A small ViT reaches over 97% validation accuracy.

    ```yaml
    data:
      class_path: DigitsData
      init_args: {image_size: 16, batch_size: 64}
    ```

    The images are enlarged with bilinear interpolation and converted to RGB, so that any image model takes them, at any
    size that ProgressiveResizing asks for. Batches are ``(images, targets)``: float32
    ``[B, 3, image_size, image_size]``, int64 ``[B]``. The dataset stays in memory and a batch is one indexing
    operation, so that workers would only cost time.

    Args:
        image_size: Height and width in pixels. Default 16, four patches of 4 each way.
        batch_size: Number of images per micro-step over all data-parallel ranks (the global batch), so that the number
            of ranks does not change the loss curve. Must be divisible by the number of ranks.
        eval_batch_size: Global batch in validation, test and prediction. Default: ``batch_size``. It changes no metric.
        val_fraction: Fraction of the images that is held out for validation, test and prediction, drawn at random with
            ``seed``.
        max_shift: Maximum random shift of a training image in each direction, in pixels.
        max_rotation: Maximum random rotation of a training image in both directions, in degrees.
        max_zoom: Maximum random enlargement and reduction of a training image, as a fraction.
        num_workers: Number of loader processes per rank. Default 0, because loading a batch takes far less time than
            passing it between processes.
        seed: Seed of the split, the order and the augmentation.
        channels_last: Whether images use channels-last memory.

    Raises:
        DloError: If sizes and fractions leave a split empty.

    Source: E. Alpaydin, C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, doi:10.24432/C50P49; its test set, which scikit-learn ships.
    """

    sizes_images = True

    def __init__(
        self,
        image_size: int = 16,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        val_fraction: float = 0.2,
        max_shift: int = 1,
        max_rotation: float = 10.0,
        max_zoom: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        super().__init__(
            image_size=image_size,
            mean=(0.3, 0.3, 0.3),
            std=(0.35, 0.35, 0.35),
            channels_last=channels_last,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        check_number("image_size", image_size, "at least 8, the size of the digits", "16 is usual")
        check_number("val_fraction", val_fraction, "above 0 and below 1", "0.2 is usual")
        if not 0 <= max_shift < image_size:
            raise DloError(f"max_shift must be in 0..{image_size - 1} pixels, got {max_shift}; 0 switches it off")
        check_number("max_rotation", max_rotation, "at least 0 and at most 180 degrees", "0 switches it off")
        check_number("max_zoom", max_zoom, "at least 0 and below 1", "0 switches it off")
        self.num_classes = 10
        self.class_names = [str(digit) for digit in range(10)]
        self.val_fraction = val_fraction
        self.max_shift, self.max_rotation, self.max_zoom = max_shift, max_rotation, max_zoom

    def check(self) -> None:
        """Raises a DloError if a split would be empty or smaller than a batch."""
        train, val = (len(split) for split in self._splits)
        if not val or self.batch_size > train:
            raise DloError(
                f"val_fraction and batch_size must leave a batch of training images and a validation image, got"
                f" {self.val_fraction} and {self.batch_size} ({train} training and {val} validation images); use a"
                f" fraction of at least 0.001 and a batch of at most {train}"
            )

    @cached_property
    def _splits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the training images and of the validation images."""
        count = len(read_digits().target)
        order = np.argsort(hash64(np.arange(count), self.seed, _SPLIT), kind="stable")
        held_out = round(count * self.val_fraction)
        return torch.from_numpy(order[held_out:].copy()), torch.from_numpy(order[:held_out].copy())

    @cached_property
    def _images(self) -> tuple[torch.Tensor, torch.Tensor]:
        return load_digits_images(self.image_size)

    def _subset(self, indices: torch.Tensor, shift: int = 0, rotation: float = 0.0, zoom: float = 0.0) -> ShiftedImages:
        images, targets = self._images
        return ShiftedImages(images[indices], targets[indices], shift, rotation, zoom, partial(digits_at, indices))

    def train_dataloader(self) -> ResumableLoader:
        """Returns the loader of augmented training images in random order."""
        return self.train_loader(self._subset(self._splits[0], self.max_shift, self.max_rotation, self.max_zoom))

    def val_dataloader(self) -> ResumableLoader:
        """Returns the loader of the held-out images without augmentation."""
        return self._held_out("val")

    def test_dataloader(self) -> ResumableLoader:
        """Returns the loader of the validation images: the dataset has no third split."""
        return self._held_out("test")

    def predict_dataloader(self) -> ResumableLoader:
        """Returns the loader of the validation images."""
        return self._held_out("predict")

    def rectangular_val_dataloader(self, multiple: int, max_ratio: float) -> ResumableLoader:
        """Raises a DloError: all digits are square."""
        raise DloError(
            "RectangularValidation must have images of several shapes, got DigitsData, whose images are all square;"
            " remove the callback"
        )

    def _held_out(self, name: str) -> ResumableLoader:
        dataset: Any = self._subset(self._splits[1])
        return self.eval_loader(dataset, name=name)
