"""Mathematics of MixUp and CutMix: the random plan of a batch, and the mixing of images and targets.

* MixUp: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2018 (arXiv 1710.09412).
* CutMix: Yun, Han, Oh, Chun, Choe, Yoo, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
  Features", 2019 (arXiv 1905.04899).

The distribution is that of ``timm.data.mixup.Mixup``: an image's partner is at the mirrored position in the batch
(first with last), and lambda is corrected for the part of a box outside the image. Departures: the middle image of an
odd batch, which is its own partner, is not changed (timm refuses odd batches); targets are float32 whatever the
images' dtype; MixUp rounds once (``lerp``) where timm rounds three times.

Shapes: B images of a batch, N of a group, C classes, H x W pixels. A box is (top, bottom, left, right), the last row
and column not included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlo_framework.errors import DloError, check_choice, check_number

Mode = Literal["batch", "pair", "elem"]
MODES: tuple[Mode, ...] = ("batch", "pair", "elem")


@dataclasses.dataclass(frozen=True)
class MixRecipe:
    """Distribution of the plans; see :class:`dlo_plugins.callbacks.batch_mix.BatchMix` for the fields.

    Raises:
        DloError: If a value is out of range, or both MixUp and CutMix are off.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    cutmix_minmax: tuple[float, float] | None = None
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Mode = "batch"

    def __post_init__(self) -> None:
        for name in ("mixup_alpha", "cutmix_alpha"):
            check_number(f"BatchMix: {name}", getattr(self, name), "at least 0", "0 turns it off, 0.8 is usual")
        for name in ("prob", "switch_prob"):
            check_number(f"BatchMix: {name}", getattr(self, name), "at least 0 and at most 1", "leave it out")
        check_choice("BatchMix: mode", self.mode, MODES, "batch is the default")
        minmax = self.cutmix_minmax
        if minmax is not None and not (len(minmax) == 2 and 0 < minmax[0] < minmax[1] <= 1):
            raise DloError(
                "BatchMix: cutmix_minmax must be two fractions of the image's height and width, the smaller one first"
                f" and above 0, the larger one at most 1, got {list(minmax)}; set [0.2, 0.8], for example"
            )
        if not self.mixes and not self.cuts:
            raise DloError(
                "BatchMix: mixup_alpha or cutmix_alpha must be above 0, got 0 for both; leave the callback out"
            )

    @property
    def mixes(self) -> bool:
        """Whether MixUp is on."""
        return self.mixup_alpha > 0

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix_alpha > 0 or self.cutmix_minmax is not None


class MixPlan(NamedTuple):
    """Plan that mixes each image of a batch with its partner.

    Inside its box an image becomes ``(1 - weight) * own + weight * partner``. For CutMix the box is smaller than the
    image and the weight is 1; for MixUp the box is the full image and the weight is ``1 - lam``. A weight of 0 leaves
    the image unchanged.

    Attributes:
        partner: Number of each image's partner, int64 [B].
        lam: Weight of each image's own target, float64 [B].
        weight: Weight of the partner's pixels inside the box, float64 [B].
        boxes: Boxes, int64 [B, 4]; None if each box is the full image.
    """

    partner: np.ndarray
    lam: np.ndarray
    weight: np.ndarray
    boxes: np.ndarray | None


