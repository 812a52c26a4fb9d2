"""timm's (1.0.31) transformers with one position embedding a patch, at other sizes: CaiT, ConViT, EVA, Hiera, NesT, ...

Embeddings are interpolated bicubically and antialiased, as by timm's ``set_input_size`` where a model has it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models.cait import Cait
from timm.models.coat import CoaT
from timm.models.convit import GPSA, ConVit
from timm.models.eva import Eva
from timm.models.gemma4_vit import Gemma4VitEncoder
from timm.models.hiera import Hiera
from timm.models.nest import Nest, NestLevel, blockify, deblockify
from timm.models.pit import PoolingVisionTransformer
from timm.models.tnt import TNT
from timm.models.visformer import Visformer
from timm.models.volo import VOLO
from torch import Tensor, nn

from dlo_framework.model_sizes import Size
from dlo_tasks.imagenet.size_substitution import (
    SizedModel,
    SizedModule,
    derive,
    grids_of,
    resize_map,
    resize_tokens,
)

_Substitutions = list[tuple[nn.Module, dict[str, Any]]]


def free_embeddings(model: nn.Module) -> bool:
    """Makes a model of these families accept any size; returns whether it is one."""
    mixin = next((mixin for family, mixin in _MIXINS.items() if isinstance(model, family)), None)
    if mixin is None and not isinstance(model, Nest):
        return False
    for part in model.modules():
        if isinstance(part, PatchEmbed):
            part.strict_img_size = False
        elif isinstance(part, NestLevel):
            derive(part, _SizedLevel)
        elif isinstance(part, GPSA):
            derive(part, _SizedGPSA, grids_of(model))
    if mixin is not None:
        derive(model, mixin)
    return True


def embedding_multiples(part: nn.Module) -> list[int]:
    """Returns the divisors of a model's heights and widths."""
    model: Any = part
    if isinstance(part, TNT):
        return [int(side) for side in model.pixel_embed.patch_size]
    if isinstance(part, VOLO):
        return [_volo_stride(model)]
    if isinstance(part, Hiera):
        return [stride * unit for stride, unit in zip(model.patch_stride, model.mask_unit_size, strict=True)]
    if isinstance(part, Visformer):
        return [model.img_size[0] // model.pos_embed3.shape[2]] if model.pos_embed3 is not None else []
    if isinstance(part, Gemma4VitEncoder):
        return [int(side) * int(model.pooling_kernel_size) for side in model.patch_size]
    if isinstance(part, CoaT):
        return [int(model.patch_embed1.patch_size[0]) * 8]
    if isinstance(part, Nest):
        return [int(model.patch_size) * math.isqrt(model.levels[0].pos_embed.shape[1])]
    return []


class _SizedTokens(SizedModel):
    """CaiT and ConViT: embeddings of patches, without a class token's."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own, grid = tuple(model.patch_embed.grid_size), model.patch_embed.dynamic_feat_size((height, width))
        grids_of(model).note(grid)
        embedding = getattr(model, "pos_embed", None)
        return [] if grid == own or embedding is None else [(model, {"pos_embed": resize_tokens(embedding, own, grid)})]


class _SizedGPSA(SizedModule):
    """ConViT's attention, whose relative positions timm makes for square maps."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        side = math.isqrt(x.shape[1])
        height, width = grids_of(self).grid_of(x.shape[1], (side, side))
        if height == width:  # It makes them itself.
            return {}
        weight = self.qk.weight  # type: ignore[attr-defined]
        rows = torch.arange(height, dtype=torch.float32).repeat_interleave(width)
        columns = torch.arange(width, dtype=torch.float32).repeat(height)
        down, across = rows[None] - rows[:, None], columns[None] - columns[:, None]
        offsets = torch.stack([across, down, across**2 + down**2], dim=-1)[None]  # [1, N, N, 3]
        return {"rel_indices": offsets.to(weight.device, weight.dtype)}


class _SizedEva(SizedModel):
    """EVA, EVA-02, DINOv3 and other models of timm's `Eva`: embeddings of patches, and rotations by position."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own, grid = tuple(model.patch_embed.grid_size), model.patch_embed.dynamic_feat_size((height, width))
        if model.dynamic_img_size or grid == own:
            return []
        values: dict[str, Any] = {}
        if model.pos_embed is not None:
            prefix = 0 if model.no_embed_class else model.num_prefix_tokens
            values["pos_embed"] = resize_tokens(model.pos_embed, own, grid, prefix)
        if hasattr(model.rope, "update_feat_shape"):
            values["rope"] = _rotations(model.rope, grid)
        return [(model, values), (model.patch_embed, {"grid_size": grid})]


def _rotations(rope: nn.Module, grid: Size) -> nn.Module:
    """Returns a module with the same parameters for another grid."""
    rope = rope._modules.get("module") or rope  # The placeholder of a pipeline's stage has the module's attributes.
    found: Any = copy.copy(rope)
    vars(found)["_buffers"] = dict(rope._buffers)
    vars(found)["_non_persistent_buffers_set"] = set(rope._non_persistent_buffers_set)
    found.update_feat_shape(grid)
    return found


class _SizedPit(SizedModel):
    """PiT: an embedding of the map after overlapping patches."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        patches, embedding = model.patch_embed.conv, model.pos_embed
        sides = zip((height, width), patches.padding, patches.kernel_size, patches.stride, strict=True)
        rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side, padding, kernel, stride in sides)
        grid = rows, columns
        same = grid == tuple(embedding.shape[-2:])
        return [] if same else [(model, {"pos_embed": resize_map(embedding, grid)})]


