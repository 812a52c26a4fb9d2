"""Images of other sizes for timm's models: which way serves a model.

* Vision Transformers accept them by timm's ``dynamic_img_size`` (bicubic, antialiased).
* Swin Transformers (Liu et al. 2021, arXiv 2103.14030, and V2, 2022, arXiv 2111.09883) keep the windows and tables of
  biases that they were built with. More windows cover a larger image, and maps that they do not fill are padded.
* Other families have modules of their own: :mod:`~dlo_tasks.imagenet.sized_positions` and
  :mod:`~dlo_tasks.imagenet.sized_windows`.
* BoTNet interpolates its tables of offsets linearly; the blocks of a HaloNet must divide its maps.
"""

from __future__ import annotations

from typing import Any

from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.format import Format
from timm.layers.halo_attn import HaloAttn
from timm.layers.hybrid_embed import HybridEmbed
from timm.layers.patch_embed import PatchEmbed
from timm.models.byobnet import ByobNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.model_sizes import ImageModels
from dlo_tasks.imagenet.size_substitution import derive, substituted
from dlo_tasks.imagenet.sized_positions import free_positions, position_multiples
from dlo_tasks.imagenet.sized_windows import free_windows, window_multiples

_Swin = SwinTransformer | SwinTransformerV2 | SwinTransformerV2Cr


class TimmModels(ImageModels):
    """Transformers of timm, and what convolutional networks with attention need."""

    def accept_any_size(self, part: nn.Module) -> None:
        """Sets ``dynamic_img_size`` of a ViT and a Swin, and derives the classes of other models and their parts."""
        if isinstance(part, VisionTransformer):
            _free_vit(part)
        elif isinstance(part, _Swin):
            _free_swin(part)
        elif isinstance(part, BottleneckAttn):
            derive(part, _SizedBottleneckAttn)
        else:
            free_windows(part) or free_positions(part)

    def size_multiples(self, part: nn.Module) -> list[int]:
        """Returns the sides of a model's patch, its stride, or those that its windows divide."""
        if isinstance(part, _Swin):
            patches: Any = part.patch_embed
            return [int(side) for side in patches.patch_size]
        if isinstance(part, VisionTransformer):
            return [int(side) for side in part.patch_embed.feat_ratio(as_scalar=False)]
        if isinstance(part, ByobNet):
            return _halo_multiples(part)
        if isinstance(part, PatchEmbed):  # In any model: it pads images or refuses a rest.
            return [] if part.dynamic_img_pad else [int(side) for side in part.patch_size]
        return [*window_multiples(part), *position_multiples(part)]


def _halo_multiples(model: ByobNet) -> list[int]:
    """Returns the divisors that the blocks of halo attention set, each in the map of its stage."""
    strides = {f"{known['module']}.": int(known["reduction"]) for known in model.feature_info}
    last = max(strides.values())
    return [
        part.block_size * next((strides[stage] for stage in strides if name.startswith(stage)), last)
        for name, part in model.named_modules()
        if isinstance(part, HaloAttn)
    ]


class _SizedBottleneckAttn:
    """BoTNet's attention: a table of offsets in each direction, interpolated linearly."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns attention over ``x``, [B, C, H, W]."""
        part: Any = self
        table, sides = part.pos_embed, (x.shape[2], x.shape[3])
        values: dict[str, Any] = {}
        if sides != (table.height, table.width):
            values = {"height": sides[0], "width": sides[1]}
            for name, side in (("height_rel", sides[0]), ("width_rel", sides[1])):
                offsets = getattr(table, name).T[None]  # [1, dim_head, 2 * side - 1]
                values[name] = F.interpolate(offsets, 2 * side - 1, mode="linear", align_corners=False)[0].T
        with substituted(table, values):
            found: Tensor = super().forward(x)  # type: ignore[misc]
        return found


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
