"""Images of other sizes for timm's models.

* Vision Transformers accept them by timm's ``dynamic_img_size`` (bicubic, antialiased).
* CoAtNet (Dai, Liu, Le, Tan 2021, arXiv 2106.04803) interpolates its biases bilinearly, as the paper does for
  fine-tuning at a larger size.
* Swin Transformers (Liu et al. 2021, arXiv 2103.14030, and V2, 2022, arXiv 2111.09883) keep the windows and tables of
  biases that they were built with. More windows cover a larger image, and maps that they do not fill are padded.
"""

from __future__ import annotations

from typing import Any

from timm.layers.format import Format
from timm.layers.hybrid_embed import HybridEmbed
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp, gen_relative_log_coords
from timm.models.maxxvit import Attention2d, MaxxVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.model_sizes import ImageModels

_Swin = SwinTransformer | SwinTransformerV2 | SwinTransformerV2Cr


class TimmModels(ImageModels):
    """ViTs, CoAtNets and Swin Transformers."""

    def accept_any_size(self, part: nn.Module) -> None:
        """Sets ``dynamic_img_size`` of a ViT and a Swin, and replaces the class of a CoAtNet's attention."""
        if isinstance(part, VisionTransformer):
            _free_vit(part)
        elif isinstance(part, _Swin):
            _free_swin(part)
        elif type(part) is Attention2d and isinstance(part.rel_pos, RelPosBias | RelPosMlp):
            # The object stays the same, and with it its parameters, hooks and the strategy's references.
            part.__class__ = AnySizeAttention2d

    def size_multiples(self, part: nn.Module) -> list[int]:
        """Returns the sides of a ViT's or a Swin's patch, or the stride of a CoAtNet."""
        if isinstance(part, _Swin):
            patches: Any = part.patch_embed
            return [int(side) for side in patches.patch_size]
        if isinstance(part, VisionTransformer):
            return [int(side) for side in part.patch_embed.feat_ratio(as_scalar=False)]
        return [int(part.feature_info[-1]["reduction"])] if isinstance(part, MaxxVit) else []


def _free_vit(vit: VisionTransformer) -> None:
    """Sets what ``dynamic_img_size=True`` sets at construction.

    timm 1.0.31 has no setter for it: ``VisionTransformer.__init__`` passes ``strict_img_size=False`` and
    ``output_fmt="NHWC"`` to its patch embedding, which turns ``flatten`` off, and notes ``dynamic_img_size``.
    """
    patches = vit.patch_embed
    if vit.dynamic_img_size or not isinstance(patches, PatchEmbed | HybridEmbed):
        return
    patches.strict_img_size = False
    patches.flatten = False
    patches.output_fmt = Format.NHWC
    vit.dynamic_img_size = True  # type: ignore[misc]  # Final for TorchScript


def _free_swin(swin: Any) -> None:
    """Sets what ``strict_img_size=False`` sets at construction.

    timm 1.0.31 has no setter for it: the constructors pass it to the patch embedding, and ``dynamic_mask`` to each
    block, which then masks its shifted windows by the size of its input.
    """
    swin.patch_embed.strict_img_size = False
    swin.dynamic_img_size = True
    for block in swin.modules():
        if hasattr(block, "dynamic_mask") and hasattr(block, "shift_size"):
            block.dynamic_mask = True


class AnySizeAttention2d(Attention2d):
    """timm's ``Attention2d`` (1.0.31) with a bias that fits the feature map at any size."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns attention over ``x``, [B, C, H, W]; timm's own if H and W are those it was built for."""
        rel_pos: Any = self.rel_pos
        height, width = x.shape[-2:]
        if (height, width) == tuple(rel_pos.window_size):
            return super().forward(x, shared_rel_pos)
        batch = x.shape[0]
        if self.head_first:
            parts = self.qkv(x).view(batch, self.num_heads, self.dim_head * 3, -1).chunk(3, dim=2)
        else:
            parts = self.qkv(x).reshape(batch, 3, self.num_heads, self.dim_head, -1).unbind(1)
        query, key, value = (part.transpose(-1, -2).contiguous() for part in parts)  # [B, heads, HW, dim_head]
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias_at(rel_pos, height, width),
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(mixed.transpose(-1, -2).reshape(batch, -1, height, width)))


def bias_at(rel_pos: RelPosBias | RelPosMlp, height: int, width: int) -> Tensor:
    """Returns the attention bias of a feature map, [1, heads, HW, HW].

    A table is interpolated bilinearly. A small network that makes the table (CoAtNet-rmlp) makes it for this map, as in
    timm's ``set_window_size``.
    """
    size = 2 * height - 1, 2 * width - 1
    if isinstance(rel_pos, RelPosMlp):
        weight = rel_pos.mlp.fc1.weight
        coordinates = gen_relative_log_coords(
            (height, width), rel_pos.pretrained_window_size, rel_pos.mode, device=weight.device, dtype=weight.dtype
        )
        bias = expand_relative_bias(rel_pos.mlp(coordinates))
        bias = rel_pos.bias_act(bias)
        return bias if rel_pos.bias_gain is None else bias * rel_pos.bias_gain
    rows, columns = (2 * side - 1 for side in rel_pos.window_size)
    table = rel_pos.relative_position_bias_table.view(1, rows, columns, -1).permute(0, 3, 1, 2)
    # Not antialiased: so it has a deterministic gradient on CUDA, and at up to half the size every entry is used.
    table = F.interpolate(table, size, mode="bilinear", align_corners=False)
    return expand_relative_bias(table[0].permute(1, 2, 0))


def expand_relative_bias(table: Tensor) -> Tensor:
    """Returns the bias of each pair of cells, [1, heads, HW, HW], from that of each relative position.

    Args:
        table: Bias of each relative position, [2H - 1, 2W - 1, heads]; the middle is that of a cell and itself.
    """
    height, width = (table.shape[0] + 1) // 2, (table.shape[1] + 1) // 2
    shifted = table.unfold(0, height, 1).unfold(1, width, 1)  # [H, W, heads, H, W]: [y, x, :, a, b] is at y+a, x+b
    return shifted.flip(3, 4).permute(2, 0, 1, 3, 4).reshape(1, -1, height * width, height * width)