class _SizedVisformer(SizedModel):
    """Visformer: an embedding of each stage's map."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        if (height, width) == tuple(model.img_size):
            return []
        values = {}
        for name in ("pos_embed1", "pos_embed2", "pos_embed3"):
            embedding = getattr(model, name)
            if embedding is not None:
                sides = zip((height, width), embedding.shape[-2:], model.img_size, strict=True)
                values[name] = resize_map(embedding, tuple(side * cells // own for side, cells, own in sides))
        return [(model, values)]


def _volo_stride(model: Any) -> int:
    patches = model.patch_embed
    stem = patches.conv[0].stride[0] if patches.conv is not None else 1
    return int(stem * patches.proj.stride[0] * model.pooling_scale)


class _SizedVolo(SizedModel):
    """VOLO: an embedding of the map after its outlookers, channels last."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        stride, embedding = _volo_stride(model), model.pos_embed
        grid = height // stride, width // stride
        if embedding is None or grid == tuple(embedding.shape[1:3]):
            return []
        return [(model, {"pos_embed": resize_map(embedding.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)})]


class _SizedTnt(SizedModel):
    """TNT: embeddings of patches and a class token; those of pixels in a patch stay."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        pixels = model.pixel_embed
        own, grid = tuple(pixels.grid_size), pixels.dynamic_feat_size((height, width))
        if grid == own:
            return []
        cells = grid[0] * grid[1]
        embedding = resize_tokens(model.patch_pos, own, grid, 1)
        sizes = {"img_size": (height, width), "num_patches": cells, "grid_size": grid}
        return [(model, {"patch_pos": embedding, "num_patches": cells}), (pixels, sizes)]


class _SizedHiera(SizedModel):
    """Hiera: an embedding of the map, and the order of tokens in mask units."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own = list(model.tokens_spatial_shape)
        grid = [side // stride for side, stride in zip((height, width), model.patch_stride, strict=True)]
        if grid == own or len(own) != 2:
            return []
        values: dict[str, Any] = {
            "tokens_spatial_shape": grid,
            "mask_spatial_shape": [side // unit for side, unit in zip(grid, model.mask_unit_size, strict=True)],
        }
        if model.pos_embed is not None and model.pos_embed_win is None:
            values["pos_embed"] = resize_tokens(model.pos_embed, (own[0], own[1]), (grid[0], grid[1]))
        scaled = {
            index: (strides, [side * new // old for side, new, old in zip(size, grid, own, strict=True)])
            for index, (strides, size) in model.reroll.schedule.items()
        }
        rolled = {"size": grid, "schedule": scaled}
        return [(model, values), (model.unroll, {"size": grid}), (model.reroll, rolled)]


class _SizedLevel(SizedModule):
    """A level of NesT: the number of its blocks stays, and their size grows with a square image."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        level: Any = self
        blocks = math.isqrt(level.pos_embed.shape[1])
        halves = 1 if isinstance(level.pool, nn.Identity) else 2
        side = x.shape[-2] // halves // blocks
        if side == level.block_size:
            return {}
        cells = deblockify(level.pos_embed, level.block_size).permute(0, 3, 1, 2)
        resized = resize_map(cells, (side * blocks, side * blocks)).permute(0, 2, 3, 1)
        return {"block_size": side, "pos_embed": blockify(resized, side)}


class _SizedCoat(SizedModel):
    """CoaT, which encodes positions by convolutions over the map of each of its stages."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        grid, found = (height, width), []
        for stage in range(1, 5):
            patches = getattr(model, f"patch_embed{stage}")
            grid = patches.dynamic_feat_size(grid)
            found.append((patches, {"grid_size": grid}))
        return found


_MIXINS: dict[type[nn.Module], type] = {
    Cait: _SizedTokens,
    CoaT: _SizedCoat,
    ConVit: _SizedTokens,
    Eva: _SizedEva,
    PoolingVisionTransformer: _SizedPit,
    Visformer: _SizedVisformer,
    VOLO: _SizedVolo,
    TNT: _SizedTnt,
    Hiera: _SizedHiera,
}
