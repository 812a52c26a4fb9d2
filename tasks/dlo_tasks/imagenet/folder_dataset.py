"""Dataset that decodes, crops and distorts the images of a source into batches."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dlo_framework.data import CountedBatch, Draw, hash64
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.augment import Transform, random_numbers, random_resized_box
from dlo_tasks.imagenet.decode import Box, CorruptImageError, decode_crop, resize_into
from dlo_tasks.imagenet.folder_sources import ImageSource

_REPLACEMENTS = 100  # corrupt samples in a row at which a run stops: the data are wrong


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


class ImageDataset:
    """Dataset of a source's images in batches; a :class:`dlo_framework.data.BatchDataset`.

    Args:
        source: Image files and their classes.
        view: View that renders each image.
        on_corrupt: Reaction to a corrupt image: "raise", or "skip", which in training replaces it by another image
            (determined by the draw's seed, so the same for any number of workers and ranks), and in evaluation leaves
            it out of its batch. Both are counted.
        training: Whether the dataset is for training, not for evaluation.
        rank: Rank of this process, for messages.
        slots: Number of processes that may count corrupt images: the workers and the main process.
        batches_ahead: Number of batches whose images are fetched ahead; 0 for none, as for files on a disk.
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
        batches_ahead: int = 0,
    ) -> None:
        self.source = source
        self.batches_ahead = batches_ahead
        self.view = view
        self.on_corrupt = on_corrupt
        self.training = training
        self.rank = rank
        # One slot per process, in shared memory: counting needs no lock, and the trainer sees the workers' counts.
        self._corrupt = torch.zeros(slots, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def corrupt_images(self) -> int:
        """Number of times that a corrupt image was read on this rank, over all its workers."""
        return int(self._corrupt.sum())

    def read_ahead(self, draws: list[Draw]) -> None:
        """Begins to fetch the drawn images, if their source is a stream."""
        fetch = getattr(self.source, "read_ahead", None)
        if fetch is not None:
            fetch([draw.index for draw in draws])

    def fetch(self, draws: list[Draw]) -> tuple[torch.Tensor, torch.Tensor] | CountedBatch:
        """Returns uint8 images [B, 3, height, width] in channels-last memory, and int64 targets [B].

        If evaluation leaves corrupt images out, B is smaller than the number of draws; if all of them are corrupt, the
        batch has one black placeholder image of class 0 that counts as none.
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
        """Writes one image into ``out`` and returns its class, or None if evaluation skips it."""
        index = draw.index
        for attempt in range(_REPLACEMENTS):
            try:
                self.view.render(self._read(index), draw, numbers, out)
                return int(self.source.labels[index])
            except CorruptImageError as error:
                if self.on_corrupt == "raise":
                    raise CorruptImageError(
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
            f"the data must be readable images, got {_REPLACEMENTS} corrupt ones in a row, the last one"
            f" {self.source.name(index)}; check the files"
        )

    def _read(self, index: int) -> bytes:
        try:
            return self.source.read(index)
        except OSError as error:
            raise CorruptImageError(f"cannot be read: {error.strerror or error}") from error


def _one_thread() -> None:
    """Restricts a worker to one core: OpenCV would start as many threads in each as the machine has cores."""
    try:
        import cv2
    except ImportError:
        return
    if cv2.getNumThreads() > 1:
        cv2.setNumThreads(1)
