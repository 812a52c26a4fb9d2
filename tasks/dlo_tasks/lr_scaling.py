"""Learning rates in proportion to the batch, or to its root: "k times the batch, k times the step".

- linear: Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour. Goyal et al., 2017, arXiv 1706.02677.
- sqrt: One weird trick for parallelizing convolutional neural networks. Krizhevsky, 2014, arXiv 1404.5997; for Adam and
  LAMB, You et al., 2019, arXiv 1904.00962.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from dlo_framework.errors import DloError, did_you_mean

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

RULES = ("linear", "sqrt")


def scale_factor(batch: int, reference: int, rule: str) -> float:
    """Returns the factor of the learning rate for a batch.

    Args:
        batch: Samples of an optimizer step, over all ranks.
        reference: Batch for which the learning rate is given.
        rule: ``linear`` or ``sqrt``.
    """
    ratio = batch / reference
    return ratio if rule == "linear" else math.sqrt(ratio)


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Checks the option `lr_scaling` of a task.

    Raises:
        DloError: If a key or value is wrong.
    """
    if scaling is None:
        return
    usual = "set {reference_batch: 256, rule: linear}"
    for key in scaling:
        if key not in ("reference_batch", "rule"):
            near = did_you_mean(str(key), ["reference_batch", "rule"])
            raise DloError(f"lr_scaling must have the keys reference_batch and rule, got {key}{near or ';'} {usual}")
    reference, rule = scaling.get("reference_batch"), scaling.get("rule", "linear")
    if not isinstance(reference, int) or reference < 1:
        raise DloError(f"reference_batch of lr_scaling must be a number of samples, got {reference}; {usual}")
    if rule not in RULES:
        near = did_you_mean(str(rule), list(RULES))
        raise DloError(f"rule of lr_scaling must be linear or sqrt, got {rule}{near or ';'} {usual}")


def step_batch(trainer: Trainer | None) -> int:
    """Returns the samples of the run's first optimizer steps, over all ranks.

    Raises:
        DloError: If the data do not say their batch size.
    """
    batch = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    if trainer is None or not isinstance(batch, int):
        raise DloError(
            "lr_scaling must have a datamodule of dlo, whose batch_size counts the samples of all ranks, got"
            f" {type(getattr(trainer, 'datamodule', None)).__name__}; leave lr_scaling out, and set lr for the batch"
        )
    return batch * int(trainer.accumulate_grad_batches)


def scale_rates(optimizer: Optimizer, trainer: Trainer | None, scaling: Mapping[str, Any] | None) -> float:
    """Scales the learning rates of an optimizer by the run's batch; returns the factor.

    Args:
        optimizer: Optimizer at the rates for the reference batch.
        trainer: Trainer of the run.
        scaling: `reference_batch` and `rule`; None for a factor of 1.

    Raises:
        DloError: If the data do not say their batch size.
    """
    if scaling is None:
        return 1.0
    factor = scale_factor(step_batch(trainer), scaling["reference_batch"], scaling.get("rule", "linear"))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return factor
