"""The sizes of a schedule, and the resizing of batches."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dlo_framework.data import Position
from dlo_framework.errors import DloError
from dlo_plugins.callbacks.progressive_resizing import (
    GrowingSize,
    StepSizes,
    images_of,
    replace_images,
    resize_images,
)
from dlo_plugins.callbacks.run_position import parse_position

SAMPLES = 1000  # of an epoch


def at(epochs: float) -> Position:
    epoch = int(epochs)
    return Position(epoch, round((epochs - epoch) * SAMPLES), SAMPLES)


def steps(sizes) -> StepSizes:
    return StepSizes({parse_position(point, "test"): size for point, size in sizes.items()})


def growth(start, end, begin, finish, multiple=32, stages=None) -> GrowingSize:
    return GrowingSize(start, end, parse_position(begin, "test"), parse_position(finish, "test"), multiple, stages)


def test_a_step_holds_from_its_point_on():
    schedule = steps({"73%": 192, 0: 160, "90000 samples": 224})
    sizes = [schedule.size_at(at(epochs), 100) for epochs in (0, 72.999, 73, 89.999, 90, 99.9)]
    assert sizes == [160, 160, 192, 192, 224, 224]
    assert schedule.all_sizes() == [160, 192, 224]
    assert schedule.final_size(SAMPLES, 100) == 224
    assert steps({0: 64, "1 epochs": 128, 2: 96}).final_size(SAMPLES, 3) == 96


def test_growth_is_ffcvs_between_its_points():
    """160 up to epoch 65, 192 from 76 of 88; between them linear, and rounded down to 8 here."""
    schedule = growth(160, 192, 65, 76, 8)
    expected = np.interp(np.arange(88), [65, 76], [160, 192]) // 8 * 8
    assert [schedule.size_at(at(epoch), 88) for epoch in range(88)] == expected.tolist()
    assert schedule.all_sizes() == [160, 168, 176, 184, 192]
    coarse = growth(160, 192, "65 epochs", "86.4%", 32)
    assert [coarse.size_at(at(epoch), 88) for epoch in (0, 70, 76, 76.1, 87)] == [160, 160, 160, 192, 192]


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.floats(0, 5),
    st.floats(0.01, 5),
    st.sampled_from([None, 2, 3, 5]),
    st.floats(0, 12),
)
def test_every_size_is_announced_and_between_the_ends(start, end, begin, length, stages, epochs):
    schedule = growth(start * 16, end * 16, f"{begin:.3f}", f"{begin + length:.3f}", 16, stages)
    size = schedule.size_at(at(epochs), 12)
    assert size in schedule.all_sizes()
    assert min(start, end) * 16 <= size <= max(start, end) * 16
    if epochs >= begin + length + 0.01:
        assert size == end * 16


# --- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (20, 12), (48, 80)])
def test_images_are_resized_as_pillow_does(size):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (2, 40, 60, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    reference = [Image.fromarray(each).resize(size[::-1], Image.Resampling.BILINEAR) for each in pixels]
    expected = torch.from_numpy(np.stack(reference)).permute(0, 3, 1, 2)
    assert (resize_images(images, *size).int() - expected.int()).abs().max() <= 1
    floats = resize_images(images.float(), *size)
    assert floats.shape == (2, 3, *size)
    torch.testing.assert_close(floats, expected.float(), atol=1.001, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8])
def test_dtype_and_memory_format_stay(dtype):
    images = torch.randint(0, 255, (2, 3, 24, 24)).to(dtype).contiguous(memory_format=torch.channels_last)
    before = images.clone()
    small = resize_images(images, 16, 16)
    assert small.dtype == dtype
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    assert resize_images(images, 24, 24) is images


class Pair(NamedTuple):
    image: torch.Tensor
    target: torch.Tensor


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "named tuple", "dict"])
def test_the_images_of_a_batch_are_found_and_replaced(kind):
    images, targets, other = torch.zeros(2, 3, 8, 8), torch.arange(2), torch.ones(2, 3, 4, 4)
    batch = {
        "tensor": images,
        "tuple": (images, targets),
        "list": [images, targets],
        "named tuple": Pair(images, targets),
        "dict": {"image": images, "target": targets},
    }[kind]
    assert images_of(batch, "image") is images
    changed = replace_images(batch, other, "image")
    assert type(changed) is type(batch)
    assert images_of(changed, "image") is other
    assert images_of(batch, "image") is images
    if kind != "tensor":
        assert (changed["target"] if kind == "dict" else changed[1]) is targets


@pytest.mark.parametrize("batch", [{"pixels": torch.zeros(2, 3, 8, 8)}, (torch.zeros(2, 8),), [], torch.zeros(3), None])
def test_a_batch_without_images_is_refused(batch):
    with pytest.raises(DloError, match="got none in"):
        images_of(batch, "image")
