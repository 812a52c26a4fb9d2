"""scikit-learn's handwritten digits as small images: real data that needs no download."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from dlo_framework.data import Draw, ResumableLoader, hash64, uniform
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.data_base import ImageData

_PIXEL_MAX = 16  # the values of scikit-learn's 8 x 8 images are 0..16
_SPLIT = 3  # keeps the split's random numbers apart from those of the order and the augmentation


def load_digits_images(image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the 1,797 digits: grey uint8 [N, image_size, image_size], and int64 classes [N]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / _PIXEL_MAX)  # [N, 1, 8, 8]
    if image_size != pixels.shape[-1]:
        pixels = F.interpolate(pixels, (image_size, image_size), mode="bilinear", antialias=True, align_corners=False)
    images = pixels.round_().clamp_(0, 255).to(torch.uint8).squeeze(1)
    return images, torch.from_numpy(digits.target).long()


def warp(
    images: torch.Tensor, angle: torch.Tensor, zoom: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns grey images rotated about their centre and enlarged, bilinear; what comes in from outside is 0.

    Args:
        images: uint8 [B, S, S].
        angle: float [B], in radians, anticlockwise.
        zoom: float [B]; 1.1 enlarges by a tenth.
        shift: float [2, B]: how far the images are moved up and left before that, as a fraction of S. Default: none.
    """
    cos, sin, none = angle.cos() / zoom, angle.sin() / zoom, torch.zeros_like(angle)
    up, left = (none, none) if shift is None else 2 * shift  # the grid goes from -1 to 1
    theta = torch.stack([cos, -sin, left, sin, cos, up], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, [len(images), 1, *images.shape[1:]], align_corners=False)
    warped = F.grid_sample(images.unsqueeze(1).float(), grid, mode="bilinear", align_corners=False)
    return warped.squeeze(1).round_().to(torch.uint8)


def digits_at(indices: torch.Tensor, image_size: int) -> torch.Tensor:
    """Returns some of the digits, uint8 [len(indices), image_size, image_size]."""
    return load_digits_images(image_size)[0][indices]


class ShiftedImages:
    """Grey images in memory, given out in whole batches as RGB, each shifted, turned and enlarged at random.

    The random choices do not depend on the size that a draw asks for.

    Args:
        images: uint8 [N, S, S].
        targets: int64 [N].
        shift: the largest shift in pixels of S, up, down, left and right; 0 for none. What comes in is 0.
        rotation: the largest rotation in degrees, either way.
        zoom: the largest enlargement, and reduction, as a fraction of the size.
        at_size: returns the images at another height and width, for draws that ask for it.
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
        assert self._at_size is not None, "these images have one size only"
        assert height == width, "these images are square"
        if height not in self._others:
            self._others[height] = self._at_size(height)
        return self._others[height]


class DigitsData(ImageData):
    """1,797 real handwritten digits (8 x 8 pixels, 10 classes) that ship with scikit-learn.

    Small enough to train in a minute on a laptop, and real enough to overfit: the data for a first run, and
    for trying a strategy before it is given a cluster. A small ViT reaches over 97% validation accuracy.

    ```yaml
    data:
      class_path: DigitsData
      init_args: {image_size: 16, batch_size: 64}
    ```

    The images are enlarged with bilinear interpolation and given as RGB, so that any image model takes them, at any
    size that ProgressiveResizing asks for.
    Batches are ``(images, targets)``: float32 ``[B, 3, image_size, image_size]``, int64 ``[B]``. The whole
    dataset stays in memory and a batch is one indexing operation, so that workers would only cost time.

    Args:
        image_size: height and width in pixels. Default 16, four patches of 4 each way.
        batch_size: images per micro-step over all data-parallel ranks together, so that the number of ranks
            does not change the loss curve. Must be divisible by the ranks.
        eval_batch_size: the same in validation, test and prediction. Default: ``batch_size``. Changes no metric.
        val_fraction: the share of the images that is held out for validation, test and prediction, drawn at
            random with ``seed``.
        max_shift: each training image is shifted by up to this many pixels in each direction, at random.
        max_rotation: and turned by up to this many degrees, either way.
        max_zoom: and enlarged or reduced by up to this fraction.
        num_workers: loading processes on each rank. 0, because loading a batch takes far less time than
            handing it from one process to another.
        seed: of the split, the order and the shifts.
        channels_last: keep the colours of a pixel side by side in memory.

    Raises:
        DloError: for sizes and fractions that leave a split empty.

    Source: E. Alpaydin, C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, doi:10.24432/C50P49; the test set of it, which is what scikit-learn ships.
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
        if image_size < 8:
            raise DloError(f"image_size must be at least 8, the size of the digits themselves; got {image_size}")
        if not 0 < val_fraction < 1:
            raise DloError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
        if not 0 <= max_shift < image_size:
            raise DloError(f"max_shift must be in 0..{image_size - 1} pixels, got {max_shift}")
        if not 0 <= max_rotation <= 180 or not 0 <= max_zoom < 1:
            raise DloError(
                "max_rotation must be in 0..180 degrees, and max_zoom at least 0 and below 1;"
                f" got {max_rotation} and {max_zoom}"
            )
        self.num_classes = 10
        self.class_names = [str(digit) for digit in range(10)]
        self.val_fraction = val_fraction
        self.max_shift, self.max_rotation, self.max_zoom = max_shift, max_rotation, max_zoom

    def check(self) -> None:
        """Raises DloError where a split would be empty or smaller than a batch."""
        train, val = (len(split) for split in self._splits)
        if not val or self.batch_size > train:
            raise DloError(
                f"val_fraction {self.val_fraction} leaves {train} training and {val} validation images, and "
                f"batch_size is {self.batch_size}; use a fraction of at least 0.001 and a batch of at most {train}"
            )

    @cached_property
    def _splits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the training and of the validation images."""
        from sklearn.datasets import load_digits

        count = len(load_digits().target)
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
        """Distorted training images in random order."""
        return self.train_loader(self._subset(self._splits[0], self.max_shift, self.max_rotation, self.max_zoom))

    def val_dataloader(self) -> ResumableLoader:
        """The held-out images as they are."""
        return self._held_out("val")

    def test_dataloader(self) -> ResumableLoader:
        """The same images as in validation: the dataset has no third split."""
        return self._held_out("test")

    def predict_dataloader(self) -> ResumableLoader:
        """The same images as in validation."""
        return self._held_out("predict")

    def rectangular_val_dataloader(self, multiple: int, max_ratio: float) -> ResumableLoader:
        """Raises DloError: every digit is square."""
        raise DloError(
            "RectangularValidation: DigitsData's images are all square, so that rectangles would be the same again;"
            " remove the callback"
        )

    def _held_out(self, name: str) -> ResumableLoader:
        dataset: Any = self._subset(self._splits[1])
        return self.eval_loader(dataset, name=name)
