"""Dataset that decodes, crops and distorts the images of a source into batches, in the workers or on the device.

On CUDA, ``torchvision.io.decode_jpeg`` decodes a list of files with nvJPEG. A crop's place is chosen from the size in
the file's header by the same code and the same random numbers as on the CPU, so that both paths make the same views;
pixels differ by the decoders' rounding, and because the CPU path may decode at a reduced scale. The device path runs on
a CPU too, where its geometry is tested against the CPU path; nvJPEG itself has not run with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import get_worker_info

from dlo_framework.data import CountedBatch, Draw, hash64
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.augment import TrainView, View, random_numbers, random_resized_box
from dlo_tasks.imagenet.decode import Box, CorruptImageError, decode_pil, read_jpeg_header, resize_into
from dlo_tasks.imagenet.image_sources import ImageSource

_REPLACEMENTS = 100  # corrupt samples in a row at which a run stops: the data are wrong


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

    Attributes:
        encoded: Whether to return training images encoded, for decoding on the device; ``view`` is then a
            :class:`dlo_tasks.imagenet.augment.TrainView` without distortions.
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
        self.batches_ahead, self.encoded = batches_ahead, False
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
        self.source.read_ahead([draw.index for draw in draws])

    def fetch(self, draws: list[Draw]) -> tuple[torch.Tensor | EncodedImages, torch.Tensor] | CountedBatch:
        """Returns uint8 images [B, 3, height, width] in channels-last memory, and int64 targets [B].

        If evaluation leaves corrupt images out, B is smaller than the number of draws; if all of them are corrupt, the
        batch has one black placeholder image of class 0 that counts as none.
        """
        if get_worker_info() is not None:
            _one_thread()
        height, width = draws[0].size or (self.view.size, self.view.size)
        numbers = random_numbers([draw.seed for draw in draws])
        if self.encoded:
            return self._fetch_encoded(draws, numbers, (height, width))
        images = torch.empty(len(draws), height, width, 3, dtype=torch.uint8)
        labels = [
            self._load(draw, partial(self.view.render, draw=draw, numbers=numbers[place], out=images[place]))
            for place, draw in enumerate(draws)
        ]
        for place, label in enumerate(labels):
            if label is None:
                images[place] = 0
        kept = [place for place, label in enumerate(labels) if label is not None]
        if len(kept) < len(draws):
            rows = kept or [0]
            targets = torch.tensor([labels[place] or 0 for place in rows])
            return CountedBatch((images[rows].permute(0, 3, 1, 2), targets), len(kept))
        return images.permute(0, 3, 1, 2), torch.tensor(labels)

    def _fetch_encoded(
        self, draws: list[Draw], numbers: np.ndarray, size: tuple[int, int]
    ) -> tuple[EncodedImages, torch.Tensor]:
        assert isinstance(self.view, TrainView)
        images: list[EncodedImage] = []
        labels = []
        for place, draw in enumerate(draws):
            encode = partial(encode_view, self.view, numbers=numbers[place], size=size)
            labels.append(self._load(draw, lambda data, encode=encode: images.append(encode(data))))  # type: ignore[misc]
        return EncodedImages(images, size, self.view.interpolation), torch.tensor(labels)

    def _load(self, draw: Draw, make: Callable[[bytes], object]) -> int | None:
        """Calls ``make`` with the bytes of one image and returns its class, or None if evaluation skips it."""
        index = draw.index
        for attempt in range(_REPLACEMENTS):
            try:
                make(self._read(index))
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


_BATCH = 64


def measure_decoders(dataset: ImageDataset, device: torch.device, workers: int, seconds: float = 30.0) -> str:
    """Returns the faster way to make a dataset's training images on this machine: ``cpu`` or ``gpu``.

    Args:
        dataset: Training images.
        device: Device that decodes, under ``gpu``.
        workers: Number of loading processes.
        seconds: Time of each of the two measurements.
    """
    draws = [Draw(number * 7919 % len(dataset), number, True) for number in range(_BATCH)]
    threads, was_encoded = torch.get_num_threads(), dataset.encoded

    def on_cpu() -> int:
        dataset.encoded = False
        dataset.fetch(draws)
        return _BATCH

    def on_device() -> int:
        dataset.encoded = True
        images = dataset.fetch(draws)[0]
        assert isinstance(images, EncodedImages)
        images.decode(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return _BATCH

    try:
        torch.set_num_threads(1)  # as in a worker
        return faster_decoder(on_cpu, on_device, workers, seconds)
    finally:
        torch.set_num_threads(threads)
        dataset.encoded = was_encoded


def faster_decoder(cpu: Callable[[], int], gpu: Callable[[], int], workers: int, seconds: float = 30.0) -> str:
    """Measures both ways to make training images, and returns the faster one: ``cpu`` or ``gpu``.

    Args:
        cpu: Function that makes a batch on one core, and returns its number of images.
        gpu: The same on the device; it waits for the device.
        workers: Number of loading processes, which multiply the rate of the CPU.
        seconds: Time of each measurement.
    """
    rates = {}
    for name, run, times in (("cpu", cpu, max(1, workers)), ("gpu", gpu, 1)):
        run()  # warms up
        images, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            images += run()
        rates[name] = times * images / (time.perf_counter() - begin)
    return max(rates, key=lambda name: rates[name])


# --- decoding on the device ---------------------------------------------------------------------------------------

#: Largest ratio of sizes that torch (2.11 to 2.15) is to resize with antialiasing at once. Its kernel for CUDA keeps
#: weights in shared memory, whose 48 KB suffice for ratios up to 47 with the bicubic filter, and raises above.
_LARGEST_RATIO = 32


class EncodedImage(NamedTuple):
    """One view of an image that is not decoded yet, or that the worker had to make.

    Attributes:
        content: Bytes of a JPEG file, uint8 [n]; or the finished view, uint8 [H, W, 3].
        box: Crop; None for a finished view.
        flip: Whether to flip it horizontally; a finished view is flipped already.
    """

    content: torch.Tensor
    box: Box | None
    flip: bool


class EncodedImages:
    """Views of a batch. It is not a collection, so that Lightning does not move its parts to the device one by one.

    Args:
        images: Views.
        size: Height and width of the views.
        interpolation: Resampling filter, "bilinear" or "bicubic".
    """

    def __init__(self, images: list[EncodedImage], size: tuple[int, int], interpolation: str) -> None:
        self.images, self.size, self.interpolation = images, size, interpolation

    def __len__(self) -> int:
        return len(self.images)

    def decode(self, device: torch.device) -> torch.Tensor:
        """Returns the views on a device, uint8 [B, 3, H, W] in channels-last memory."""
        height, width = self.size
        out = torch.empty(len(self), height, width, 3, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        files = [number for number, image in enumerate(self.images) if image.box is not None]
        decoded = decode_files([self.images[number].content for number in files], device)
        for number, pixels in zip(files, decoded, strict=True):
            image = self.images[number]
            assert image.box is not None
            out[number] = resize_crop(pixels, image.box, self.size, self.interpolation, image.flip)
        for number, image in enumerate(self.images):
            if image.box is None:
                out[number] = image.content.to(device, non_blocking=True).permute(2, 0, 1)
        return out


def encode_view(view: TrainView, data: bytes, numbers: np.ndarray, size: tuple[int, int]) -> EncodedImage:
    """Returns a random view of an image, without decoding a JPEG of three components or one.

    Args:
        view: View, which chooses the crop.
        data: Bytes of the image file.
        numbers: Random numbers of the draw.
        size: Height and width of the view.

    Raises:
        CorruptImageError: If the image is not a JPEG, and cannot be decoded.
    """
    flip = bool(numbers[22] < view.flip)
    header = read_jpeg_header(data)
    if header is not None and header.components in (1, 3):
        box = random_resized_box(header.height, header.width, numbers, view.scale, view.ratio)
        return EncodedImage(torch.frombuffer(bytearray(data), dtype=torch.uint8), box, flip)
    pixels = decode_pil(data)
    out = torch.empty(*size, 3, dtype=torch.uint8)
    height, width = pixels.shape[:2]
    box = random_resized_box(height, width, numbers, view.scale, view.ratio)
    resize_into(out, pixels, box, view.interpolation, flip)
    return EncodedImage(out, None, False)


def resize_crop(pixels: torch.Tensor, box: Box, size: tuple[int, int], interpolation: str, flip: bool) -> torch.Tensor:
    """Returns a crop of an image, resized with antialiasing, uint8 [3, H, W].

    Args:
        pixels: Image, uint8 [3, h, w], on any device.
        box: Crop.
        size: Height and width of the result.
        interpolation: Resampling filter, "bilinear" or "bicubic".
        flip: Whether to flip it horizontally.
    """
    crop = pixels[None, :, box.top : box.top + box.height, box.left : box.left + box.width].float()
    reduced = [-(-have // (_LARGEST_RATIO * want)) for have, want in zip(crop.shape[2:], size, strict=True)]
    if max(reduced) > 1:
        crop = F.avg_pool2d(crop, reduced, ceil_mode=True)
    resized = F.interpolate(crop, size, mode=interpolation, antialias=True)[0]
    resized = resized.round_().clamp_(0, 255).to(torch.uint8)
    return resized.flip(2) if flip else resized


def decode_files(files: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns JPEG files decoded on a device, each uint8 [3, h, w]; one that it refuses is decoded by Pillow.

    Raises:
        CorruptImageError: If Pillow refuses it too.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    if not files:
        return []
    try:
        return list(decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device))
    except RuntimeError:  # One of them is broken: find it.
        images = []
        for file in files:
            try:
                images.append(decode_jpeg(file, mode=ImageReadMode.RGB, device=device))
            except RuntimeError:
                pixels = decode_pil(file.numpy().tobytes())
                images.append(torch.from_numpy(pixels).permute(2, 0, 1).to(device))
        return images


def check_device_decoding(device: torch.device) -> None:
    """Raises DloError if torchvision cannot decode JPEGs on a device."""
    from torchvision.io import decode_jpeg

    if device.type != "cuda":
        raise DloError(f"decode must be cpu or auto on {device.type}, got gpu, which needs CUDA; set decode: auto")
    try:
        decode_jpeg(torch.frombuffer(bytearray(_tiny_jpeg()), dtype=torch.uint8), device=device)
    except RuntimeError as error:
        raise DloError(
            f"decode must be cpu or auto with this torchvision, got gpu: {str(error).splitlines()[0]}; install a build"
            " with nvJPEG"
        ) from error


def _tiny_jpeg() -> bytes:
    import io

    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (16, 16)).save(content, "jpeg")
    return content.getvalue()
