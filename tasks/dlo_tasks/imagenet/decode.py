"""Decoder from the bytes of an image file to a resized crop, fast and antialiased.

JPEG is decoded by simplejpeg (libjpeg-turbo) and reduced by torch's antialiased interpolation, whose
arithmetic is Pillow's: the same pixels as ``PIL.Image.crop().resize()`` to within one level. Reasons for its speed:

* the crop is chosen before decoding, from the size in the header, and rows below it are not decoded;
* if the crop is at least twice the size of the result, the decoder's own scaling by 1/2, 1/4 or 1/8 does
  the first part of the reduction;
* in training, the fast algorithms for chroma upsampling and the cosine transform are used (``exact=False``).

Everything else (PNG, WebP, BMP, CMYK JPEG, a JPEG that the fast decoder refuses) is decoded by Pillow, as in
torchvision's ``ImageFolder``: ``convert("RGB")``, EXIF orientation ignored. So Pillow decides which files are
corrupt. Without simplejpeg, torchvision decodes; without OpenCV, torch enlarges.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from dlo_framework.errors import DloError

_SCALES = (8, 4, 2)  # reductions for which libjpeg-turbo has vector instructions
_SINGLE_SCAN_HUFFMAN = (0xC0, 0xC1)  # baseline and extended sequential frames


class CorruptImageError(DloError):
    """Error for an image file that no decoder can read, or that exceeds the limit of pixels."""


class Box(NamedTuple):
    """Crop of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


ChooseBox = Callable[[int, int], Box]
"""Function from the (height, width) of an image in pixels to its crop."""


class JpegHeader(NamedTuple):
    """Content of the markers before a JPEG's first scan.

    Attributes:
        height: Height in pixels.
        width: Width in pixels.
        components: Number of components: 1 grey, 3 colour, 4 CMYK.
        height_at: Offset in the file of the two bytes of the height.
        rows_per_unit: Height in pixels of a row of coding units.
        can_stop_early: Whether the pixels are stored from top to bottom in a single scan.
    """

    height: int
    width: int
    components: int
    height_at: int
    rows_per_unit: int
    can_stop_early: bool


@cache
def _simplejpeg() -> ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


@cache
def _cv2() -> ModuleType | None:
    try:
        import cv2
    except ImportError:
        return None
    return cv2


def decoders() -> dict[str, bool]:
    """Returns which optional libraries of the fast path are installed."""
    return {"simplejpeg": _simplejpeg() is not None, "opencv": _cv2() is not None}


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """Returns the header of a complete JPEG file that the fast decoder can decode; None leaves the file to Pillow.

    It is None for anything unusual: not a JPEG, no end-of-image marker after the first scan (truncated), more than 8
    bits, a height that is only stored at the end of the file.
    """
    if data[:2] != b"\xff\xd8":
        return None
    at, frame, components = 2, b"", 0
    kind = height_at = 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame, kind, height_at = data[at + 4 : at + 2 + length], marker, at + 5
            if len(frame) < 6 or frame[0] != 8 or len(frame) < 6 + 3 * frame[5]:
                return None
            components = frame[5]
        if marker == 0xDA:
            break
        at += 2 + length
    else:
        return None
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    if not height or not width or data.rfind(b"\xff\xd9", at) < 0:
        return None
    sampling = max(frame[7 + 3 * i] & 15 for i in range(components)) if components else 0
    single_scan = at + 4 < len(data) and data[at + 4] == components
    return JpegHeader(
        height, width, components, height_at, 8 * max(1, sampling), single_scan and kind in _SINGLE_SCAN_HUFFMAN
    )


def read_size(head: bytes) -> tuple[int, int] | None:
    """Returns an image's (height, width) from the first bytes of its file; None if they do not contain it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # decoding will refuse it
            with Image.open(io.BytesIO(head)) as image:  # reads no pixels
                return image.height, image.width
    except Exception:  # Pillow's plug-ins raise nearly anything on a broken file
        return None


def _check_pixels(height: int, width: int) -> None:
    """Raises CorruptImage for a decompression bomb before decoding it, by Pillow's limit (89 million pixels)."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:
        raise CorruptImageError(
            f"the image must have at most {limit} pixels, got {width} x {height} (decompression bomb?)"
        )


