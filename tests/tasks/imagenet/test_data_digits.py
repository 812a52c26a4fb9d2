"""DigitsData: the real digits, their split, their distortions."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from dlo_framework.errors import DloError
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 4}, "at least 8"),
        ({"val_fraction": 1.0}, "above 0 and below 1"),
        ({"max_shift": 16}, "max_shift"),
        ({"max_rotation": 200.0}, "max_rotation"),
        ({"max_zoom": 1.0}, "max_zoom"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(DloError, match=message):
        DigitsData(**arguments)


def test_a_batch_larger_than_the_split_is_refused_by_check() -> None:
    with pytest.raises(DloError, match="a batch of at most 180"):
        DigitsData(val_fraction=0.9, batch_size=512).check()
