"""Primitives for callbacks and tasks: gradient norm, a step left out, a hook after a step, a mean over the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlo_framework.distributed.precision import ShardedClipping, without_empty_clipping
from dlo_framework.strategy_abilities import Replicas
from dlo_framework.strategy_contract import contract_of


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimizer of torch in Lightning's wrapper."""
    unwrapped: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return unwrapped


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
    contract = contract_of(strategy)
    norm: Tensor = (plugin if isinstance(plugin, ShardedClipping) else contract).gradient_norm(inner)
    scaler = loss_scaler(plugin)
    if scaler is not None and _unscales_itself(inner):
        norm = norm / scaler._scale.to(norm.device)  # torch (2.11 to 2.15): `get_scale` waits for the device.
    replicas = contract.find_ability(Replicas)
    return norm if replicas is None or not replicas.separates else strategy.reduce(norm, reduce_op="mean")


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
    scaler = loss_scaler(plugin)
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


def loss_scaler(plugin: Precision) -> Any | None:
    """Returns the gradient scaler of a precision plug-in; None where the loss is not scaled."""
    return getattr(plugin, "scaler", None)


def _unscales_itself(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer divides gradients by the loss scale inside its step, as torch's fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def mean_over_data(trainer: Trainer | None, value: Tensor) -> Tensor:
    """Returns the mean of a value over the data-parallel ranks, as a new tensor, without a barrier.

    It equals `trainer.strategy.reduce(value, reduce_op="mean")`. Lightning (2.6) reduces behind a barrier
    (`_sync_ddp`), where on NCCL the host waits until the device has finished all earlier work.

    Args:
        trainer: Trainer of the run; None for a single process. A strategy with a `reduce` that is neither Lightning's
            nor a mesh's is called itself.
        value: Floating-point tensor of this rank, on its device.
    """
    if trainer is None or not (dist.is_available() and dist.is_initialized()):
        return value.clone()
    group = contract_of(trainer.strategy).data_group
    if group is None:
        mean = trainer.strategy.reduce(value.clone(), reduce_op="mean")
        assert isinstance(mean, Tensor)
        return mean
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def prepend_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Registers a hook that runs right after an optimizer's step, before hooks that were registered earlier.

    Strategies that shard register a hook that publishes the stepped values to the other ranks. What this hook writes is
    published with them. torch (2.11 to 2.15) has no option for the order: this function moves the entry in
    ``_optimizer_step_post_hooks``.

    Args:
        optimizer: Optimizer whose step calls hooks.
        hook: Function of the optimizer and the step's arguments.
    """
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle
