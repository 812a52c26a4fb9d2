"""Decodes JPEGs on the training device: workers choose crops and pass the files' bytes, the device makes the images.

On CUDA, ``torchvision.io.decode_jpeg`` decodes a list of files with nvJPEG. A crop's place is chosen from the size in
the file's header by the same code and the same random numbers as on the CPU, so that both paths make the same views;
pixels differ by the decoders' rounding, and because the CPU path may decode at a reduced scale. This module runs on a
CPU too, where its geometry is tested against the CPU path; nvJPEG itself has not run with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from dlo_framework.errors import DloError
from dlo_tasks.imagenet.augment import TrainView, random_resized_box
from dlo_tasks.imagenet.decode import Box, decode_pil, read_jpeg_header, resize_into

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
        found = []
        for file in files:
            try:
                found.append(decode_jpeg(file, mode=ImageReadMode.RGB, device=device))
            except RuntimeError:
                pixels = decode_pil(file.numpy().tobytes())
                found.append(torch.from_numpy(pixels).permute(2, 0, 1).to(device))
        return found


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
