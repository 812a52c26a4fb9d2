"""DigitsData: the real digits, their split and distortions; random crops have torchvision's distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torchvision.transforms import RandomResizedCrop, v2

from dlo_framework.errors import DloError
from dlo_tasks.imagenet.augment import (
    Erase,
    build_distortions,
    parse_rand_augment,
    random_numbers,
    random_resized_box,
)
from dlo_tasks.imagenet.digits import DigitsData, load_digits_images


def test_images_at_their_own_size_are_scikit_learns() -> None:
    images, targets = load_digits_images(8)
    digits = load_digits()
    assert (images.numpy() == (digits.images * 255 / 16).round()).all()
    assert (targets.numpy() == digits.target).all()
    assert load_digits_images(16)[0].shape == (1797, 16, 16)


def test_the_split_is_complete_disjoint_and_fixed_by_the_seed() -> None:
    train, val = DigitsData()._splits
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(1797))
    assert len(val) == 359
    assert torch.equal(DigitsData(batch_size=8)._splits[1], val)
    assert not torch.equal(DigitsData(seed=1)._splits[1], val)


def test_batches_are_normalised_rgb_and_the_same_with_any_number_of_workers() -> None:
    module = DigitsData()
    module.check()
    loader = module.train_dataloader()
    assert len(loader) == 1438 // 64
    for (images, targets), (others, same) in zip(loader, DigitsData(num_workers=1).train_dataloader(), strict=True):
        assert images.dtype == torch.uint8
        assert torch.equal(images, others)
        assert torch.equal(targets, same)
    images, targets = module.on_after_batch_transfer((images, targets), 0)
    assert images.shape == (64, 3, 16, 16)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 0.3
    assert 0.6 < float(images.std()) < 1.4
    assert targets.dtype == torch.int64


def test_every_choice_is_the_same_at_another_size() -> None:
    module = DigitsData(max_shift=2, max_rotation=30, max_zoom=0.3)
    loader = module.train_dataloader()
    draws = next(iter(loader.batch_sampler))
    own = loader.dataset.fetch(draws)[0].float()
    for size in (8, 12, 24, 32):
        other = loader.dataset.fetch([draw._replace(size=(size, size)) for draw in draws])[0]
        assert other.shape == (64, 3, size, size)
        back = torch.nn.functional.interpolate(other.float(), (16, 16), mode="bilinear", antialias=True)
        paired = (back - own).abs().mean((1, 2, 3))
        unpaired = (back.roll(1, 0) - own).abs().mean((1, 2, 3))
        assert paired.mean() < 0.35 * unpaired.mean(), size
    plain = DigitsData(max_shift=0, max_rotation=0, max_zoom=0).train_dataloader().dataset
    images = load_digits_images(24)[0][DigitsData()._splits[0]]
    larger = plain.fetch([draw._replace(size=(24, 24)) for draw in draws])[0]
    assert torch.equal(larger[:, 1], images[[draw.index for draw in draws]])


def test_evaluation_is_unshifted_and_complete() -> None:
    module = DigitsData(eval_batch_size=100)
    targets = torch.cat([targets for _, targets in module.val_dataloader()])
    assert torch.equal(targets, load_digits_images(8)[1][module._splits[1]])


def test_a_batch_larger_than_the_split_is_refused_by_check() -> None:
    with pytest.raises(DloError, match="a batch of at most 180"):
        DigitsData(val_fraction=0.9, batch_size=512).check()


# --- random crops and distortions: torchvision's distributions, and functions of the seed alone ----------------------


SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@given(
    st.integers(1, 700),
    st.integers(1, 700),
    st.integers(0, 2**63 - 1),
    st.sampled_from([SCALE, (1.0, 1.0), (1e-4, 2e-4)]),
)
def test_a_box_lies_inside_its_image(height: int, width: int, seed: int, scale: tuple[float, float]) -> None:
    box = random_resized_box(height, width, random_numbers([seed])[0], scale, RATIO)
    assert 0 <= box.top <= box.top + box.height <= height
    assert 0 <= box.left <= box.left + box.width <= width
    assert min(box.height, box.width) >= 1


@pytest.mark.parametrize(("height", "width"), [(400, 500), (100, 600), (333, 120)])
def test_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    count = 4000
    ours = np.array([random_resized_box(height, width, n, SCALE, RATIO) for n in random_numbers(range(count))])
    torch.manual_seed(0)
    image = torch.empty(3, height, width, device="meta")
    theirs = np.array([RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(count)])
    error = 5 * theirs.std(axis=0) * np.sqrt(2 / count) + 1e-9
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < error).all()
    assert np.abs(ours.std(axis=0) / theirs.std(axis=0) - 1).max() < 0.1


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("rand-m9-n2", 27), ("rand-m10", 30), ("rand-m0-n3", 0), ("rand-m9-mstd0-inc1", 27)],
)
def test_timms_magnitudes_are_translated(spec: str, expected: int) -> None:
    augment = parse_rand_augment(spec)
    used = []
    augment._by_bin = [lambda image, number=number: used.append(number) or image for number in range(31)]
    augment(torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert used == [expected]


def test_mstd_varies_the_magnitude_and_dicts_are_torchvisions() -> None:
    augment = parse_rand_augment("rand-m5-mstd1")
    used = []
    augment._by_bin = [lambda image, number=number: used.append(number) or image for number in range(31)]
    for _ in range(200):
        augment(torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert len(set(used)) > 5
    assert 13 < np.mean(used) < 17
    plain = parse_rand_augment({"num_ops": 3, "magnitude": 12})
    assert isinstance(plain, v2.RandAugment)
    assert (plain.num_ops, plain.magnitude) == (3, 12)


def test_erasing_paints_a_box_of_the_mean_colour_or_noise() -> None:
    torch.manual_seed(0)
    fill = torch.tensor([124, 116, 104], dtype=torch.uint8)
    for _ in range(20):
        image = torch.full((3, 64, 64), 255, dtype=torch.uint8)
        Erase(1.0, fill)(image)
        painted = (image == fill.view(3, 1, 1)).all(0)
        assert 0.015 * 64 * 64 < painted.sum() < 0.36 * 64 * 64
        assert ((image == 255).all(0) | painted).all()
    noisy = Erase(1.0, None)(torch.full((3, 64, 64), 255, dtype=torch.uint8))
    assert len(noisy.unique()) > 20
    untouched = torch.full((3, 64, 64), 7, dtype=torch.uint8)
    assert (Erase(0.0, fill)(untouched) == 7).all()


def test_every_distortion_keeps_uint8_images_and_changes_them() -> None:
    torch.manual_seed(0)
    options = {"rand_augment": None, "three_augment_on": False, "color_jitter": None, "random_erase": 0.0}
    options |= {"erase_mode": "mean", "mean": (0.5, 0.5, 0.5)}
    assert build_distortions(**options) == []
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    for name, value in (("three_augment_on", True), ("color_jitter", 0.5), ("random_erase", 1.0)):
        (distort,) = build_distortions(**options | {name: value})
        changed = distort(image.clone())
        assert changed.shape == image.shape
        assert changed.dtype == torch.uint8
        assert not torch.equal(changed, image)
