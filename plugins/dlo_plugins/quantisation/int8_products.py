"""Matrix products of rows that are rounded to int8.

SwitchBack: Stable and low-precision training for large-scale vision-language models. Wortsman et al., 2023,
arXiv 2304.13013. Departures: all three products are int8 by default, as in torchao's prototype (0.18); scales are per
row of either factor. torchao's is a tensor subclass of the weight, which strategies other than FSDP do not expect.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_plugins.quantisation.shared_scales import maximum

#: Multiple of each dim that cuBLAS takes for int8; it also takes no fewer than 17 rows.
_CUDA_MULTIPLE, _CUDA_ROWS = 8, 24


def multiply_rows(a: Tensor, b: Tensor, group: str = "") -> Tensor:
    """Returns `a @ b.T` with both rounded to int8, in single precision.

    Args:
        a: Left factor, `[M, K]`; each row has a scale.
        b: Right factor, `[N, K]`; each row has a scale.
        group: Name of the process group whose ranks have the rows' other slices; empty for full rows.
    """
    (rounded_a, scales_a), (rounded_b, scales_b) = round_rows(a, group), round_rows(b, group)
    if a.device.type == "cuda":
        rounded_a = _pad(rounded_a, max(_CUDA_ROWS, _multiple(len(a))), _multiple(a.shape[1]))
        rounded_b = _pad(rounded_b, _multiple(len(b)), _multiple(b.shape[1]))
    product = torch._int_mm(rounded_a, rounded_b.t())[: len(a), : len(b)]
    return product.float() * scales_a * scales_b.t()


def round_rows(x: Tensor, group: str = "") -> tuple[Tensor, Tensor]:
    """Returns a matrix in int8, and the scale of each row, `[M, 1]`, in single precision.

    Args:
        x: Matrix, `[M, K]`.
        group: Name of the process group whose ranks have the rows' other slices; empty for full rows.
    """
    x = x.detach().float()
    largest = x.abs().amax(1, keepdim=True)
    scales = (maximum(largest, group) if group else largest) / 127
    return (x / scales.masked_fill(scales == 0, 1)).round().to(torch.int8).contiguous(), scales


def _multiple(size: int) -> int:
    return -(-size // _CUDA_MULTIPLE) * _CUDA_MULTIPLE


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, columns - x.shape[1], 0, rows - len(x))) if x.shape != (rows, columns) else x
