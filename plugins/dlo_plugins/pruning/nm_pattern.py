"""N:M sparsity: in each group of M consecutive weights along the input dim, N are kept.

Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", 2021, arXiv 2102.04010
(SR-STE). Groups are along the input features of a linear layer and the input channels of a convolution, as NVIDIA's
sparse tensor cores need them for 2:4.

Semi-structured (2:4) kernels: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv 2104.08378. They
are torch's (``torch.sparse.to_sparse_semi_structured``), for NVIDIA GPUs from Ampere on, in half precision or int8.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError


@dataclass(frozen=True)
class NMPattern:
    """Pattern of N kept weights in each group of M.

    Attributes:
        n: Number of kept weights in a group.
        m: Size of a group.
    """

    n: int
    m: int

    @classmethod
    def parse(cls, text: str) -> NMPattern | None:
        """Returns the pattern of a config's value, such as ``2:4``; None for ``none``.

        Raises:
            DloError: If it has another form, or N is not in [1, M).
        """
        if text == "none":
            return None
        found = re.fullmatch(r"(\d+):(\d+)", str(text).strip())
        if found is None:
            # YAML 1.1 reads an unquoted 2:4 as the number 124.
            raise DloError(f"Prune: pattern must be none or n:m in quotes, such as '2:4', got {text!r}; write it so")
        n, m = int(found[1]), int(found[2])
        if not 1 <= n < m:
            raise DloError(f"Prune: pattern n:m must have 1 <= n < m, got {text}; '2:4' keeps two of four")
        return cls(n, m)

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that is pruned."""
        return 1 - self.n / self.m

    def __str__(self) -> str:
        """Returns the config's form."""
        return f"{self.n}:{self.m}"


def keep_largest(scores: Tensor, n: int) -> Tensor:
    """Returns which elements are among the n largest of the last dim; of equal ones the first are kept.

    Args:
        scores: Scores, ``[..., m]``.
        n: Number of elements to keep.

    Returns:
        bool, in the shape of the scores.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :n], True)


def nm_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Returns the mask of a tensor's N:M pattern.

    Args:
        scores: Scores, such as the weights' magnitudes, of any shape.
        pattern: Pattern.
        dim: Dimension along which groups are consecutive; its size is a multiple of M.

    Returns:
        bool, in the shape of the scores; True for kept elements.
    """
    moved = scores.movedim(dim, -1)
    assert moved.shape[-1] % pattern.m == 0
    groups = moved.reshape(*moved.shape[:-1], -1, pattern.m)
    return keep_largest(groups, pattern.n).reshape(moved.shape).movedim(-1, dim)


def follows_pattern(weight: Tensor, pattern: NMPattern, dim: int) -> bool:
    """Returns whether each group of M has at least M - N zeros."""
    moved = weight.movedim(dim, -1)
    groups = (moved == 0).reshape(*moved.shape[:-1], -1, pattern.m)
    return bool((groups.sum(-1) >= pattern.m - pattern.n).all())


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
