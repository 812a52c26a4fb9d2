"""Attention of timm's Vision Transformers under a mask of :mod:`dlo_framework.models.attention`.

Written for timm 1.0. Its attention classes call torch's ``scaled_dot_product_attention`` on all tokens of an image,
each with projections, rotations, gates and norms of its own. :class:`MaskedAttention` is put before such a class, and
computes those calls under the mask; parameters keep their names. Tokens are numbered as timm orders them: class and
register tokens first, then patches row by row; a pattern's first block holds the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention as TimmAttention
from timm.layers import AttentionPoolLatent, AttentionRope
from timm.layers.diff_attention import DiffAttention
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dlo_framework.errors import DloError
from dlo_framework.models.attention import Attention, AttentionMask, DenseSparsity
from dlo_framework.models.attention.attention_mask import bind_mask, find_heads, find_mask
from dlo_framework.models.attention.attention_options import Kernel, choose_kernel, log_choice
from dlo_framework.models.attention.masked_attention import Scores, masked_attention
from dlo_framework.models.autocast import autocast_dtype
from dlo_tasks.imagenet.sized_positions import derive

_KERNEL = "_dlo_attention_kernel"
#: Modules of timm that attend from all tokens of an image to all: a pattern of their sequence is one of the image.
_SEQUENCE = (
    *(TimmAttention, AttentionRope, DiffAttention, BeitAttention, EvaAttention, RelPosAttention),
    *(ParallelScalingBlock, DiffParallelScalingBlock),
)
#: Those that add a bias of positions to the scores, a dense matrix of tokens x tokens.
_BIASED = (BeitAttention, RelPosAttention)


class _MaskedCalls(TorchFunctionMode):
    """Computes ``scaled_dot_product_attention`` under the mask of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.count = module, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal or (attn_mask is not None and not attn_mask.is_floating_point()):
            raise DloError("attention.mask must be the only mask of the model, got another one from it; remove it")
        mask = find_mask(self.module)
        assert mask is not None
        with torch._C.DisableTorchFunction():
            return masked_attention(
                self.module.__dict__[_KERNEL],
                query.to(value.dtype),
                key.to(value.dtype),
                value,
                mask,
                heads=find_heads(self.module),
                scale=scale,
                dropout=dropout_p,
                scores=Scores(bias=attn_mask),
            )


class MaskedAttention:
    """Mixin for the class of an attention module of timm."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs timm's forward, in which attention is computed under the mask.

        Raises:
            DloError: If the model passes a mask of its own, or computes attention by other operations.
        """
        with _MaskedCalls(self) as calls:  # type: ignore[arg-type]
            attended = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not calls.count:
            raise DloError(
                f"attention.mask must have attention by scaled_dot_product_attention, got {type(self).__name__} without"
                " it; remove the mask"
            )
        return attended


def read_option(option: Attention | Mapping[str, Any] | None) -> Attention | None:
    """Returns the option `attention:` of a task, also from the plain data of a checkpoint.

    Raises:
        DloError: If the kernel is only for language models.
    """
    attention = Attention.from_settings(option) if isinstance(option, Mapping) else option
    if attention is not None and attention.kernel == "varlen":
        raise DloError("attention.kernel must be for images, got varlen, which packs documents; set kernel: auto")
    return attention


def masked_vision_model(model: nn.Module, option: Attention | None, device: torch.device | None) -> Kernel | None:
    """Makes a timm model compute the mask of the option in place; returns the kernel, or None without a change.

    Args:
        model: Model; it may be on the meta device.
        option: Option of the task.
        device: Device of the run; None if the model will not run, so that no kernel is chosen.

    Raises:
        DloError: If the model has attention of another kind, or the kernel does not run on the device.
    """
    if option is None or (option.mask is None and option.kernel == "auto"):
        return None
    places: list[Any] = [part for part in model.modules() if isinstance(part, _SEQUENCE)]
    others = sorted({type(part).__name__ for part in model.modules() if _attends_otherwise(part)})
    if not places or others:
        kinds = f"with {', '.join(others)}, within windows, a grid or channels" if others else "without attention"
        raise DloError(
            "attention must be for models that attend from all tokens of an image to all, such as vit_*, deit_*,"
            f" eva02_* and beit_*, got {type(model).__name__} {kinds}; remove attention"
        )
    for part in places:
        part.fused_attn = option.kernel != "eager"
    if option.kernel in ("sdpa", "eager") and option.mask is None:
        return Kernel(option.kernel, "the config sets it")
    heads: list[int] = [part.num_heads for part in places]
    pattern = option.mask or DenseSparsity()
    masks = {number: AttentionMask(pattern, causal=False, num_heads=number) for number in heads}
    kernel = Kernel("blocks", "any kernel has its shapes")
    if device is not None:
        dtype = autocast_dtype(device.type) or next(model.parameters()).dtype
        dropout = any(part.attn_drop.p for part in places)
        biased = any(isinstance(part, _BIASED) for part in places)
        kernel = choose_kernel(option.kernel, masks[heads[0]], device, dtype, dropout=dropout, biased=biased)
    for part, number in zip(places, heads, strict=True):
        derive(part, MaskedAttention)
        bind_mask(part, masks[number])
        part.__dict__[_KERNEL] = kernel.name
    return kernel


def _attends_otherwise(part: nn.Module) -> bool:
    """Returns whether a module computes attention of another kind than over an image's tokens."""
    attends = hasattr(part, "fused_attn") or "Attention" in type(part).__name__
    return attends and not isinstance(part, (*_SEQUENCE, AttentionPoolLatent))


def log_kernel(model: nn.Module, kernel: Kernel | None, tokens: int | None = None) -> None:
    """Logs what computes the attention of a model, and why; nothing for a model without an option.

    Args:
        model: Model.
        kernel: Result of :func:`masked_vision_model`.
        tokens: Tokens of an image, if known.
    """
    if kernel is not None:
        masks = (find_mask(module) for module in model.modules())
        log_choice(kernel, next((mask for mask in masks if mask is not None), None), tokens)
