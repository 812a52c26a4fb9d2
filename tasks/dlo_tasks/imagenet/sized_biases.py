"""timm's (1.0.31) transformers with attention biases of relative positions, at other sizes.

* BEiT (Bao et al. 2021, arXiv 2106.08254) and ViTs with relative positions resize their tables as timm's
  ``set_input_size`` does: those of near patches stay, and the distances between the others grow.
* LeViT and EfficientFormer have tables of distances; they are interpolated bicubically, as timm does for TinyViT.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp, gen_relative_log_coords, gen_relative_position_index
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit, RelativePositionBias
from timm.models.beit import gen_relative_position_index as beit_index
from timm.models.efficientformer import Attention as EfficientFormerAttention
from timm.models.efficientformer import EfficientFormer
from timm.models.efficientformer_v2 import Attention2d, Attention2dDownsample, EfficientFormerV2
from timm.models.levit import Attention as LevitAttention
from timm.models.levit import AttentionDownsample, Downsample, Levit
from timm.models.mvitv2 import MultiScaleAttention, MultiScaleAttentionPoolFirst, MultiScaleVit
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.model_sizes import Size
from dlo_tasks.imagenet.size_substitution import (
    SizedModel,
    SizedModule,
    derive,
    grids_of,
    resize_quadrant,
    resize_table,
    resize_tokens,
    substituted,
)

_Substitutions = list[tuple[nn.Module, dict[str, Any]]]
_WINDOW = "_dlo_window"


def free_biases(model: nn.Module) -> bool:
    """Makes a model of these families accept any size; returns whether it is one."""
    mixin = next((mixin for family, mixin in _MODELS.items() if isinstance(model, family)), None)
    if mixin is None and not isinstance(model, EfficientFormerV2 | MultiScaleVit):
        return False
    grids = grids_of(model)
    for part in model.modules():
        kind = next((mixin for family, mixin in _PARTS.items() if isinstance(part, family)), None)
        if kind is not None:
            derive(part, kind, grids)
    if isinstance(model, Beit | VisionTransformerRelPos):
        patches: Any = model.patch_embed
        patches.strict_img_size = False
    if mixin is not None:
        derive(model, mixin)
    return True


def bias_multiples(part: nn.Module) -> list[int]:
    """Returns the divisors of a model's heights and widths."""
    model: Any = part
    if isinstance(part, Beit | VisionTransformerRelPos):
        return [int(side) for side in model.patch_embed.patch_size]
    if isinstance(part, Levit):
        return [_levit_stride(model)]
    if isinstance(part, EfficientFormer | EfficientFormerV2):
        return [32]
    return []


# --- BEiT, and ViTs with relative positions ----------------------------------------------------------------


class _SizedBeit(SizedModel):
    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own, grid = tuple(model.patch_embed.grid_size), model.patch_embed.dynamic_feat_size((height, width))
        grids_of(model).note(grid)
        if grid == own or model.pos_embed is None:
            return []
        return [(model, {"pos_embed": resize_tokens(model.pos_embed, own, grid, model.num_prefix_tokens)})]


def _beit_values(module: Any, grid: Size) -> dict[str, Any]:
    table = module.relative_position_bias_table
    return {
        "window_size": grid,
        "window_area": grid[0] * grid[1],
        "relative_position_bias_table": resize_table(table, tuple(module.window_size), grid),
        "relative_position_index": beit_index(grid, device=table.device),
    }


class _SizedBeitAttention(SizedModule):
    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        if module.window_size is None:
            return {}
        own = tuple(module.window_size)
        grid = grids_of(module).grid_of(x.shape[1] - 1, own)
        return {} if grid == own else _beit_values(module, grid)


class _SizedBeitBias:
    """BEiT's table of all blocks."""

    def forward(self) -> Tensor:
        module: Any = self
        own = tuple(module.window_size)
        grid = grids_of(module).latest or own
        with substituted(module, {} if grid == own else _beit_values(module, grid)):
            found: Tensor = super().forward()  # type: ignore[misc]
        return found


class _SizedRelPos:
    """timm's `RelPosBias` and `RelPosMlp` for the map that their attention has named."""

    def get_bias(self) -> Tensor:
        module: Any = self
        own = tuple(module.window_size)
        grid = vars(module).get(_WINDOW, own)
        with substituted(module, {} if grid == own else _bias_values(module, grid)):
            found: Tensor = super().get_bias()  # type: ignore[misc]
        return found


def _bias_values(module: Any, grid: Size) -> dict[str, Any]:
    cells = grid[0] * grid[1]
    if isinstance(module, RelPosBias):
        table = module.relative_position_bias_table
        index = gen_relative_position_index(grid, class_token=module.prefix_tokens > 0, device=table.device)
        return {
            "bias_shape": (cells + module.prefix_tokens,) * 2 + (table.shape[1],),
            "relative_position_bias_table": resize_table(table, (module.window_size[0], module.window_size[1]), grid),
            "relative_position_index": index.view(-1),
        }
    weight = module.mlp.fc1.weight
    coordinates = gen_relative_log_coords(
        grid, module.pretrained_window_size, mode=module.mode, device=weight.device, dtype=weight.dtype
    )
    return {
        "bias_shape": (cells, cells, module.bias_shape[2]),
        "relative_position_index": gen_relative_position_index(grid, device=weight.device).view(-1),
        "rel_coords_log": coordinates,
    }


class _SizedRelPosAttention(SizedModule):
    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        bias = module.rel_pos
        if bias is not None:
            own = tuple(bias.window_size)
            vars(bias)[_WINDOW] = grids_of(module).grid_of(x.shape[1] - bias.prefix_tokens, own)
        return {}


