"""Joint 2-norm of gradients, also of those that ranks have together; every engine computes it by :func:`total_norm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

#: Most elements whose squares are added up one after the other.
_ROW = 1 << 14


def collect_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Returns the gradients of the tensors that an optimizer steps."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(
    tensors: Iterable[Tensor], device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the joint 2-norm of gradients or other tensors, in single precision at least; for DTensors, of the full.

    Args:
        tensors: Tensors of any devices and dtypes.
        device: Device of the result; by default that of the tensors.
        group: Ranks that have different tensors, of which the norm is that of all together; they all call the function,
            those without tensors too. None for this rank's alone.
    """
    parts: list[Tensor] = []
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:  # Few calls of Python functions: it runs in every step.
        if isinstance(tensor, DTensor):
            by_mesh.setdefault(tensor.device_mesh, []).append(tensor)
        else:
            parts += [tensor] if tensor.numel() < 2 * _ROW else _split(tensor)
    # torch's function (2.11 to 2.15) computes the same, but one by one on CPUs.
    norms = list(torch._foreach_norm(parts)) if parts else []
    norms += [get_total_norm(same).full_tensor() for same in by_mesh.values()]  # type: ignore[attr-defined]
    if norms:
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms]).detach()
        norm = torch.linalg.vector_norm(stacked, dtype=torch.promote_types(stacked.dtype, torch.float32)).to(device)
    else:
        norm = torch.zeros((), device=device)
    if group is None:
        return norm
    squared = norm.double().square()  # Ranks without tensors know nothing of the others' dtype.
    dist.all_reduce(squared, group=group)
    return squared.sqrt().to(norm.dtype)


def _split(tensor: Tensor) -> list[Tensor]:
    """Returns tensors with the same joint 2-norm, for which torch computes it precisely.

    torch (2.11 to 2.15) adds up a CPU tensor's squares in the order of its elements: for 16 million elements in single
    precision the norm is off by 6e-4. So the norms of rows are computed first, and then their norm, in the same time.
    """
    rows = tensor.numel() // _ROW
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return [tensor]
    flat = tensor.view(-1)
    return [torch.linalg.vector_norm(flat[: rows * _ROW].view(rows, _ROW), dim=1), flat[rows * _ROW :]]
