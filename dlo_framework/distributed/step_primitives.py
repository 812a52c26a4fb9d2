"""Primitives for callbacks that judge a step before it is taken: the gradient's norm, and leaving the step out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.distributed.norms import gradient_norm
from dlo_framework.distributed.precision import without_empty_clipping
from dlo_framework.strategy_contract import contract_of


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimizer of torch in Lightning's wrapper."""
    found: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return found


def agreed_gradient_norm(trainer: Trainer, optimizer: Any) -> Tensor:
    """Returns the 2-norm of the gradient that an optimizer is about to step with; called on all ranks.

    Each element of the full gradient counts once, under every strategy. It is unscaled under a loss scaler, and equal
    on all ranks: where copies of the model train by themselves, as under DiLoCo, it is the mean of their norms. It is 0
    where gradients are stepped during backward.

    Args:
        trainer: Trainer of the run, in ``on_before_optimizer_step``.
        optimizer: Optimizer that the hook gets.

    Returns:
        Scalar on the device. This function does not wait for it; to read it does.
    """
    strategy, inner, plugin = trainer.strategy, torch_optimizer(optimizer), trainer.precision_plugin
    measure = getattr(plugin, "gradient_norm", None)
    norm: Tensor = gradient_norm(strategy, inner) if measure is None else measure(inner)
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is not None and _unscales_itself(inner):
        norm = norm / scaler._scale.to(norm.device)  # torch (2.11 to 2.15): `get_scale` waits for the device.
    return strategy.reduce(norm, reduce_op="mean") if contract_of(strategy).separates else norm


@torch.no_grad()
def skip_step(trainer: Trainer, optimizer: Any) -> None:
    """Leaves out the step that an optimizer is about to take; called on all ranks.

    No weight changes, and no state of the optimizer: neither moments nor what optimizers such as LAMB and the
    schedule-free ones count in their parameter groups. The step counts in ``trainer.global_step``, and learning-rate
    schedules go on. LBFGS, which evaluates the loss inside its step, still counts its evaluations.

    Args:
        trainer: Trainer of the run, in ``on_before_optimizer_step``.
        optimizer: Optimizer that the hook gets.
    """
    inner, plugin, step = torch_optimizer(optimizer), trainer.precision_plugin, trainer.global_step
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is not None and _unscales_itself(inner):
        scaler.unscale_(inner)  # Without gradients it could not look for infinities in them, and would raise.
    for parameter in (p for group in inner.param_groups for p in group["params"]):
        parameter.grad = None
    trainer.strategy.precision_plugin = without_empty_clipping(plugin)
    before = [
        {name: (value, copy.deepcopy(value)) for name, value in group.items() if name != "params"}
        for group in inner.param_groups
    ]

    def restore(*_: Any) -> None:
        handle.remove()
        if trainer.global_step != step:
            return  # A loss scaler has skipped that step too, and this is a later one.
        for group, settings in zip(inner.param_groups, before, strict=True):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            for name, (value, saved) in settings.items():
                group[name] = value.copy_(saved) if isinstance(value, Tensor) else saved

    handle = inner.register_step_post_hook(restore)


def _unscales_itself(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer divides gradients by the loss scale inside its step, as torch's fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)