class _SizedRelPosViT(SizedModel):
    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        grid = model.patch_embed.dynamic_feat_size((height, width))
        grids_of(model).note(grid)
        if model.shared_rel_pos is not None:
            vars(model.shared_rel_pos)[_WINDOW] = grid
        return []


# --- tables of distances -----------------------------------------------------------------------------------


def _distance_values(module: Any, own: Size, grid: Size, index: Tensor) -> dict[str, Any]:
    """Returns a table of distances for another map; timm caches it in evaluation, by device."""
    biases = resize_quadrant(module.attention_biases, own, grid)
    return {"attention_biases": biases, "attention_bias_idxs": index, "attention_bias_cache": {}}


def _levit_stride(model: Any) -> int:
    return int(model.feature_info[0]["reduction"])


class _SizedLevit(SizedModel):
    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        stride = _levit_stride(model)
        grid = height // stride, width // stride
        for _ in model.stages:
            grids_of(model).note(grid)
            grid = (grid[0] - 1) // 2 + 1, (grid[1] - 1) // 2 + 1
        return []


class _SizedLevitAttention(SizedModule):
    """Both of LeViT's attentions: a sequence of cells, or a map with convolutions."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        own = tuple(module.resolution)
        grid = (x.shape[2], x.shape[3]) if x.ndim == 4 else grids_of(module).grid_of(x.shape[1], own)
        if grid == own:
            return {}
        with substituted(module, {"resolution": grid}):
            index = module._compute_attention_bias_idxs(device=module.attention_biases.device)
        return {"resolution": grid, **_distance_values(module, own, grid, index)}


class _SizedDownsample(SizedModule):
    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        return {"resolution": grids_of(module).grid_of(x.shape[1], tuple(module.resolution))}


class _SizedEfficientFormer(SizedModel):
    def substitutions(self, height: int, width: int) -> _Substitutions:
        grids_of(self).note((math.ceil(height / 32), math.ceil(width / 32)))
        return []


class _SizedEfficientFormerAttention(SizedModule):
    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        cells = module.attention_biases.shape[1]
        side = math.isqrt(cells)  # It is built for square maps.
        grid = grids_of(module).grid_of(x.shape[1], (side, side))
        if grid == (side, side):
            return {}
        return _distance_values(module, (side, side), grid, _distance_index(grid, module.attention_biases))


def _distance_index(grid: Size, like: Tensor) -> Tensor:
    """Returns the index of each pair's distance, [N, N]."""
    rows = torch.arange(grid[0], device=like.device).repeat_interleave(grid[1])
    columns = torch.arange(grid[1], device=like.device).repeat(grid[0])
    return (rows[:, None] - rows[None]).abs() * grid[1] + (columns[:, None] - columns[None]).abs()


class _SizedAttention2d(SizedModule):
    """EfficientFormerV2's attention: some compute it on a map of half the size."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        own, grid = tuple(module.resolution), (x.shape[2], x.shape[3])
        stride_conv = getattr(module, "stride_conv", None)
        if stride_conv is not None:
            stride = stride_conv.conv.stride[0]
            grid = math.ceil(grid[0] / stride), math.ceil(grid[1] / stride)
        if grid == own:
            return {}
        half = math.ceil(grid[0] / 2), math.ceil(grid[1] / 2)
        sizes = {"resolution": grid, "N": grid[0] * grid[1], "resolution2": half, "N2": half[0] * half[1]}
        with substituted(module, sizes):
            index = module._compute_attention_bias_idxs(device=module.attention_biases.device)
        return {**sizes, **_distance_values(module, own, grid, index)}


# --- tables of offsets, in each direction ------------------------------------------------------------------


class _SizedMultiScaleAttention:
    """MViTv2's attention (Li et al. 2022, arXiv 2112.01526): tables are interpolated linearly, as in its own code.

    timm reads them at other sizes without, from a wrong middle on small maps and beyond the end on large ones.
    """

    def forward(self, x: Tensor, feat_size: Any) -> Any:
        """Returns attention over ``x``, [B, N, C], and the size of its map."""
        part: Any = self
        values: dict[str, Any] = {}
        if part.rel_pos_type == "spatial":
            strides = [(1, 1) if pool is None else _pair(pool.stride) for pool in (part.pool_q, part.pool_k)]
            for axis, name in enumerate(("rel_pos_h", "rel_pos_w")):
                offsets = 2 * max((feat_size[axis] - 1) // stride[axis] + 1 for stride in strides) - 1
                table = getattr(part, name)
                if offsets != table.shape[0]:
                    values[name] = F.interpolate(table.T[None], offsets, mode="linear", align_corners=False)[0].T
        with substituted(part, values):
            return super().forward(x, feat_size)  # type: ignore[misc]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


_MODELS: dict[type[nn.Module], type] = {
    Beit: _SizedBeit,
    VisionTransformerRelPos: _SizedRelPosViT,
    Levit: _SizedLevit,
    EfficientFormer: _SizedEfficientFormer,
}
_PARTS: dict[type[nn.Module], type] = {
    BeitAttention: _SizedBeitAttention,
    RelativePositionBias: _SizedBeitBias,
    RelPosAttention: _SizedRelPosAttention,
    RelPosBias: _SizedRelPos,
    RelPosMlp: _SizedRelPos,
    LevitAttention: _SizedLevitAttention,
    AttentionDownsample: _SizedLevitAttention,
    Downsample: _SizedDownsample,
    EfficientFormerAttention: _SizedEfficientFormerAttention,
    MultiScaleAttention: _SizedMultiScaleAttention,
    MultiScaleAttentionPoolFirst: _SizedMultiScaleAttention,
    Attention2d: _SizedAttention2d,
    Attention2dDownsample: _SizedAttention2d,
}
