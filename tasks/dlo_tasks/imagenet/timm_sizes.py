"""Images of other sizes for timm's (1.0.31) models: which way serves a model.

* Vision Transformers accept them by timm's ``dynamic_img_size`` (bicubic, antialiased).
* Swin Transformers (Liu et al. 2021, arXiv 2103.14030, and V2, 2022, arXiv 2111.09883) keep the windows and tables of
  biases that they were built with. More windows cover a larger image, and maps that they do not fill are padded.
* CoAtNet (Dai, Liu, Le, Tan 2021, arXiv 2106.04803) attends over the whole map. Its biases are interpolated bilinearly,
  as the paper does for fine-tuning at a larger size.
* MaxViT (Tu et al. 2022, arXiv 2204.01697) and GCViT (Hatamizadeh et al. 2022, arXiv 2206.09959) keep the number of
  their windows, as timm's ``set_input_size`` does: windows grow with the image, with biases as CoAtNet's.
* Other families with tables of positions: :mod:`~dlo_tasks.imagenet.sized_positions`.
* BoTNet interpolates its tables of offsets linearly; the blocks of a HaloNet must divide its maps.
"""

from __future__ import annotations

from typing import Any

from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.format import Format
from timm.layers.halo_attn import HaloAttn
from timm.layers.hybrid_embed import HybridEmbed
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_rel import (
    RelPosBias,
    RelPosBiasTf,
    RelPosMlp,
    gen_relative_log_coords,
)
from timm.models.byobnet import ByobNet
from timm.models.gcvit import GlobalContextVit
from timm.models.maxxvit import (
    Attention2d,
    AttentionCl,
    MaxxVit,
    ParallelPartitionAttention,
    PartitionAttention2d,
    PartitionAttentionCl,
)
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.models.model_sizes import ImageModels, Size
from dlo_tasks.imagenet.sized_positions import SizedModule, derive, free_positions, position_multiples, substituted

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
            attended: Tensor = super().forward(x)  # type: ignore[misc]
        return attended


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


# --- windows of CoAtNet, MaxViT and GCViT -------------------------------------------------------------------------

_Partition = PartitionAttentionCl | PartitionAttention2d | ParallelPartitionAttention
_Biases = RelPosBias | RelPosBiasTf | RelPosMlp
_WINDOW, _WINDOWS = "_dlo_window", "_dlo_windows"


def free_windows(model: nn.Module) -> bool:
    """Makes a model of these families accept any size that its windows divide; returns whether it is one."""
    timm_model: Any = model
    if isinstance(model, GlobalContextVit):
        for stage in timm_model.stages:
            for block in stage.blocks:
                _keep_windows(block, stage.feat_size, block.window_size)
                derive(block, _SizedBlock)
                derive(block.attn.rel_pos, _SizedBias)
        return True
    if not isinstance(model, MaxxVit):
        return False
    for stage, known in zip(timm_model.stages, timm_model.feature_info[1:], strict=True):
        cells = tuple(side // known["reduction"] for side in timm_model.img_size)
        for part in stage.modules():
            if isinstance(part, _Partition):
                _keep_windows(part, cells, part.partition_size)
                derive(part, _SizedPartition)
            elif isinstance(part, Attention2d | AttentionCl) and isinstance(part.rel_pos, _Biases):
                derive(part, _SizedAttention)
                derive(part.rel_pos, _SizedBias)
    return True


def window_multiples(model: nn.Module) -> list[int]:
    """Returns the divisors of a model's heights and widths: each map must have its number of windows."""
    timm_model: Any = model
    if isinstance(model, GlobalContextVit):
        maps = [(4 * 2**level, stage.blocks) for level, stage in enumerate(timm_model.stages)]
        return [stride * count for stride, blocks in maps for block in blocks for count in _windows(block)]
    if not isinstance(model, MaxxVit):
        return []
    multiples = [int(timm_model.feature_info[-1]["reduction"])]
    for stage, known in zip(timm_model.stages, timm_model.feature_info[1:], strict=True):
        parts = [part for part in stage.modules() if isinstance(part, _Partition)]
        multiples += [known["reduction"] * count for part in parts for count in _windows(part)]
    return multiples


def _keep_windows(part: nn.Module, cells: tuple[int, ...], window: tuple[int, ...]) -> None:
    sides = zip(cells, window, strict=True)
    vars(part).setdefault(_WINDOWS, tuple(max(1, map_side // side) for map_side, side in sides))


def _windows(part: nn.Module) -> Size:
    """Returns the rows and columns of windows in a map; they stay at other sizes."""
    windows: Size = vars(part).get(_WINDOWS, (1, 1))
    return windows


class _SizedPartition(SizedModule):
    """MaxViT's attention in windows, or in a grid of cells."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        part: Any = self
        sides = x.shape[-2:] if isinstance(part, PartitionAttention2d) else x.shape[1:3]
        return {"partition_size": tuple(side // count for side, count in zip(sides, _windows(part), strict=True))}


class _SizedAttention(SizedModule):
    """Attention over a window, [B, H, W, C] or [B, C, H, W], which names it for its biases."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        part: Any = self
        vars(part.rel_pos)[_WINDOW] = tuple(x.shape[-2:] if isinstance(part, Attention2d) else x.shape[1:3])
        return {}


class _SizedBlock(SizedModule):
    """A block of GCViT, [B, H, W, C]."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        part: Any = self
        window = tuple(side // count for side, count in zip(x.shape[1:3], _windows(part), strict=True))
        vars(part.attn.rel_pos)[_WINDOW] = window
        return {"window_size": window}


class _SizedBias:
    """Biases for the window that their attention has named."""

    def get_bias(self) -> Tensor:
        """Returns the bias of each pair of cells, [1, heads, HW, HW]."""
        part: Any = self
        window = vars(part).get(_WINDOW, tuple(part.window_size))
        if window == tuple(part.window_size):
            bias: Tensor = super().get_bias()  # type: ignore[misc]
            return bias
        return bias_at(part, *window)


def bias_at(rel_pos: _Biases, height: int, width: int) -> Tensor:
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
    table: Tensor = rel_pos.relative_position_bias_table
    by_head = isinstance(rel_pos, RelPosBiasTf)  # [heads, 2H - 1, 2W - 1]
    table = table[None] if by_head else table.view(1, rows, columns, -1).permute(0, 3, 1, 2)
    # Not antialiased: so it has a deterministic gradient on CUDA, and at up to half the size every entry is used.
    table = F.interpolate(table, size, mode="bilinear", align_corners=False)
    expanded = expand_relative_bias(table[0].permute(1, 2, 0))
    return expanded[0] if by_head else expanded


def expand_relative_bias(table: Tensor) -> Tensor:
    """Returns the bias of each pair of cells, [1, heads, HW, HW], from that of each relative position.

    Args:
        table: Bias of each relative position, [2H - 1, 2W - 1, heads]; the middle is that of a cell and itself.
    """
    height, width = (table.shape[0] + 1) // 2, (table.shape[1] + 1) // 2
    shifted = table.unfold(0, height, 1).unfold(1, width, 1)  # [H, W, heads, H, W]: [y, x, :, a, b] is at y+a, x+b
    return shifted.flip(3, 4).permute(2, 0, 1, 3, 4).reshape(1, -1, height * width, height * width)
