"""Precision plug-ins for sharded gradients: clipping by the norm over all ranks, one loss scale; dtype of scalars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from torchmetrics import Metric

from dlo_framework.ability import find_ability
from dlo_framework.norms import collect_gradients
from dlo_framework.optimizers import multiply_all
from dlo_framework.task_abilities import KeepsBuffers


def wide_dtype() -> torch.dtype:
    """Returns torch's default dtype, or float32 if that is wider.

    Lightning sets the default dtype to bf16 in steps under `precision: bf16-true`.
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


@contextlib.contextmanager
def keep_dtypes(module: nn.Module) -> Iterator[None]:
    """Restores what must not be in half precision after the module in the block is converted to another dtype.

    These are the states of metrics and the buffers that a task names in
    :class:`~dlo_framework.task_abilities.KeepsBuffers`. Sums in bf16 lose summands: from 256 on, adding 1 changes
    nothing. torchmetrics (1.0 to 1.9) keeps states in `module.half()` and the like, but not in `module.to(dtype)`,
    which Lightning (2.6) calls.

    Args:
        module: Module that the block converts and may move to another device.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [(metric, metric.dtype, _tensor_states(metric)) for metric in metrics]
    names = keeps.full_precision_buffers() if (keeps := find_ability(module, KeepsBuffers)) else ()
    buffers = {name: module.get_buffer(name) for name in names}
    yield
    for name, buffer in buffers.items():
        parent, _, own = name.rpartition(".")
        module.get_submodule(parent)._buffers[own] = buffer.to(module.get_buffer(name).device)
    for metric, dtype, states in before:
        metric._dtype = dtype  # Some metrics convert what they are given to it.
        for name, (default, value) in states.items():
            device = getattr(metric, name).device
            metric._defaults[name] = default.to(device)
            setattr(metric, name, value.to(device))


def _tensor_states(metric: Metric) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the default and the value of each state that is a tensor; the others are lists, empty before a batch."""
    return {
        name: (default, getattr(metric, name))
        for name, default in metric._defaults.items()
        if isinstance(default, torch.Tensor)
    }


class EmptyClipping:
    """Mixin of precision plug-ins that clips no gradients, where there are none on this rank.

    torch's function (2.11 to 2.15) raises then: after a skipped step, or if other ranks own all parameters.
    """

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips an optimizer's gradients to ``[-clip_val, clip_val]``, if there are any."""
        if collect_gradients(optimizer):
            super().clip_grad_by_value(optimizer, clip_val)  # type: ignore[misc]


class GuardedHooks:
    """Mixin of precision plug-ins that calls the hooks which may read and change gradients in a strategy's context.

    Attributes:
        guard_hooks: Function that returns a context for the hooks after a backward, and those before an optimizer's
            step, which it gets.
    """

    guard_hooks: Any

    def post_backward(self, *args: Any) -> Any:
        """Calls the hooks after a backward."""
        with self.guard_hooks():
            return super().post_backward(*args)  # type: ignore[misc]

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Calls the hooks before a step, in which Lightning (2.6) clips."""
        with self.guard_hooks(optimizer):
            super()._after_closure(model, optimizer)  # type: ignore[misc]


class ShardedClipping(GuardedHooks, EmptyClipping):
    """Mixin of precision plug-ins that clips sharded gradients by their norm over all ranks.

    Attributes:
        gradient_norm: Function that returns the 2-norm over all ranks of an optimizer's gradients.
    """

    gradient_norm: Any

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scales an optimizer's gradients so that their norm over all ranks is at most ``clip_val``."""
        # As in torch.nn.utils.clip_grad_norm_: never scales up, and does not wait for the device.
        scale = torch.clamp(clip_val / (self.gradient_norm(optimizer) + 1e-6), max=1.0)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in collect_gradients(optimizer):
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, on_device in by_device.items():
            multiply_all(on_device, scale.to(device))


class ShardedScaler(ShardedGradScaler):
    """Gradient scaler with one loss scale for all ranks, also for gradients in CPU memory and a scale on a device."""

    @classmethod
    def from_scaler(cls, scaler: torch.amp.GradScaler, device: str) -> ShardedScaler:
        """Returns a scaler with another scaler's settings."""
        return cls(
            device,
            init_scale=scaler.get_scale(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_factor=scaler.get_growth_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, torch.Tensor]:
        """Divides gradients by the scale; returns one flag for the gradients of all devices, on the scale's device.

        torch (2.11 to 2.15) copies the scale to the CPU, for gradients there, without waiting for the copy. And it
        sums a flag for each device over the ranks: a rank with scalars on the device, beside the offloaded gradients
        that all ranks have, would call one all-reduce more than the others.
        """
        home = inv_scale.device
        if home.type != "cpu" and any(gradient.device.type == "cpu" for gradient in collect_gradients(optimizer)):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        flags = [
            flag.to(home) for flag in super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16).values()
        ]
        return {home: torch.stack(flags).amax(0)}


class ShardedMixedPrecision(ShardedClipping, MixedPrecision):
    """Mixed precision (bf16 or fp16 by autocast) with clipping over all ranks."""


def with_sharded_clipping(
    plugin: Precision, gradient_norm: Any, guard_hooks: Any = contextlib.nullcontext
) -> Precision:
    """Returns a precision plugin for sharded gradients that otherwise behaves as the given one.

    With fp16, all ranks have one loss scale, and skip a step together if gradients overflow on any of them.

    Args:
        plugin: Precision plugin that Lightning chose.
        gradient_norm: Function that returns the 2-norm over all ranks of an optimizer's gradients.
        guard_hooks: Function that returns a context for the hooks after a backward and before an optimizer's step.
    """
    if isinstance(plugin, ShardedClipping):
        return plugin
    result: Any
    if isinstance(plugin, MixedPrecision):
        scaler: Any = plugin.scaler
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            scaler = ShardedScaler.from_scaler(scaler, plugin.device)
        half: Any = plugin.precision
        result = ShardedMixedPrecision(half, plugin.device, scaler)
    else:
        # Half and double precision keep their own conversions, so that their class is only extended.
        result = _extend(plugin, ShardedClipping, f"Sharded{type(plugin).__name__}")
    result.gradient_norm, result.guard_hooks = gradient_norm, guard_hooks
    return result


def without_empty_clipping(plugin: Precision) -> Precision:
    """Returns a precision plugin that clips by value also where a rank has no gradients, with the same state."""
    # Lightning (2.6) names the plugin's state in checkpoints by its class.
    return plugin if isinstance(plugin, EmptyClipping) else _extend(plugin, EmptyClipping, type(plugin).__qualname__)


def _extend(plugin: Precision, mixin: type, name: str) -> Any:
    """Returns a plugin whose class has a mixin, with the attributes of the given one."""
    extended: Any = object.__new__(type(name, (mixin, type(plugin)), {}))
    extended.__dict__.update(plugin.__dict__)
    return extended
