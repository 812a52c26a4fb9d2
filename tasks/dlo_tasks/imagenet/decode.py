"""From the bytes of an image file to a resized crop, fast and antialiased.

JPEG is decoded by simplejpeg (libjpeg-turbo) and reduced by torch's antialiased interpolation, whose
arithmetic is Pillow's: the same pixels as ``PIL.Image.crop().resize()`` to within one level. What makes it fast:

* the crop is chosen before decoding, from the size in the header, and rows below it are not decoded;
* where the crop is at least twice as large as the result, the decoder's own scaling by 1/2, 1/4 or 1/8 does
  the first part of the reduction;
* in training, chroma is upsampled and the cosine transform computed the fast way (``exact=False``).

Everything else (PNG, WebP, BMP, CMYK JPEG, a JPEG that the fast decoder dislikes) goes to Pillow, as it does in
torchvision's ``ImageFolder``: ``convert("RGB")``, EXIF orientation ignored. So Pillow has the last word on
what is corrupt. Without simplejpeg, torchvision decodes; without OpenCV, torch enlarges.
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

_SCALES = (8, 4, 2)  # the reductions that libjpeg-turbo computes with vector instructions
_SINGLE_SCAN_HUFFMAN = (0xC0, 0xC1)  # baseline and extended sequential frames


class CorruptImage(DloError):
    """An image file that no decoder can read, or one that claims to be too large to be harmless."""


class Box(NamedTuple):
    """A crop of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


ChooseBox = Callable[[int, int], Box]
"""Chooses the crop of an image of (height, width) pixels."""


class JpegHeader(NamedTuple):
    """What the markers before a JPEG's first scan say.

    Attributes:
        height: in pixels.
        width: in pixels.
        components: 1 grey, 3 colour, 4 CMYK.
        height_at: where in the file the two bytes of the height stand.
        rows_per_unit: height in pixels of a row of coding units.
        can_stop_early: whether the pixels follow one another from top to bottom in a single scan.
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
    """Returns the header of a whole JPEG file that is safe to decode fast; None leaves the file to Pillow.

    None is returned for anything unusual: not a JPEG, no end-of-image marker after the first scan (truncated),
    more than 8 bits, a height that only the end of the file tells.
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
    """Returns an image's (height, width) from the beginning of its file, None where that does not tell it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # decoding will refuse it
            with Image.open(io.BytesIO(head)) as image:  # which reads no pixels
                return image.height, image.width
    except Exception:  # Pillow's plug-ins raise nearly anything on a broken file
        return None


def _check_pixels(height: int, width: int) -> None:
    """Refuses a decompression bomb before any of it is decoded, by Pillow's limit (89 million pixels)."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:
        raise CorruptImage(f"{width} x {height} pixels are more than the limit of {limit} (decompression bomb?)")


def _stop_after(data: bytes, header: JpegHeader, bottom: int, smooth: bool) -> bytes | bytearray:
    """Returns the JPEG with its height reduced to the rows down to ``bottom``, so that decoding stops there.

    One row of coding units more is kept for ``smooth`` chroma upsampling, which looks at the row below.
    """
    unit = header.rows_per_unit
    rows = -(-bottom // unit) * unit + (unit if smooth else 0)
    if not header.can_stop_early or rows >= header.height:
        return data
    shortened = bytearray(data)
    shortened[header.height_at : header.height_at + 2] = rows.to_bytes(2, "big")
    return shortened


def _decode_jpeg(data: bytes, header: JpegHeader, box: Box, size: int, exact: bool) -> tuple[np.ndarray, Box]:
    """Returns the pixels down to the box's bottom, uint8 [h, w, 3], and where the box lies in them."""
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
    # Not strict: the scan goes on after the last row that is wanted, which libjpeg warns about.
    pixels = simplejpeg.decode_jpeg(shortened, colorspace="RGB", strict=False, **options)
    if scale == 1:
        return pixels, box
    top, left = round(box.top / scale), round(box.left / scale)
    height = min(round(box.height / scale), pixels.shape[0] - top)
    width = min(round(box.width / scale), pixels.shape[1] - left)
    return pixels, Box(top, left, height, width)


def _decode_jpeg_torchvision(data: bytes) -> np.ndarray:
    """Returns a whole JPEG as uint8 [h, w, 3]."""
    from torchvision.io import ImageReadMode, decode_jpeg

    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return decode_jpeg(encoded, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()


def decode_pil(data: bytes) -> np.ndarray:
    """Returns any image file as uint8 [h, w, 3], as torchvision's ImageFolder would load it.

    Raises:
        CorruptImage: with Pillow's reason; also for its warning about decompression bombs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                _check_pixels(image.height, image.width)
                return np.array(image.convert("RGB"))
    except CorruptImage:
        raise
    except Exception as error:  # Pillow's plug-ins raise nearly anything on a broken file
        reason = "truncated" if "truncated" in str(error).lower() else str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "empty file" if not data else "not an image, or of an unknown format"
        raise CorruptImage(reason) from error


def decode_crop(data: bytes, choose: ChooseBox, size: int, exact: bool) -> tuple[np.ndarray, Box]:
    """Decodes as much of an image as a crop needs.

    Args:
        data: the image file.
        choose: chooses the crop once the image's size is known.
        size: height and width that the crop will be resized to; the decoder may reduce towards it.
        exact: decode at full size with the accurate algorithms, for evaluation.

    Returns:
        uint8 pixels [h, w, 3], and the crop's place in them.

    Raises:
        CorruptImage: the message is the reason alone.
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
                return decode_pil(data), box  # which also knows the reason, if it cannot either
    pixels = decode_pil(data)
    return pixels, choose(*pixels.shape[:2])


def resize_into(
    out: torch.Tensor, pixels: np.ndarray, box: Box, interpolation: str = "bilinear", flip: bool = False
) -> None:
    """Writes a crop into ``out``, resized with antialiasing as Pillow does.

    Args:
        out: uint8 [height, width, 3], contiguous.
        pixels: uint8 [h, w, 3].
        box: the crop, inside ``pixels``.
        interpolation: "bilinear" or "bicubic".
        flip: whether left and right change places.
    """
    height, width = out.shape[:2]
    result = out.numpy()
    crop = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    cv2 = _cv2()
    if cv2 is not None and interpolation == "bilinear" and box.height <= height and box.width <= width:
        # Enlarging needs no antialiasing, and OpenCV's bilinear is then Pillow's.
        resized = cv2.resize(crop, (width, height), interpolation=cv2.INTER_LINEAR)
    else:
        # NumPy cuts the crop out, three times as fast as torch would inside. The batch dimension comes before
        # the permutation: so torch sees channels-last memory and takes its vector path.
        image = torch.from_numpy(np.ascontiguousarray(crop)).unsqueeze(0).permute(0, 3, 1, 2)
        reduced = F.interpolate(image, (height, width), mode=interpolation, antialias=True)
        resized = reduced.permute(0, 2, 3, 1)[0].numpy()
    if not flip:
        np.copyto(result, resized)
    elif cv2 is not None:
        cv2.flip(resized, 1, dst=result)
    else:
        out.copy_(torch.from_numpy(resized).flip(1))
