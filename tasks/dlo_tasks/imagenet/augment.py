"""Views of images for training and evaluation: random crops with distortions, and centre crops.

The draw's seed determines all random choices of a training image.

* RandomResizedCrop: Szegedy et al. 2015, "Going deeper with convolutions", arXiv:1409.4842; torchvision's rule.
* RandAugment: Cubuk et al. 2020, arXiv:1909.13719, through ``torchvision.transforms.v2``.
* Random erasing: Zhong et al. 2020, arXiv:1708.04896; torchvision's rule, except that "mean" fills with the
  mean colour of the dataset, which normalising turns into 0.
* 3-Augment: Touvron et al. 2022, "DeiT III", arXiv:2204.07118: one of grey, solarise and blur for each image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torchvision.transforms import v2

from dlo_framework.data import Draw, uniform
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.decode import Box, decode_crop, resize_into

NUMBERS_PER_IMAGE = 24  # 10 x 2 for the crop's area and shape, 2 for its place, 1 for the flip, 1 spare
_TRIES = 10
_BINS = 31  # torchvision's magnitudes are 0..30
_TIMM_MAX = 10  # timm's and the paper's are 0..10

Transform = Callable[[torch.Tensor], torch.Tensor]


def random_numbers(seeds: Sequence[int]) -> np.ndarray:
    """Returns numbers in [0, 1), float64 [len(seeds), NUMBERS_PER_IMAGE], each row a function of its seed."""
    column = np.asarray(seeds, dtype=np.uint64)[:, None]
    with np.errstate(over="ignore"):
        return uniform(column * np.uint64(NUMBERS_PER_IMAGE) + np.arange(NUMBERS_PER_IMAGE, dtype=np.uint64))


def random_resized_box(
    height: int, width: int, numbers: np.ndarray, scale: Sequence[float], ratio: Sequence[float]
) -> Box:
    """Returns a crop of random area and shape, by torchvision's rule for RandomResizedCrop.

    Args:
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        numbers: Random numbers in [0, 1), at least 22.
        scale: Minimum and maximum area of the crop, as fractions of the image's area.
        ratio: Minimum and maximum aspect ratio (width / height) of the crop, drawn log-uniformly.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * float(numbers[2 * attempt]))
        shape = math.exp(low + (high - low) * float(numbers[2 * attempt + 1]))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top = int((height - h + 1) * float(numbers[20]))
            left = int((width - w + 1) * float(numbers[21]))
            return Box(top, left, h, w)
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, min(height, round(w / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(h * ratio[1])))
    return Box((height - h) // 2, (width - w) // 2, h, w)


class _NoisyRandAugment:
    """RandAugment whose magnitude varies between images, as with timm's ``mstd``."""

    def __init__(self, num_ops: int, magnitude: float, deviation: float) -> None:
        self._magnitude, self._deviation = magnitude, deviation
        self._by_bin = [v2.RandAugment(num_ops, bin_, _BINS) for bin_ in range(_BINS)]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        drawn = self._magnitude
        if self._deviation:
            drawn += self._deviation * float(torch.randn(()))
        bin_ = round(min(max(drawn, 0.0), _TIMM_MAX) * (_BINS - 1) / _TIMM_MAX)
        return self._by_bin[bin_](image)


def parse_rand_augment(spec: str | dict[str, float]) -> Transform:
    """Returns the RandAugment that ``spec`` describes.

    Args:
        spec: Policy in timm's notation, such as ``rand-m9-n2`` or ``rand-m9-mstd0.5-inc1``: m is the magnitude and
            mstd its standard deviation, on the paper's scale of 0..10; n is the number of operations, default 2;
            inc1 (each operation is stronger with a larger m) always holds for torchvision's operations. Or
            torchvision's arguments, ``{num_ops: 2, magnitude: 9}``, with a magnitude of 0..30.

    Raises:
        DloError: If ``spec`` is anything else; the message has the invalid component.
    """
    if isinstance(spec, dict):
        unknown = set(spec) - {"num_ops", "magnitude"}
        num_ops, magnitude = int(spec.get("num_ops", 2)), int(spec.get("magnitude", 9))
        if unknown or num_ops < 0 or not 0 <= magnitude < _BINS:
            raise DloError(
                f"rand_augment must be {{num_ops: 0 or more, magnitude: 0..{_BINS - 1}}}, got {spec}"
                + (f"; unknown: {', '.join(sorted(unknown))}" if unknown else "")
            )
        return v2.RandAugment(num_ops, magnitude, _BINS)
    name, *parts = spec.split("-")
    values = {"m": 9.0, "n": 2.0, "mstd": 0.0, "inc": 1.0}
    for part in parts:
        match = re.fullmatch(r"(mstd|inc|m|n)(\d+(?:\.\d+)?)", part)
        if match is None:
            raise DloError(f"rand_augment must be such as 'rand-m9-n2-mstd0.5', got {part!r} in {spec!r}; remove it")
        values[match[1]] = float(match[2])
    if name != "rand" or values["m"] > _TIMM_MAX or values["n"] % 1:
        raise DloError(
            f"rand_augment must begin with 'rand' and have m in 0..{_TIMM_MAX} and an integer n, got {spec!r};"
            " write it as 'rand-m9-n2'"
        )
    return _NoisyRandAugment(int(values["n"]), values["m"], values["mstd"])


def three_augment() -> Transform:
    """Returns DeiT III's random choice of grey, solarise or blur, with equal probabilities."""
    return v2.RandomChoice(
        [
            v2.Grayscale(num_output_channels=3),
            v2.RandomSolarize(threshold=128, p=1.0),
            v2.GaussianBlur(kernel_size=13, sigma=(0.1, 2.0)),
        ]
    )


class Erase:
    """Random erasing: fills a box of random shape and 2% to 33% of the image's area.

    Args:
        probability: Probability that an image is erased.
        fill: Colour, uint8 [3]; None fills with random pixels.
    """

    def __init__(self, probability: float, fill: torch.Tensor | None) -> None:
        self.probability = probability
        self.fill = fill

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Returns ``image``, uint8 [3, H, W]; a box may have been filled in place."""
        if float(torch.rand(())) >= self.probability:
            return image
        height, width = image.shape[-2:]
        for _ in range(_TRIES):
            share, shape, down, right = torch.rand(4).tolist()
            area = height * width * (0.02 + (0.33 - 0.02) * share)
            ratio = math.exp(math.log(0.3) * (1 - 2 * shape))  # 0.3 .. 1/0.3
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h < height and 0 < w < width:
                top, left = int((height - h + 1) * down), int((width - w + 1) * right)
                box = image[:, top : top + h, left : left + w]
                if self.fill is None:
                    box.copy_(torch.randint(0, 256, box.shape, dtype=torch.uint8))
                else:
                    box.copy_(self.fill.view(3, 1, 1))
                break
        return image


def build_distortions(
    *,
    rand_augment: str | dict[str, float] | None,
    three_augment_on: bool,
    color_jitter: float | Sequence[float] | None,
    random_erase: float,
    erase_mode: Literal["mean", "pixel"],
    mean: Sequence[float],
) -> list[Transform]:
    """Returns the transforms of a cropped and flipped uint8 image [3, H, W], in order; may be empty.

    The order is timm's: RandAugment or 3-Augment, colour jitter, erasing. ``ImageFolderData`` documents the
    arguments.
    """
    if rand_augment is not None and three_augment_on:
        raise DloError("rand_augment and three_augment must not both be set, got both; remove one of them")
    if not 0 <= random_erase <= 1:
        raise DloError(f"random_erase must be a probability in 0..1, got {random_erase}; 0.25 is usual")
    transforms: list[Transform] = []
    if rand_augment is not None:
        transforms.append(parse_rand_augment(rand_augment))
    if three_augment_on:
        transforms.append(three_augment())
    if color_jitter:
        strengths: Any = [color_jitter] * 3 if isinstance(color_jitter, int | float) else list(color_jitter)
        if not 1 <= len(strengths) <= 4 or not all(0 <= strength < math.inf for strength in strengths):
            raise DloError(
                f"color_jitter must be 1 to 4 strengths (brightness, contrast, saturation, hue), got {strengths}"
            )
        if len(strengths) == 4 and strengths[3] > 0.5:
            raise DloError(f"color_jitter must be at most 0.5 for hue, half of its circle, got {strengths[3]}; use 0.5")
        transforms.append(v2.ColorJitter(*strengths))
    if random_erase:
        fill = (torch.tensor(mean) * 255).round().to(torch.uint8) if erase_mode == "mean" else None
        transforms.append(Erase(random_erase, fill))
    return transforms


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
