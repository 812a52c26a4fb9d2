"""Decoding on the device: its geometry is the CPU path's. The device is a CPU here; nvJPEG is not tested."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from dlo_framework.data import Draw
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.augment import random_numbers
from dlo_tasks.imagenet.decode import Box, CorruptImageError
from dlo_tasks.imagenet.folder import ImageFolderData
from dlo_tasks.imagenet.folder_dataset import (
    EncodedImage,
    EncodedImages,
    check_device_decoding,
    encode_view,
    faster_decoder,
    measure_decoders,
    resize_crop,
)


def picture(number: int, kind: str = "jpeg", mode: str = "RGB") -> bytes:
    """Returns an image with a smooth gradient and sharp squares, whose place a wrong crop changes."""
    rows, columns = np.mgrid[0 : 90 + number, 0:120]
    pixels = np.stack([rows * 2 % 256, columns * 2 % 256, (rows // 16 + columns // 16) % 2 * 120], 2).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(content, kind, **({"quality": 98} if kind == "jpeg" else {}))
    return content.getvalue()


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        for number in range(12):
            folder = tmp_path / split / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            kind, mode = {3: ("png", "RGB"), 5: ("jpeg", "CMYK"), 7: ("jpeg", "L")}.get(number, ("jpeg", "RGB"))
            (folder / f"{number:02}.{'png' if kind == 'png' else 'jpg'}").write_bytes(picture(number, kind, mode))
    return tmp_path


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [16, 64])
def test_views_of_both_paths_are_the_same_within_rounding(root, interpolation, size):
    data = ImageFolderData(
        str(root), image_size=size, batch_size=12, num_workers=0, interpolation=interpolation, scale=(0.3, 1.0)
    )
    dataset = data._dataset("train", "train", data._train_view)
    draws = [Draw(index, seed, True) for index in range(12) for seed in (5 * index, 5 * index + 1)]
    images, targets = dataset.fetch(draws)
    dataset.encoded = True
    encoded, same = dataset.fetch(draws)
    assert isinstance(encoded, EncodedImages)
    assert len(encoded) == 24
    assert torch.equal(targets, same)
    decoded = encoded.decode(torch.device("cpu"))
    assert decoded.shape == images.shape
    assert decoded.is_contiguous(memory_format=torch.channels_last)
    difference = (decoded.int() - images.int()).abs().float()
    # At the small size the CPU decodes at a reduced scale, which moves edges by fractions of a pixel.
    assert difference.mean() < (6 if size == 16 else 4)
    wrong = (decoded.flip(3).int() - images.int()).abs().float()
    assert wrong.mean() > 20
    normalised = data.on_after_batch_transfer((encoded, same), 0)[0]
    assert torch.allclose(normalised, data.on_after_batch_transfer((decoded, same), 0)[0])


def test_the_crop_is_that_of_pillow():
    pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(picture(0))))).permute(2, 0, 1)
    box = Box(10, 20, 60, 50)
    ours = resize_crop(pixels, box, (24, 30), "bilinear", flip=True)
    theirs = Image.open(io.BytesIO(picture(0))).resize((30, 24), Image.Resampling.BILINEAR, box=(20, 10, 70, 70))
    assert (ours.flip(2).permute(1, 2, 0).int() - torch.from_numpy(np.array(theirs)).int()).abs().max() <= 1


def test_a_broken_file_falls_back_to_pillow_and_says_so(root):
    data = ImageFolderData(str(root), image_size=16, batch_size=4, num_workers=0)
    numbers = random_numbers([3])[0]
    good = encode_view(data._train_view, picture(0), numbers, (16, 16))
    broken = bytearray(picture(0))
    start = broken.index(b"\xff\xda") + 20
    broken[start : start + 200] = bytes(200)
    del broken[start + 200 : -2]
    bad = EncodedImage(torch.frombuffer(broken, dtype=torch.uint8), good.box, False)
    images = EncodedImages([good, bad], (16, 16), "bilinear")
    try:
        decoded = images.decode(torch.device("cpu"))
    except CorruptImageError:
        with pytest.raises(CorruptImageError, match="set decode: cpu, which names it"):
            data.on_after_batch_transfer((images, torch.zeros(2)), 0)
    else:
        alone = EncodedImages([good], (16, 16), "bilinear").decode(torch.device("cpu"))
        assert torch.equal(decoded[0], alone[0])
    garbage = EncodedImage(torch.zeros(50, dtype=torch.uint8), good.box, False)
    with pytest.raises(CorruptImageError, match="set decode: cpu, which names it"):
        data.on_after_batch_transfer((EncodedImages([garbage], (16, 16), "bilinear"), torch.zeros(1)), 0)


def test_the_faster_way_is_chosen(root):
    import time

    def slow() -> int:
        time.sleep(0.02)
        return 1

    def fast() -> int:
        time.sleep(0.002)
        return 1

    assert faster_decoder(slow, fast, 1, 0.1) == "gpu"
    assert faster_decoder(fast, slow, 1, 0.1) == "cpu"
    assert faster_decoder(slow, fast, 100, 0.1) == "cpu"
    data = ImageFolderData(str(root), image_size=16, batch_size=4, num_workers=0)
    dataset = data._dataset("train", "train", data._train_view)
    assert measure_decoders(dataset, torch.device("cpu"), 10**6, 0.05) == "cpu"
    assert not dataset.encoded


def test_the_gpu_is_refused_where_it_cannot_work(root):
    with pytest.raises(DloError, match="decode must be cpu with rand_augment, three_augment"):
        ImageFolderData(str(root), decode="gpu", color_jitter=0.3)
    data = ImageFolderData(str(root), image_size=16, batch_size=4, num_workers=0, decode="gpu")
    with pytest.raises(DloError, match="decode must be cpu or auto on cpu, got gpu, which needs CUDA"):
        data.train_dataloader()
    with pytest.raises(DloError, match="which needs CUDA"):
        check_device_decoding(torch.device("cpu"))
    auto = ImageFolderData(str(root), image_size=16, batch_size=4, num_workers=0, decode="auto")
    assert len(list(auto.train_dataloader())) == 3


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_large_images_are_made_small_in_two_passes(monkeypatch, interpolation) -> None:
    """torch's kernel for CUDA refuses larger ratios of sizes, for want of shared memory."""
    pixels = (torch.arange(700)[None, :, None] % 256 + torch.zeros(3, 1, 900)).to(torch.uint8)
    box, size = Box(0, 0, 700, 900), (8, 16)
    crop = pixels[None].float()
    at_once = torch.nn.functional.interpolate(crop, size, mode=interpolation, antialias=True)[0]
    ratios, plain = [], torch.nn.functional.interpolate

    def interpolate(x, wanted, **options):
        ratios.append(max(have / want for have, want in zip(x.shape[2:], wanted, strict=True)))
        return plain(x, wanted, **options)

    monkeypatch.setattr("torch.nn.functional.interpolate", interpolate)
    found = resize_crop(pixels, box, size, interpolation, False)
    assert len(ratios) == 1
    assert 16 < ratios[0] <= 32
    assert float((found.float() - at_once).abs().mean()) < 2
