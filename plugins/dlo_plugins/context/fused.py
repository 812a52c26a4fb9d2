"""torch's fused attention kernels that return the log-sum-exp, behind one signature.

`scaled_dot_product_attention` chooses among them and keeps the log-sum-exp to itself, so they are called by name (torch
2.11 to 2.15), as torch's own experimental ring attention does (`torch.distributed.tensor.experimental`). In backward
they are given the output and the log-sum-exp of all blocks together, and return this block's part of the gradients
(FlashAttention-2, Dao, 2023, arXiv 2307.08691, algorithm 2).

Shapes are those of `kernels`. What they return for queries that see no key is of no meaning.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_plugins.context.visibility import PairMask

_HALVES = (torch.bfloat16, torch.float16)
#: The compute capabilities from which FlashAttention-2 runs, and from which cuDNN's attention is the faster of the two.
_AMPERE, _HOPPER = (8, 0), (9, 0)
#: Queries by which the memory-efficient kernel pads its log-sum-exp.
_LSE_BLOCK = 32


class Kernel(Protocol):
    """A block's attention."""

    #: Whether it shares heads of keys among those of queries by itself.
    groups: bool

    def fits(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Whether it computes such a block."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: PairMask | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the log-sum-exp."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        mask: PairMask | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v."""


class CpuFlash:
    """FlashAttention on a CPU; takes masks."""

    groups = False

    def fits(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Whether it computes such a block."""
        return q.device.type == "cpu" and q.is_floating_point() and q.shape[-1] == v.shape[-1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: PairMask | None) -> Any:
        """Returns the output and the log-sum-exp."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=None if mask is None else mask.bias(q.dtype), scale=scale
        )

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        mask: PairMask | None,
    ) -> Any:
        """Returns the gradients of q, k and v."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=None if mask is None else mask.bias(q.dtype), scale=scale
        )


class CudaFlash:
    """FlashAttention-2 on CUDA: half precisions, no masks."""

    groups = True

    def fits(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Whether it computes such a block."""
        width = q.shape[-1]
        wide = width == v.shape[-1] and width <= 256 and width % 8 == 0
        if q.device.type != "cuda" or q.dtype not in _HALVES or not wide or masked:
            return False
        return torch.cuda.get_device_capability(q.device) >= _AMPERE

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: PairMask | None) -> Any:
        """Returns the output and the log-sum-exp."""
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        mask: PairMask | None,
    ) -> Any:
        """Returns the gradients of q, k and v."""
        # Of the random state nothing is read without dropout; no cumulative lengths: rows are of one length.
        state = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device)
        lengths = None, None, q.shape[2], k.shape[2]
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *state, scale=scale
        )


class CudaCudnn:
    """cuDNN's attention: half precisions, no masks; it returns its log-sum-exp as `[B, H, S, 1]`."""

    groups = False

    def fits(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Whether it computes such a block: where torch would take it for one, and it is the fastest."""
        if q.device.type != "cuda" or q.dtype not in _HALVES or masked or q.shape[-1] != v.shape[-1]:
            return False
        if torch.cuda.get_device_capability(q.device) < _HOPPER or not torch.backends.cuda.cudnn_sdp_enabled():
            return False
        block = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
        return torch.backends.cuda.can_use_cudnn_attention(block)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: PairMask | None) -> Any:
        """Returns the output and the log-sum-exp."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.squeeze(-1) if lse.ndim == q.ndim else lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        mask: PairMask | None,
    ) -> Any:
        """Returns the gradients of q, k and v."""
        # Without dropout the random state is not read; rows are of one length.
        state = torch.zeros((), dtype=torch.long, device=q.device), torch.zeros((), dtype=torch.long, device=q.device)
        lengths = None, None, q.shape[2], k.shape[2]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous()[..., None], *state, None, *lengths, 0.0, causal, scale=scale
        )


class CudaEfficient:
    """Memory-efficient attention on CUDA (Rabe & Staats, 2021, arXiv 2112.05682): also float32, and masks."""

    groups = False

    def fits(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Whether it computes such a block."""
        aligned = all(width % (8 if q.dtype in _HALVES else 4) == 0 for width in (q.shape[-1], v.shape[-1]))
        return q.device.type == "cuda" and q.dtype in (*_HALVES, torch.float32) and aligned

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: PairMask | None) -> Any:
        """Returns the output and the log-sum-exp."""
        bias = _bias(mask, q)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        mask: PairMask | None,
    ) -> Any:
        """Returns the gradients of q, k and v."""
        bias = _bias(mask, q)
        # As the kernel's own forward leaves it: infinity, so that what lies behind the last query weighs nothing.
        padded = F.pad(lse, (0, -lse.shape[-1] % _LSE_BLOCK), value=math.inf).contiguous()
        state = torch.zeros((), dtype=torch.long, device=q.device), torch.zeros((), dtype=torch.long, device=q.device)
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, padded, *state, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]


def kernel_for(q: Tensor, v: Tensor, masked: bool) -> Kernel | None:
    """Returns the fastest kernel for a block; None if there is none."""
    kernels: tuple[Kernel, ...] = (CpuFlash(), CudaCudnn(), CudaFlash(), CudaEfficient())
    return next((kernel for kernel in kernels if kernel.fits(q, v, masked)), None)


def _bias(mask: PairMask | None, q: Tensor) -> Tensor | None:
    """Returns what is added to the scores of each head."""
    return None if mask is None else mask.bias(q.dtype).expand(q.shape[0], q.shape[1], -1, -1)
