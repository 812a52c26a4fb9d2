"""torch's semi-structured (2:4) kernels for the linear layers of a pruned model.

Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv 2104.08378. The kernels are in torch
(``torch.sparse.to_sparse_semi_structured``); they run on NVIDIA GPUs from Ampere on, in half precision or int8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.pruning.nm_pattern import NMPattern, follows_pattern

#: Weights whose sizes are not multiples of this are not supported by the kernels in half precision.
_ROWS, _COLUMNS = 32, 64


def check_kernels(device: torch.device, precision: str) -> None:
    """Checks that the semi-structured kernels run on a device in a precision.

    Raises:
        DloError: If they do not; dense kernels run masked weights everywhere.
    """
    use_dense = "set kernels: dense, which runs masked weights everywhere"
    if device.type != "cuda" or torch.version.hip is not None:
        raise DloError(
            f"Prune: kernels: semi_structured must have an NVIDIA GPU, for which torch has them, got a {device.type}"
            f" device; {use_dense}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise DloError(
            "Prune: kernels: semi_structured must have a GPU of compute capability 8.0 or later, got"
            f" {major}.{minor}; {use_dense}"
        )
    if precision not in ("bf16-true", "16-true"):
        raise DloError(
            "Prune: kernels: semi_structured must have weights in half precision, trainer.precision bf16-true or"
            f" 16-true, got {precision}; set it, or {use_dense.removeprefix('set ')}"
        )


def use_sparse_kernels(module: nn.Module, names: Sequence[str]) -> int:
    """Replaces the weights of linear layers by torch's compressed ones, in place, for inference.

    Args:
        module: Module with full parameters on a GPU.
        names: Names of the pruned weights; those of other layers, or in sizes without a kernel, stay dense.

    Returns:
        Number of layers with compressed weights.

    Raises:
        DloError: If a weight does not follow the 2:4 pattern.
    """
    from torch.sparse import to_sparse_semi_structured

    count = 0
    for name in names:
        owner = module.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, nn.Linear):
            continue
        weight = owner.weight
        if weight.shape[0] % _ROWS or weight.shape[1] % _COLUMNS:
            continue
        if not follows_pattern(weight.detach(), NMPattern(2, 4), 1):
            raise DloError(
                f"Prune: weights must follow 2:4 for kernels: semi_structured, got {name} with more than two nonzero in"
                " a group; evaluate a checkpoint of a run with pattern: '2:4', or set kernels: dense"
            )
        owner.weight = nn.Parameter(to_sparse_semi_structured(weight.detach()), requires_grad=False)
        count += 1
    return count
