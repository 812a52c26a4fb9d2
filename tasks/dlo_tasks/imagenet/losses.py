"""Losses and top-k hits of each sample, so that means are exact.

Shapes: B samples, C classes. Targets are class indices `[B]`, or soft targets `[B, C]` (each row a distribution, as
MixUp produces them). A class of -1 (:data:`VOID`, with which datasets of earlier versions marked padding) is ignored.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.data import VOID
from dlo_framework.errors import DloError, check_number

LossName = Literal["cross_entropy", "bce"]


def is_real(targets: Tensor) -> Tensor:
    """Returns a mask of the samples that count, `[B]` of bool: all except those whose target is VOID."""
    if targets.is_floating_point():
        return torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    return targets != VOID


def dense_targets(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Returns targets as `[B, C]` distributions, smoothed towards uniform; a VOID row becomes class 0.

    Label smoothing (Szegedy et al. 2016, arXiv 1512.00567) gives each class `smoothing / C` and the target the rest. It
    applies to soft targets too, so MixUp must not smooth them itself.
    """
    if not targets.is_floating_point():
        targets = F.one_hot(targets.clamp(min=0), num_classes).float()
    return targets * (1 - smoothing) + smoothing / num_classes


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy of each sample, `[B]` in float32; 0 for a VOID sample."""
    logits = logits.float()
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets.float(), reduction="none", label_smoothing=smoothing)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=VOID, label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, threshold: float | None = None
) -> Tensor:
    """Returns the binary cross-entropy of each sample, averaged over its classes: `[B]` in float32.

    Each class is an independent binary target, as in "ResNet strikes back" (Wightman et al. 2021, arXiv 2110.00476) and
    DeiT III, where a mixed image has both of its classes in full: `threshold=0`.

    Args:
        logits: Logits, `[B, C]`.
        targets: Class indices or soft targets.
        smoothing: Label smoothing, applied before the threshold.
        threshold: Threshold above which targets become 1, and the others 0; None keeps them.
    """
    dense = dense_targets(targets, logits.shape[1], smoothing)
    if threshold is not None:
        dense = (dense > threshold).float()
    losses = F.binary_cross_entropy_with_logits(logits.float(), dense, reduction="none").mean(dim=1)
    return losses.masked_fill(~is_real(targets), 0.0)


def check_threshold(threshold: float, smoothing: float, num_classes: int | None) -> None:
    """Checks that a threshold separates a sample's class from the others after smoothing.

    Args:
        threshold: Threshold of :func:`binary_cross_entropy`.
        smoothing: Label smoothing of :func:`binary_cross_entropy`.
        num_classes: Number of classes; None if it is not known yet.

    Raises:
        DloError: If it does not separate them.
    """
    check_number("bce_threshold", threshold, "at least 0 and below 1", "DeiT III has 0, ResNet strikes back 0.2")
    others = smoothing / num_classes if num_classes else 0.0
    own = 1 - smoothing + others if num_classes else 1.0
    if not smoothing or others < threshold < own:
        return
    side, value = ("above", 1) if threshold <= others else ("at or below", 0)
    shares = f" ({own:.3g} for its own of {num_classes} classes, {others:.3g} for others)" if num_classes else ""
    raise DloError(
        f"bce_threshold must separate smoothed targets, got {threshold} with label_smoothing {smoothing}{shares}: all"
        f" targets are {side} it and become {value}; set label_smoothing to 0: a threshold undoes it anyway"
    )


def mean_of_real(values: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of `values`, `[B]` and 0 for VOID samples, over the samples that count; 0 if there are none."""
    if targets.is_floating_point():
        return values.mean()
    return values.sum() / (targets != VOID).sum().clamp(min=1)


def hits_at(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """Returns a `[B, k]` bool tensor: whether the class of the j-th highest logit is the target.

    The target of a soft row is its largest class. `hits[:, 0]` is a top-1 hit, `hits.any(1)` a top-k hit.
    """
    classes = targets.argmax(dim=1) if targets.is_floating_point() else targets
    return logits.topk(k, dim=1).indices == classes[:, None]
