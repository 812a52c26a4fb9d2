"""Images of a source, decoded, cropped and distorted into batches."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dlo_framework.data import CountedBatch, Draw, hash64
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.augment import Transform, random_numbers, random_resized_box
from dlo_tasks.imagenet.decode import Box, CorruptImage, decode_crop, resize_into
from dlo_tasks.imagenet.folder_sources import ImageSource

_REPLACEMENTS = 100  # how many samples in a row may be corrupt before it is no accident


class View(Protocol):
    """How an image becomes one of a given height and width."""

    size: int
    """Height and width in pixels, where a draw does not ask for others."""

    def render(self, data: bytes, draw: Draw, numbers: np.ndarray, out: torch.Tensor) -> None:
        """Writes the image into ``out``, uint8 [height, width, 3]."""


class TrainView:
    """RandomResizedCrop, flip and distortions; the random choices do not depend on the size of the result.

    Args:
        size: height and width in pixels, where a draw does not ask for others.
        scale: smallest and largest area of the crop, as shares of the image's.
        ratio: smallest and largest width / height of the crop.
        flip: probability of a horizontal flip.
        interpolation: "bilinear" or "bicubic".
        distortions: applied in order to the uint8 [3, height, width] image, with torch seeded by the draw.
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
    """Resize the shorter side, then crop the centre: pixel for pixel what torchvision's Resize and CenterCrop do.

    Args:
        size: height and width in pixels, where a draw does not ask for others.
        crop_pct: the crop's share of the shorter side.
        interpolation: "bilinear" or "bicubic".
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
        """Returns the size to resize to: the shorter side as said, but never less than the crop on either side."""
        longer = int(shorter * max(rows, columns) / min(rows, columns))
        sides = (shorter, longer) if rows <= columns else (longer, shorter)
        if sides[0] >= height and sides[1] >= width:
            return sides
        scale = max(height / rows, width / columns)
        return max(height, int(rows * scale)), max(width, int(columns * scale))


class ImageDataset:
    """Gives out batches of a source's images; a :class:`dlo_framework.data.BatchDataset`.

    Args:
        source: the image files and their classes.
        view: how an image becomes one of a batch.
        on_corrupt: "raise", or "skip": in training another image takes the place (which one follows from the
            draw's seed, so it is the same with any number of workers and ranks), in evaluation the sample is
            left out of its batch. Both are counted.
        training: which of these two.
        rank: this process's place among the ranks, for messages.
        slots: number of processes that may count corrupt images: the workers and the main process.
    """

    def __init__(
        self,
        source: ImageSource,
        view: View,
        *,
        on_corrupt: Literal["raise", "skip"],
        training: bool,
        rank: int = 0,
        slots: int = 1,
    ) -> None:
        self.source = source
        self.view = view
        self.on_corrupt = on_corrupt
        self.training = training
        self.rank = rank
        # One slot a process, in shared memory: counting needs no lock, and workers' counts reach the trainer.
        self._corrupt = torch.zeros(slots, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def corrupt_images(self) -> int:
        """How many times a corrupt image was met on this rank, over all its workers."""
        return int(self._corrupt.sum())

    def fetch(self, draws: list[Draw]) -> tuple[torch.Tensor, torch.Tensor] | CountedBatch:
        """Returns uint8 images [B, 3, height, width] in channels-last memory, and int64 targets [B].

        Where evaluation leaves corrupt images out, B is smaller than the number of draws; where all of them are
        corrupt, a black image of class 0 stands in for none.
        """
        if get_worker_info() is not None:
            _one_thread()
        height, width = draws[0].size or (self.view.size, self.view.size)
        images = torch.empty(len(draws), height, width, 3, dtype=torch.uint8)
        numbers = random_numbers([draw.seed for draw in draws])
        labels = [self._load(draw, numbers[place], images[place]) for place, draw in enumerate(draws)]
        kept = [place for place, label in enumerate(labels) if label is not None]
        if len(kept) < len(draws):
            rows = kept or [0]
            targets = torch.tensor([labels[place] or 0 for place in rows])
            return CountedBatch((images[rows].permute(0, 3, 1, 2), targets), len(kept))
        return images.permute(0, 3, 1, 2), torch.tensor(labels)

    def _load(self, draw: Draw, numbers: np.ndarray, out: torch.Tensor) -> int | None:
        """Writes one image into ``out`` and returns its class, or None where evaluation skips it."""
        index = draw.index
        for attempt in range(_REPLACEMENTS):
            try:
                self.view.render(self._read(index), draw, numbers, out)
                return int(self.source.labels[index])
            except CorruptImage as error:
                if self.on_corrupt == "raise":
                    raise CorruptImage(
                        f"corrupt image {self.source.name(index)} (index {index}, rank {self.rank}): {error}; "
                        "set on_corrupt=skip"
                    ) from error
                worker = get_worker_info()
                self._corrupt[0 if worker is None else worker.id + 1] += 1
                if not self.training:
                    out.zero_()
                    return None
                index = int(hash64(np.array([draw.seed]), attempt)[0] % np.uint64(len(self.source)))
        raise DloError(
            f"{_REPLACEMENTS} corrupt images in a row, the last one {self.source.name(index)}; "
            "check that the data are images at all"
        )

    def _read(self, index: int) -> bytes:
        try:
            return self.source.read(index)
        except OSError as error:
            raise CorruptImage(f"cannot be read: {error.strerror or error}") from error


def _one_thread() -> None:
    """Keeps a worker to one core: OpenCV would start as many threads in each as the machine has cores."""
    try:
        import cv2
    except ImportError:
        return
    if cv2.getNumThreads() > 1:
        cv2.setNumThreads(1)
