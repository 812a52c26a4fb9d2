"""Precision for strategies that hold gradients in shards: clipping by the norm over all ranks, one loss scale."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer


class ShardedClipping:
    """Clips by the norm of the whole gradient, of which each rank holds a part.

    Attributes:
        gradient_norm: returns the 2-norm over all ranks of an optimizer's gradients.
    """

    gradient_norm: Any

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scales an optimizer's gradients so that their norm over all ranks is at most ``clip_val``."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # As torch.nn.utils.clip_grad_norm_ has it: never up, and no wait for the device.
        scale = torch.clamp(clip_val / (self.gradient_norm(optimizer) + 1e-6), max=1.0)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, held in by_device.items():
            torch._foreach_mul_(held, scale.to(device))


class ShardedScaler(ShardedGradScaler):
    """One loss scale for all ranks, also of gradients in CPU memory whose scale is on an accelerator."""

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, device: str) -> ShardedScaler:
        """Returns one that scales as the given one would."""
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
        """Divides gradients by the scale.

        torch (2.11 to 2.15) copies the scale to gradients in CPU memory without waiting until it is there.
        """
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        if any(gradient.device.type == "cpu" for gradient in gradients):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class ShardedMixedPrecision(ShardedClipping, MixedPrecision):
    """bf16 or fp16 by autocast."""


def sharded(plugin: Precision, gradient_norm: Any) -> Precision:
    """Returns a precision plugin that does as the given one, on gradients that are held in shards.

    With fp16, a step is skipped on all ranks if any of them has overflown, and all scale their losses alike.

    Args:
        plugin: as Lightning chose it.
        gradient_norm: returns the 2-norm over all ranks of an optimizer's gradients.
    """
    if isinstance(plugin, ShardedClipping):
        return plugin
    result: Any
    if isinstance(plugin, MixedPrecision):
        scaler: Any = plugin.scaler
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            scaler = ShardedScaler.like(scaler, plugin.device)
        half: Any = plugin.precision
        result = ShardedMixedPrecision(half, plugin.device, scaler)
    else:
        # Half and double precision differ from single by what they convert, which stays theirs.
        kind: Any = type(f"Sharded{type(plugin).__name__}", (ShardedClipping, type(plugin)), {})
        result = object.__new__(kind)
        result.__dict__.update(plugin.__dict__)
    result.gradient_norm = gradient_norm
    return result
