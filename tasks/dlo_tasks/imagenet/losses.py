"""Losses and hits of each sample, so that every mean is exact.

Shapes: B samples, C classes. Targets are class indices `[B]`, or soft targets `[B, C]` (each row a distribution, as
MixUp makes them). A class of -1 (:data:`VOID`, with which datasets of earlier versions marked padding) counts for
nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.data import VOID
from dlo_framework.errors import DloError

LossName = Literal["cross_entropy", "bce"]


def is_real(targets: Tensor) -> Tensor:
    """Returns which samples count, `[B]` of bool: all but those whose target is VOID."""
    if targets.is_floating_point():
        return torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    return targets != VOID


def dense_targets(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Returns targets as `[B, C]` distributions, smoothed towards uniform; a VOID row is one of class 0.

    Label smoothing (Szegedy et al. 2016, arXiv 1512.00567) gives each class `smoothing / C` and the target
    the rest. It applies to soft targets too, so what makes soft targets (MixUp) must not smooth them itself.
    """
    if not targets.is_floating_point():
        targets = F.one_hot(targets.clamp(min=0), num_classes).float()
    return targets * (1 - smoothing) + smoothing / num_classes


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy of each sample, `[B]` in float32; that of a VOID sample is 0."""
    logits = logits.float()
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets.float(), reduction="none", label_smoothing=smoothing)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=VOID, label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, threshold: float | None = None
) -> Tensor:
    """Returns the binary cross-entropy of each sample, the mean over its classes: `[B]` in float32.

    Each class is its own yes/no question, as in "ResNet strikes back" (Wightman et al. 2021, arXiv
    2110.00476) and DeiT III, where a mixed image holds both its classes in full: that is `threshold=0`.

    Args:
        logits: `[B, C]`.
        targets: Class indices or soft targets.
        smoothing: Label smoothing, applied before the threshold.
        threshold: If set, targets above it become 1 and the others 0.
    """
    dense = dense_targets(targets, logits.shape[1], smoothing)
    if threshold is not None:
        dense = (dense > threshold).float()
    losses = F.binary_cross_entropy_with_logits(logits.float(), dense, reduction="none").mean(dim=1)
    return losses.masked_fill(~is_real(targets), 0.0)


def check_threshold(threshold: float, smoothing: float, num_classes: int | None) -> None:
    """Checks that a threshold tells a sample's class from the others after smoothing.

    Args:
        threshold: See :func:`binary_cross_entropy`.
        smoothing: Likewise.
        num_classes: None where it is not known yet.

    Raises:
        DloError: if it does not.
    """
    if not 0 <= threshold < 1:
        raise DloError(f"bce_threshold lies in [0, 1), given {threshold}; DeiT III has 0, ResNet strikes back 0.2")
    others = smoothing / num_classes if num_classes else 0.0
    own = 1 - smoothing + others if num_classes else 1.0
    if not smoothing or others < threshold < own:
        return
    side, value = ("above", 1) if threshold <= others else ("at or below", 0)
    shares = f" (of {num_classes} classes its own gets {own:.3g}, each other {others:.3g})" if num_classes else ""
    raise DloError(
        f"label_smoothing {smoothing}{shares} brings all targets {side} bce_threshold {threshold}, so that all would be"
        f" {value}; set label_smoothing to 0: a threshold takes it back anyway"
    )


def mean_of_real(values: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of `values`, `[B]` and 0 where VOID, over the real samples; 0 if there are none."""
    if targets.is_floating_point():
        return values.mean()
    return values.sum() / (targets != VOID).sum().clamp(min=1)


def hits_at(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """Returns `[B, k]` of bool: whether the class of the j-th highest logit is the target.

    The target of a soft row is its largest class. `hits[:, 0]` is a top-1 hit and `hits.any(1)` a top-k hit.
    """
    classes = targets.argmax(dim=1) if targets.is_floating_point() else targets
    return logits.topk(k, dim=1).indices == classes[:, None]