def _stop_after(data: bytes, header: JpegHeader, bottom: int, smooth: bool) -> bytes | bytearray:
    """Returns the JPEG with its height reduced to the rows above ``bottom``, so that decoding stops there.

    One more row of coding units is kept for ``smooth`` chroma upsampling, which reads the row below.
    """
    unit = header.rows_per_unit
    rows = -(-bottom // unit) * unit + (unit if smooth else 0)
    if not header.can_stop_early or rows >= header.height:
        return data
    shortened = bytearray(data)
    shortened[header.height_at : header.height_at + 2] = rows.to_bytes(2, "big")
    return shortened


def _decode_jpeg(data: bytes, header: JpegHeader, box: Box, size: int, exact: bool) -> tuple[np.ndarray, Box]:
    """Returns the pixels down to the box's bottom, uint8 [h, w, 3], and the place of the box in them."""
    simplejpeg = _simplejpeg()
    assert simplejpeg is not None
    shortened = _stop_after(data, header, box.top + box.height, smooth=exact)
    scale = 1
    options: dict[str, int] = {}
    if not exact:
        scale = next((s for s in _SCALES if min(box.height, box.width) >= s * size), 1)
        options = {"fastdct": True, "fastupsample": True}
    if scale > 1:
        rows = int.from_bytes(shortened[header.height_at : header.height_at + 2], "big")
        options |= {"min_height": -(-rows // scale), "min_width": -(-header.width // scale), "min_factor": scale}
    # Not strict: the scan continues after the last wanted row, and libjpeg warns about that.
    pixels = simplejpeg.decode_jpeg(shortened, colorspace="RGB", strict=False, **options)
    if scale == 1:
        return pixels, box
    top, left = round(box.top / scale), round(box.left / scale)
    height = min(round(box.height / scale), pixels.shape[0] - top)
    width = min(round(box.width / scale), pixels.shape[1] - left)
    return pixels, Box(top, left, height, width)


def _decode_jpeg_torchvision(data: bytes) -> np.ndarray:
    """Returns a full JPEG as uint8 [h, w, 3]."""
    from torchvision.io import ImageReadMode, decode_jpeg

    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return decode_jpeg(encoded, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()


def decode_pil(data: bytes) -> np.ndarray:
    """Returns any image file as uint8 [h, w, 3], as torchvision's ImageFolder loads it.

    Raises:
        CorruptImage: With Pillow's reason; also for its warning about decompression bombs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                _check_pixels(image.height, image.width)
                return np.array(image.convert("RGB"))
    except CorruptImageError:
        raise
    except Exception as error:  # Pillow's plug-ins raise nearly anything on a broken file
        reason = "truncated" if "truncated" in str(error).lower() else str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "empty file" if not data else "not an image, or of an unknown format"
        raise CorruptImageError(reason) from error


def decode_crop(data: bytes, choose: ChooseBox, size: int, exact: bool) -> tuple[np.ndarray, Box]:
    """Decodes the rows of an image that a crop needs.

    Args:
        data: Bytes of the image file.
        choose: Function that chooses the crop from the image's size.
        size: Height and width that the crop will be resized to; the decoder may reduce towards it.
        exact: Whether to decode at full size with the accurate algorithms, for evaluation.

    Returns:
        Pixels, uint8 [h, w, 3], and the crop's place in them.

    Raises:
        CorruptImage: With only the reason as its message.
    """
    header = read_jpeg_header(data)
    if header is not None:
        _check_pixels(header.height, header.width)
        if header.components in (1, 3):
            box = choose(header.height, header.width)
            try:
                if _simplejpeg() is not None:
                    return _decode_jpeg(data, header, box, size, exact)
                return _decode_jpeg_torchvision(data), box
            except (ValueError, RuntimeError):
                return decode_pil(data), box  # it raises the reason if it fails too
    pixels = decode_pil(data)
    return pixels, choose(*pixels.shape[:2])


def resize_into(
    out: torch.Tensor, pixels: np.ndarray, box: Box, interpolation: str = "bilinear", flip: bool = False
) -> None:
    """Writes a crop into ``out``, resized with Pillow's antialiasing.

    Args:
        out: Resized crop, uint8 [height, width, 3], contiguous.
        pixels: Decoded pixels, uint8 [h, w, 3].
        box: Crop inside ``pixels``.
        interpolation: Resampling filter, "bilinear" or "bicubic".
        flip: Whether to flip horizontally.
    """
    height, width = out.shape[:2]
    result = out.numpy()
    crop = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    cv2 = _cv2()
    if cv2 is not None and interpolation == "bilinear" and box.height <= height and box.width <= width:
        # Enlarging needs no antialiasing, and OpenCV's bilinear is then Pillow's.
        resized = cv2.resize(crop, (width, height), interpolation=cv2.INTER_LINEAR)
    else:
        # NumPy copies the crop, three times as fast as torch would. The batch dimension is added before the
        # permutation, so that torch sees channels-last memory and takes its vector path.
        image = torch.from_numpy(np.ascontiguousarray(crop)).unsqueeze(0).permute(0, 3, 1, 2)
        reduced = F.interpolate(image, (height, width), mode=interpolation, antialias=True)
        resized = reduced.permute(0, 2, 3, 1)[0].numpy()
    if not flip:
        np.copyto(result, resized)
    elif cv2 is not None:
        cv2.flip(resized, 1, dst=result)
    else:
        out.copy_(torch.from_numpy(resized).flip(1))
