"""The fast decoder gives Pillow's pixels within a stated tolerance, and Pillow's verdict on odd files."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from dlo_tasks.imagenet import decode
from dlo_tasks.imagenet.decode import Box, CorruptImageError, decode_crop, read_jpeg_header, resize_into

PHOTOS = [Image.fromarray(photo) for photo in load_sample_images().images]  # 640 x 427
WHOLE = lambda h, w: Box(0, 0, h, w)
BOXES = [
    Box(10, 20, 150, 180),  # enlarged
    Box(0, 100, 240, 200),  # reduced in height alone
    Box(13, 57, 300, 333),
    Box(0, 0, 427, 640),
]


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}) | options)
    return buffer.getvalue()


def crop(data: bytes, box: Box, size: int, *, exact: bool = False, interpolation: str = "bilinear") -> np.ndarray:
    out = torch.empty(size, size, 3, dtype=torch.uint8)
    resize_into(out, *decode_crop(data, lambda h, w: box, size, exact), interpolation)
    return out.numpy().astype(int)


def pillow(data: bytes, box: Box, size: int, interpolation: int = Image.BILINEAR) -> np.ndarray:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return np.asarray(image.resize((size, size), interpolation)).astype(int)


@pytest.fixture(params=["fast", "without simplejpeg", "without OpenCV"])
def libraries(request, monkeypatch) -> str:
    if request.param == "without simplejpeg":
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    if request.param == "without OpenCV":
        monkeypatch.setattr(decode, "_cv2", lambda: None)
    return request.param


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("photo", PHOTOS)
@pytest.mark.parametrize("subsampling", [0, 2])
def test_training_crops_are_pillows_within_tolerance(libraries, photo, box: Box, subsampling: int) -> None:
    """The stated tolerance, on levels 0..255: 2 on average, 10 for 99% of the values."""
    data = encode(photo, subsampling=subsampling)
    difference = np.abs(crop(data, box, 224) - pillow(data, box, 224))
    assert difference.mean() <= 2
    assert np.percentile(difference, 99) <= 10


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_crops_are_pillows_to_one_level(libraries, box: Box, interpolation: str) -> None:
    data = encode(PHOTOS[0], subsampling=2)
    ours = crop(data, box, 224, exact=True, interpolation=interpolation)
    theirs = pillow(data, box, 224, Image.BILINEAR if interpolation == "bilinear" else Image.BICUBIC)
    assert np.abs(ours - theirs).max() <= (2 if interpolation == "bilinear" else 12)
    assert np.abs(ours - theirs).mean() <= 0.2


@pytest.mark.parametrize(("size", "scale"), [(100, 4), (200, 2), (50, 8)])
def test_large_crops_are_reduced_by_the_decoder(size: int, scale: int) -> None:
    data, box = encode(PHOTOS[0], subsampling=2), Box(8, 16, 408, 608)
    pixels, inside = decode_crop(data, lambda h, w: box, size, exact=False)
    assert pixels.shape[1] == -(-640 // scale)
    assert inside.height >= size
    difference = np.abs(crop(data, box, size) - pillow(data, box, size))
    assert difference.mean() <= 4  # two reductions are a slightly different filter than one
    full, _ = decode_crop(data, lambda h, w: box, size, exact=True)
    assert full.shape[1] == 640


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 4}, {"optimize": True}])
def test_other_codings_of_a_jpeg(options: dict) -> None:
    data = encode(PHOTOS[0], **options)
    assert read_jpeg_header(data).can_stop_early == ("progressive" not in options)
    difference = np.abs(crop(data, BOXES[2], 224) - pillow(data, BOXES[2], 224))
    assert difference.mean() <= 2


def odd_images() -> dict[str, bytes]:
    photo = PHOTOS[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees"
    alpha = photo.copy()
    alpha.putalpha(Image.linear_gradient("L").resize(photo.size))
    deep = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
    return {
        "cmyk jpeg": encode(photo.convert("CMYK")),
        "grey jpeg": encode(photo.convert("L")),
        "rotated by exif": encode(photo, exif=exif),
        "palette png": encode(photo.quantize(64), "PNG"),
        "palette png with transparency": encode(photo.quantize(64), "PNG", transparency=3),
        "rgba png": encode(alpha, "PNG"),
        "grey and alpha png": encode(alpha.convert("LA"), "PNG"),
        "16 bit png": encode(deep, "PNG"),
        "black and white png": encode(photo.convert("1"), "PNG"),
        "webp": encode(photo, "WEBP"),
        "bmp": encode(photo, "BMP"),
    }


ODD = odd_images()


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_are_read_as_imagefolder_reads_them(libraries, kind: str) -> None:
    data = ODD[kind]
    pixels, box = decode_crop(data, WHOLE, 224, exact=True)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert pixels.shape == expected.shape == (427, 640, 3)
    assert box == Box(0, 0, 427, 640)
    assert np.abs(pixels.astype(int) - expected).max() <= 3  # decoders may round the cosine transform otherwise


def bomb_png() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def bomb_jpeg() -> bytes:
    data = bytearray(encode(PHOTOS[0]))
    at = read_jpeg_header(bytes(data)).height_at
    data[at : at + 4] = (65_000).to_bytes(2, "big") * 2
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(PHOTOS[0])[:20_000], "truncated"),
        (encode(PHOTOS[0], "PNG")[:20_000], "truncated"),
        (encode(PHOTOS[0])[:300], "truncated|not an image|cannot|broken"),
        (b"", "empty file"),
        (b"<html>404</html>", "not an image"),
        (b"\xff\xd8\xff\xd9", "not an image"),
        (bomb_png(), "decompression bomb"),
        (bomb_jpeg(), "decompression bomb"),
    ],
    ids=["jpeg cut", "png cut", "jpeg header", "empty", "html", "no frame", "png bomb", "jpeg bomb"],
)
def test_corrupt_files_are_named_so(libraries, data: bytes, reason: str) -> None:
    with pytest.raises(CorruptImageError, match=reason):
        decode_crop(data, WHOLE, 224, exact=False)


def test_any_cut_of_a_file_is_either_refused_or_as_large_as_it_says() -> None:
    data = encode(PHOTOS[0].resize((64, 48)))
    for length in range(0, len(data), 7):
        try:
            pixels, _ = decode_crop(data[:length], WHOLE, 32, exact=True)
        except CorruptImageError:
            continue
        assert pixels.shape == (48, 64, 3)
