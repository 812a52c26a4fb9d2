"""Attention of timm's Vision Transformers under a mask of :mod:`dlo_framework.attention`.

Written for timm 1.0: modules of the class ``timm.layers.Attention`` are replaced by :class:`MaskedAttention` with the
same submodules, so that parameters keep their names. Tokens are numbered as timm orders them: class and register tokens
first, then patches row by row; a pattern's first block holds the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import Attention as TimmAttention
from torch import Tensor, nn

from dlo_framework.attention import Attention, AttentionMask, DenseSparsity
from dlo_framework.attention.attention_mask import bind_mask, find_heads, find_mask
from dlo_framework.attention.attention_options import Kernel, choose_kernel, log_choice
from dlo_framework.attention.masked_attention import masked_attention
from dlo_framework.errors import DloError

_KERNEL = "_dlo_attention_kernel"


class MaskedAttention(TimmAttention):
    """timm's attention under a mask; built from an existing module by :meth:`of`."""

    @classmethod
    def of(cls, module: TimmAttention, mask: AttentionMask, kernel: str) -> MaskedAttention:
        """Returns a module with the submodules of another.

        Args:
            module: Module of timm.
            mask: Mask.
            kernel: Name of the kernel.
        """
        found = cls.__new__(cls)
        found.__dict__.update(module.__dict__)
        bind_mask(found, mask)
        found.__dict__[_KERNEL] = kernel
        return found

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Returns the output, `[B, N, C]`, as timm's (1.0) `Attention.forward` with another core.

        Raises:
            DloError: If the caller passes a mask of its own.
        """
        if attn_mask is not None or is_causal:
            raise DloError("attention.mask must be the only mask of the model, got another one from it; remove it")
        mask = find_mask(self)
        assert mask is not None
        rows, tokens, _ = x.shape
        gate = getattr(self, "gate", None)
        gated = None if gate is None else gate(x).sigmoid()
        qkv = self.qkv(x).reshape(rows, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, heads, N, head_dim]
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        out = masked_attention(
            self.__dict__[_KERNEL],
            *(q, k, v, mask),
            heads=find_heads(self),
            scale=self.scale,
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        x = self.norm(out.transpose(1, 2).reshape(rows, tokens, self.attn_dim))
        x = self.proj(x if gated is None else x * gated)
        dropped: Tensor = self.proj_drop(x)
        return dropped


def read_option(option: Attention | Mapping[str, Any] | None) -> Attention | None:
    """Returns the option `attention:` of a task, also from the plain data of a checkpoint.

    Raises:
        DloError: If the kernel is only for language models.
    """
    found = Attention.from_settings(option) if isinstance(option, Mapping) else option
    if found is not None and found.kernel == "varlen":
        raise DloError("attention.kernel must be for images, got varlen, which packs documents; set kernel: auto")
    return found


def masked_vision_model(model: nn.Module, option: Attention | None, device: torch.device | None) -> Kernel | None:
    """Makes a timm model compute the mask of the option in place; returns the kernel, or None without a change.

    Args:
        model: Model; it may be on the meta device.
        option: Option of the task.
        device: Device of the run; None if the model will not run, so that no kernel is chosen.

    Raises:
        DloError: If the model's attention is not timm's common class, or the kernel does not run on the device.
    """
    if option is None or (option.mask is None and option.kernel == "auto"):
        return None
    places = [(name, part) for name, part in model.named_modules() if type(part) is TimmAttention]
    others = sorted(
        {type(part).__name__ for part in model.modules() if "Attention" in type(part).__name__}
        - {"Attention", "AttentionPoolLatent"}
    )
    if not places or others:
        raise DloError(
            "attention must be for models whose attention is timm.layers.Attention, such as vit_* and deit_*, got"
            f" {type(model).__name__} with {', '.join(others) or 'none'}; remove attention"
        )
    if option.kernel in ("sdpa", "eager") and option.mask is None:
        for _, part in places:
            part.fused_attn = option.kernel == "sdpa"  # type: ignore[misc]
        return Kernel(option.kernel, "the config sets it")
    heads = {part.num_heads for _, part in places}
    masks = {number: AttentionMask(option.mask or DenseSparsity(), causal=False, num_heads=number) for number in heads}
    kernel = Kernel("blocks", "any kernel has its shapes")
    if device is not None:
        parameter = next(model.parameters())
        is_mixed = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_mixed else parameter.dtype
        dropout = any(part.attn_drop.p for _, part in places)
        kernel = choose_kernel(option.kernel, masks[places[0][1].num_heads], device, dtype, dropout=dropout)
    for name, part in places:
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, MaskedAttention.of(part, masks[part.num_heads], kernel.name))
    return kernel


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