def clipped_boxes(lam: np.ndarray, centre_y: np.ndarray, centre_x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns boxes of the image's aspect ratio and ``1 - lam`` of its area, clipped at its border: int64 [N, 4]."""
    side = np.sqrt(1 - lam)
    box_height, box_width = (height * side).astype(np.int64), (width * side).astype(np.int64)
    top, left = centre_y - box_height // 2, centre_x - box_width // 2
    edges = (
        top.clip(0, height),
        (top + box_height).clip(0, height),
        left.clip(0, width),
        (left + box_width).clip(0, width),
    )
    return np.stack(edges, axis=1)


def minmax_boxes(
    minmax: tuple[float, float], count: int, height: int, width: int, random: np.random.Generator
) -> np.ndarray:
    """Returns boxes inside the image with sides uniform in ``minmax``, fractions of the image's sides: int64 [N, 4].

    As in timm, the larger limit itself is excluded, unless no pixel is between the two.
    """
    sides, starts = [], []
    for length in (height, width):
        least, past = int(length * minmax[0]), int(length * minmax[1])
        side = random.integers(least, max(past, least + 1), size=count)
        sides.append(side)
        starts.append(random.integers(0, length - side + 1))
    return np.stack([starts[0], starts[0] + sides[0], starts[1], starts[1] + sides[1]], axis=1)


def draw_plan(recipe: MixRecipe, size: int, height: int, width: int, random: np.random.Generator) -> MixPlan:
    """Returns the plan of a group of images: each is mixed with the image at the mirrored position in the group.

    Args:
        recipe: Distribution of the plan; its mode says whether to draw for the group, for each pair or for each image.
        size: Number of images in the group.
        height: Height of the images in pixels; only CutMix uses it.
        width: Width of the images in pixels; only CutMix uses it.
        random: Generator of all random numbers.
    """
    places = np.arange(size)
    which = {"batch": np.zeros_like(places), "pair": np.minimum(places, places[::-1]), "elem": places}[recipe.mode]
    count = int(which.max()) + 1
    is_on = random.random(count) < recipe.prob
    is_cut = random.random(count) < (recipe.switch_prob if recipe.mixes and recipe.cuts else float(recipe.cuts))
    cutmix_alpha = 1.0 if recipe.cutmix_minmax is not None else recipe.cutmix_alpha
    alpha = np.where(is_cut, cutmix_alpha, recipe.mixup_alpha)
    lam = np.where(is_on, random.beta(alpha, alpha), 1.0)
    weight, boxes = 1 - lam, None
    if recipe.cuts:
        if recipe.cutmix_minmax is not None:
            drawn = minmax_boxes(recipe.cutmix_minmax, count, height, width, random)
        else:
            centre_y, centre_x = random.integers(0, height, size=count), random.integers(0, width, size=count)
            drawn = clipped_boxes(lam, centre_y, centre_x, height, width)
        boxes = np.where(is_cut[:, None], drawn, np.array([0, height, 0, width]))
        lam, weight = correct_lambda(lam, weight, is_cut & is_on, boxes, height * width)
        boxes = boxes[which]
    alone = places == places[::-1]
    return MixPlan(places[::-1], np.where(alone, 1.0, lam[which]), np.where(alone, 0.0, weight[which]), boxes)


def correct_lambda(
    lam: np.ndarray, weight: np.ndarray, is_cut: np.ndarray, boxes: np.ndarray, area: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (lam, weight), both [N]; for CutMix, lambda is the fraction of the pixels outside the box."""
    left = 1 - (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / float(area)
    return np.where(is_cut, left, lam), np.where(is_cut, 1.0, weight)


def join_plans(plans: Sequence[MixPlan]) -> MixPlan:
    """Returns the plan of a batch from the plans of its groups."""
    if len(plans) == 1:
        return plans[0]
    starts = np.cumsum([0, *(len(plan.lam) for plan in plans[:-1])])
    partner = np.concatenate([plan.partner + start for plan, start in zip(plans, starts, strict=True)])
    lam, weight = (np.concatenate([plan[field] for plan in plans]) for field in (1, 2))
    boxes = [plan.boxes for plan in plans if plan.boxes is not None]
    return MixPlan(partner, lam, weight, np.concatenate(boxes) if boxes else None)


class DevicePlan(NamedTuple):
    """:class:`MixPlan` as tensors [B] on one device, boxes [B, 4]; ``other`` is ``1 - lam``."""

    partner: Tensor
    lam: Tensor
    other: Tensor
    weight: Tensor
    boxes: Tensor | None


def to_device(plan: MixPlan, device: torch.device) -> DevicePlan:
    """Returns the plan on a device, by one asynchronous copy."""
    columns = [plan.partner, plan.lam, 1 - plan.lam, plan.weight]
    columns += [] if plan.boxes is None else list(plan.boxes.T)
    packed = torch.from_numpy(np.stack(columns).astype(np.float32))  # whole numbers are exact up to 2**24
    if device.type == "cuda":
        # Pinned memory makes the copy asynchronous; torch keeps it alive until the copy is complete.
        packed = packed.pin_memory().to(device, non_blocking=True)
    else:
        packed = packed.to(device)
    boxes = None if plan.boxes is None else packed[4:].T
    return DevicePlan(packed[0].long(), packed[1], packed[2], packed[3], boxes)


def soft_targets(targets: Tensor, num_classes: int, smoothing: float, multi_label: bool = False) -> Tensor:
    """Returns float32 targets [B, C] with label smoothing (Szegedy et al. 2016, arXiv 1512.00567).

    Args:
        targets: Class indices [B], or dense targets [B, C].
        num_classes: Number of classes, C.
        smoothing: Fraction of each target that is spread evenly over the classes.
        multi_label: Whether each class is a binary target, smoothed towards 0.5; dense targets only.
    """
    if targets.ndim == 1:
        off = smoothing / num_classes
        soft = torch.full((len(targets), num_classes), off, dtype=torch.float32, device=targets.device)
        return soft.scatter_(1, targets.long()[:, None], 1 - smoothing + off)
    return targets.float() * (1 - smoothing) + (0.5 * smoothing if multi_label else smoothing / num_classes)


def mix_targets(soft: Tensor, plan: DevicePlan) -> Tensor:
    """Returns ``lam * own + (1 - lam) * partner`` of float32 targets [B, C]."""
    return soft * plan.lam[:, None] + soft[plan.partner] * plan.other[:, None]


def mix_images(images: Tensor, plan: MixPlan, on_device: DevicePlan, *, in_place: bool) -> Tensor:
    """Returns the mixed images, by the fastest method for their device.

    Args:
        images: Floating-point images [B, ..., H, W], or [B, ...] for a plan without boxes; in any memory format.
        plan: Plan of the batch.
        on_device: Same plan on the images' device.
        in_place: Whether a CPU may write to ``images``; an accelerator never does.
    """
    if images.device.type != "cpu":
        return mix_by_mask(images, on_device)
    return mix_pairs_(images if in_place and _is_dense(images) else images.clone(), plan)


def mix_by_mask(images: Tensor, plan: DevicePlan) -> Tensor:
    """Returns the mixed images by one vectorised expression, without a loop over images or a synchronisation."""
    shape = [len(images), *[1] * (images.ndim - 1)]
    weight = plan.weight.view(shape)
    if plan.boxes is not None:
        rows, columns = (torch.arange(n, device=images.device) for n in images.shape[-2:])
        top, bottom, left, right = (edge[:, None] for edge in plan.boxes.unbind(1))  # each [B, 1]
        in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)  # [B, H], [B, W]
        inside = in_rows[:, :, None] & in_columns[:, None, :]
        weight = weight * inside.view(*shape[:-2], *images.shape[-2:])
    partners = images[plan.partner]
    if images.dtype in (torch.float16, torch.bfloat16):  # a weight in this precision would differ from lambda
        return torch.lerp(images.float(), partners.float(), weight).to(images.dtype)
    return torch.lerp(images, partners, weight.to(images.dtype), out=partners)


def mix_pairs_(images: Tensor, plan: MixPlan) -> Tensor:
    """Mixes images in place, pair by pair, and returns them: a pair fits in the cache of a CPU, a batch does not."""
    boxes, weight = plan.boxes, plan.weight.tolist()
    pairs = [(one, other) for one, other in enumerate(plan.partner.tolist()) if one < other]
    pairs = [(one, other) for one, other in pairs if weight[one] or weight[other]]
    if boxes is None or (boxes == boxes[0]).all():  # as in mode batch: cut once
        rows = (images if boxes is None else _cut(images, boxes[0].tolist())).unbind(0)
        scratch = torch.empty_like(rows[0])
        for one, other in pairs:
            _swap(rows[one], rows[other], weight[one], weight[other], scratch)
        return images
    cut, memory, corners = _Cutter(images), torch.empty_like(images[0]), boxes.tolist()
    for one, other in pairs:
        part, partner = cut(one, corners[one]), cut(other, corners[one])
        scratch = memory.as_strided(part.shape, part.stride())
        if corners[one] == corners[other]:
            _swap(part, partner, weight[one], weight[other], scratch)
        else:
            _blend(part, partner, weight[one], out=scratch)
            _blend(cut(other, corners[other]), cut(one, corners[other]), weight[other])
            part.copy_(scratch)
    return images


def _swap(one: Tensor, other: Tensor, weight: float, other_weight: float, scratch: Tensor) -> None:
    """Mixes two tensors in place, each with the other's old values."""
    _blend(one, other, weight, out=scratch)
    _blend(other, one, other_weight)
    one.copy_(scratch)


def _blend(own: Tensor, partner: Tensor, weight: float, out: Tensor | None = None) -> None:
    """Writes ``(1 - weight) * own + weight * partner`` to ``out``, or to ``own``."""
    if weight in (0, 1):
        if weight or out is not None:
            (own if out is None else out).copy_(partner if weight else own)
    else:
        torch.lerp(own, partner, weight, out=own if out is None else out)


def _cut(images: Tensor, box: list[int]) -> Tensor:
    top, bottom, left, right = box
    return images[..., top:bottom, left:right]


class _Cutter:
    """Views of boxes in a batch's images, in half the time of indexing; a pair needs up to four."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.start, self.leading = images, images.storage_offset(), images.shape[1:-2]
        self.step, *self.strides = images.stride()

    def __call__(self, place: int, box: list[int]) -> Tensor:
        top, bottom, left, right = box
        start = self.start + place * self.step + top * self.strides[-2] + left * self.strides[-1]
        return self.images.as_strided((*self.leading, bottom - top, right - left), self.strides, start)


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements have memory of their own without gaps, which those of an expanded tensor do not."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()
