"""torch's fused AdamW, Adam and SGD: one kernel for all tensors, as the default where it gives the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

#: How a group of torch's optimizers says which implementation steps it.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
_FUSED = (Adam, AdamW, SGD)
#: What the CPU's kernels round as the loop over tensors does; of halves they round less often.
_ON_CPU = (torch.float32, torch.float64)


def prefer_fused(optimizer: Optimizer, module: nn.Module | None = None, *, on_cpu: bool = False) -> None:
    """Has one of torch's AdamW, Adam and SGD take its fused step, unless its user has chosen an implementation.

    Plain AdamW is a loop over tensors on a CPU, and a few passes over memory on CUDA. Where all of a run is on a CPU
    the loop stays: the two differ in a last bit, and a run on several ranks is to be a plain loop's to the bit.

    Args:
        optimizer: As configured; any other is left as it is.
        module: What is trained; one with sparse gradients, which the fused step does not take, is left as it is.
        on_cpu: Whether parameters in the CPU's memory are stepped so too, as an accelerator's are that are offloaded.
    """
    if type(optimizer) not in _FUSED or not all(_takes(group, on_cpu) for group in optimizer.param_groups):
        return
    if module is not None and any(getattr(part, "sparse", False) for part in module.modules()):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    if isinstance(optimizer, SGD):
        optimizer.register_step_pre_hook(_complete_momentum)


def unscale_apart(optimizer: Any) -> None:
    """Has gradients unscaled before an optimizer's step, also where it was built as fused and could do that itself.

    Lightning (2.6) refuses to clip the gradients of one that could, in bf16 too, where nothing is scaled; and ranks
    with shards would each skip a step on their own.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False


def own_implementation(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's choice of implementation: it is the run's, not that of a checkpoint it goes on from."""
    return {key: group[key] for key in IMPLEMENTATIONS if key in group}


def _takes(group: dict[str, Any], on_cpu: bool) -> bool:
    """Whether a parameter group can take the fused step, and nobody has chosen."""
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
    """Gives SGD's parameters that get their first gradient later than others a momentum of zero.

    torch's fused SGD (2.11 to 2.15) raises where some have one and others do not. Without dampening, a first step from
    zero is that from none.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        stepped = [p for p in group["params"] if p.grad is not None]
        lacking = [p for p in stepped if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if lacking and len(lacking) < len(stepped):
            for parameter in lacking:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
