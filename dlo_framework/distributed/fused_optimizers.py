"""Fused AdamW, Adam and SGD of torch (one kernel for all tensors), used by default on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

#: Keys of a parameter group in torch's optimizers that choose the implementation.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
_FUSED = (Adam, AdamW, SGD)
#: Dtypes for which the CPU's fused kernels round as the loop over tensors does; for halves they round less often.
_ON_CPU = (torch.float32, torch.float64)


def prefer_fused(optimizer: Optimizer, module: nn.Module | None = None, *, on_cpu: bool = False) -> None:
    """Switches torch's AdamW, Adam or SGD to the fused step, unless the user has chosen an implementation.

    Plain AdamW is a loop over tensors on a CPU, and a few passes over memory on CUDA. A run on CPUs only keeps the
    loop: the two differ in the last bit, and a run on several ranks must equal a plain loop bit by bit.

    Args:
        optimizer: Optimizer as configured; optimizers of other classes are not changed.
        module: Module that is trained. With sparse gradients, which the fused step does not take, nothing changes.
        on_cpu: Whether to use the fused step for parameters in CPU memory too, such as offloaded ones.
    """
    if type(optimizer) not in _FUSED or not all(_takes(group, on_cpu) for group in optimizer.param_groups):
        return
    if module is not None and any(getattr(part, "sparse", False) for part in module.modules()):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    if isinstance(optimizer, SGD):
        optimizer.register_step_pre_hook(_complete_momentum)


def disable_fused_unscale(optimizer: Any) -> None:
    """Makes the gradient scaler unscale gradients before the step of a fused optimizer, which could do so itself.

    Lightning (2.6) refuses to clip the gradients of an optimizer that unscales, also in bf16, where nothing is scaled;
    and ranks with shards would each decide alone whether to skip a step.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False


def own_implementation(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's choice of implementation, which a loaded checkpoint must not change."""
    return {key: group[key] for key in IMPLEMENTATIONS if key in group}


def _takes(group: dict[str, Any], on_cpu: bool) -> bool:
    """Whether a parameter group can take the fused step, and the user has not chosen an implementation."""
    chosen = any(group.get(key) for key in IMPLEMENTATIONS) or group.get("foreach") is False
    chosen = chosen or group.get("fused") is False
    if chosen or any(isinstance(group.get(key), Tensor) for key in ("lr", "weight_decay")):
        return False
    if group.get("momentum") and group.get("dampening"):  # See _complete_momentum.
        return False
    return all(
        p.is_floating_point() and (p.is_cuda or (on_cpu and p.device.type == "cpu" and p.dtype in _ON_CPU))
        for p in group["params"]
    )


def _complete_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Gives a zero momentum to SGD's parameters that get their first gradient later than others.

    torch's fused SGD (2.11 to 2.15) raises where some parameters have a momentum and others do not. Without dampening,
    the first step from a zero momentum equals the step without one.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        stepped = [p for p in group["params"] if p.grad is not None]
        lacking = [p for p in stepped if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if lacking and len(lacking) < len(stepped):
            for parameter in lacking:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
